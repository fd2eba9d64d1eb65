"""A --save or --load folder in an object store, and its mirror.

An object store has no rename. The files of a save are uploaded below a key that no other save has,
global_step4.<8 hexadecimal digits>/; `run.json` is uploaded last, and a folder without it does not exist for
any reader. Before a save or a deletion begins, an empty object saving-<folder> announces it, so that a later
save removes what a killed job has left.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import file_sizes
from megatron.checkpoint.lineage.identity import (
    LATEST_FILE,
    RECORD_FILE,
    LineageEntry,
    RunIdentity,
    read_latest_record,
    record_upcoming,
)
from megatron.checkpoint.lineage.owner import ClaimFolder
from megatron.checkpoint.names import check_file
from megatron.checkpoint.object_store.mirror import explained_full_disk, show_object
from megatron.checkpoint.record import RUN_FILE, SAVING
from megatron.checkpoint.saving.publishing import publish, remove_checkpoint
from megatron.errors import UserError
from megatron.files import MAX_JSON_BYTES, HostileFileError, write_json
from megatron.object_store.store import ObjectInfo, ObjectStore, Retries
from megatron.text_table import first_few

# A checkpoint's folder in a store. A folder that a user has copied from a file system has no suffix.
FOLDER = re.compile(r"global_step[0-9]{1,12}(\.[0-9a-f]{8})?")
_CLAIMS = "owner"
_THREADS = 8
# A file is downloaded in blocks of this size, by several threads.
_BLOCK_BYTES = 1 << 26
# They end before another job may take over the folder, see `Timing.stale_after_s`.
_COMMIT = Retries(total_s=25.0, request_s=20.0)
_LOG = logging.getLogger(__name__)


class ObjectClaims(ClaimFolder):
    """The owner files of a folder in an object store: objects in its folder `owner`. `write` also creates an
    object that does not exist. A job that has lost the folder may fill its file again, but the new owner
    has a higher number."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return self._store.url

    def names(self) -> list[str]:
        return [key.removeprefix(f"{_CLAIMS}/") for key in self._store.list(_CLAIMS)]

    def read(self, name: str) -> bytes | None:
        try:
            return self._store.read(f"{_CLAIMS}/{name}")
        except FileNotFoundError:
            return None

    def create(self, name: str) -> None:
        self.write(name, b"")

    def write(self, name: str, content: bytes) -> None:
        self._store.put(f"{_CLAIMS}/{name}", content)

    def remove(self, name: str) -> None:
        # A job prints its error only after this request, even if the store does not answer.
        self._store.delete([f"{_CLAIMS}/{name}"], Retries(attempts=2, request_s=10.0))


class ObjectFolder:
    """A folder of checkpoints in an object store. path: its mirror."""

    def __init__(self, url: str, path: Path) -> None:
        self.store = ObjectStore(url)
        self.path = path
        self.folders: dict[str, str] = {}
        """Checkpoint -> its folder in the store. On rank 0 all, on other ranks those that were shared."""
        self.fetched: dict[str, set[str]] = defaultdict(set)
        """Checkpoint -> the files that this rank has downloaded."""
        self._leftovers: set[str] = set()
        self._replaced: list[tuple[str, str]] = []

    # --- what the store holds ---

    def mirror(self) -> None:
        """Makes the mirror show what the store holds, on rank 0: one listing, then the small files.

        A job that is killed while it replaces a checkpoint leaves two complete folders of it. The mirror
        shows the one whose digest `latest.json` has, or else the newest.
        """
        listed = self.store.list()
        files: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
        for key, info in listed.items():
            folder, _, name = key.partition("/")
            with suppress(HostileFileError):  # no checkpoint has such a file
                if name and FOLDER.fullmatch(folder):
                    files[folder][check_file(name, self.store.url)] = info
            if key.startswith(SAVING) and FOLDER.fullmatch(key.removeprefix(SAVING)):
                self._leftovers.add(key.removeprefix(SAVING))
        run_files = [_run_file(folder) for folder in files if RUN_FILE in files[folder]]
        small = [key for key in (LATEST_FILE, RECORD_FILE, *run_files) if key in listed]
        with ThreadPoolExecutor(_THREADS) as pool:
            contents = dict(zip(small, pool.map(partial(self._read_small, listed), small), strict=True))
        if listed:
            self.path.mkdir(parents=True, exist_ok=True)
        for key in (LATEST_FILE, RECORD_FILE):
            if (content := contents.get(key)) is not None:
                show_object(self.path / key, listed[key].size, listed[key].modified, content)
        record = read_latest_record(self.path)
        digests = {entry.sha256 for entry in record.entries} if record is not None else set()

        def priority(folder: str) -> tuple[bool, float]:
            content = contents[_run_file(folder)] or b""
            return _digest_in(content) in digests, listed[_run_file(folder)].modified

        complete = (folder for folder in files if contents.get(_run_file(folder)) is not None)
        for folder in sorted(complete, key=priority):
            name = folder.partition(".")[0]
            if name in self.folders:
                self._replaced.append((name, self.folders[name]))
            self.folders[name] = folder
        for name, folder in self.folders.items():
            for file, info in files[folder].items():
                content = contents[_run_file(folder)] if file == RUN_FILE else None
                show_object(self.path / name / file, info.size, info.modified, content or b"")

    def _read_small(self, listed: Mapping[str, ObjectInfo], key: str) -> bytes | None:
        """Returns the content of a small file; None if it has been deleted since the listing. Of a file that
        is too large, it returns b"", and its reader reports the size."""
        try:
            return self.store.read(key) if listed[key].size <= MAX_JSON_BYTES else b""
        except FileNotFoundError:
            return None

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the sizes of a checkpoint's files except `run.json`, on rank 0."""
        sizes = file_sizes(self.path / name)
        return {file: size for file, size in sizes.items() if file != RUN_FILE}

    def show(self, name: str, run: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """Makes a mirror show one checkpoint, with placeholders of its files."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        for file, size in sizes.items():
            show_object(self.path / name / file, size)
        write_json(self.path / name / RUN_FILE, run)

    def fetch(self, name: str, file: str, heartbeat: Callable[[], object]) -> None:
        """Downloads a file of a checkpoint into the mirror, in blocks. heartbeat: called after each.
        Raises OSError if it cannot be read."""
        path = self.path / name / file
        key, size = f"{self.folders[name]}/{file}", path.stat().st_size
        temporary = path.with_name(f".{path.name}.part")

        def download(start: int) -> None:
            self.store.download(key, temporary, start, min(start + _BLOCK_BYTES, size))

        try:
            with explained_full_disk(path):
                with open(temporary, "wb") as part:
                    part.truncate(size)
                with ThreadPoolExecutor(_THREADS) as pool:
                    for _ in pool.map(download, range(0, size, _BLOCK_BYTES)):
                        heartbeat()
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.fetched[name].add(file)

    # --- a save ---

    def begin(self, saving_name: str) -> None:
        """Announces a save, on rank 0, and removes what killed and failed saves have left. saving_name: the
        temporary name of the save in the mirror."""
        self._clean_leftovers()
        self._announce(saving_name.removeprefix(SAVING))

    def _announce(self, folder: str) -> None:
        self._leftovers.add(folder)
        self.store.put(f"{SAVING}{folder}", b"")

    def _forget(self, folder: str) -> None:
        self.store.delete([f"{SAVING}{folder}"])
        self._leftovers.discard(folder)

    def upload(self, saving: Path, names: Collection[str], count_bytes: Callable[[int], object]) -> None:
        """Uploads files of a save, and deletes them on the disk. saving: their folder in the mirror.
        count_bytes: called with the bytes of each file. Raises OSError."""
        for name in sorted(names):
            size = (saving / name).stat().st_size
            self.store.put_file(f"{saving.name.removeprefix(SAVING)}/{name}", saving / name)
            count_bytes(size)
            (saving / name).unlink()

    def show_uploaded(self, saving: Path, names: Collection[str]) -> None:
        """Makes the mirror show which files of a save are in the store, with their sizes. On rank 0."""
        folder = saving.name.removeprefix(SAVING)
        listed = self.store.list(folder)
        for name in names:
            if (info := listed.get(f"{folder}/{name}")) is not None:
                show_object(saving / name, info.size, info.modified)

    def publish(
        self,
        saving: Path,
        entry: LineageEntry,
        identity: RunIdentity,
        check_owner: Callable[[], object] = lambda: None,
    ) -> RunIdentity:
        """Makes an uploaded checkpoint visible and updates `latest`, on rank 0, as `publish` does in a file
        system. Returns the run's new identity. Raises OSError if it cannot be made visible.

        check_owner: raises an error if another job has taken over the folder. Called directly before each
        request for `run.json`.
        """
        folder = saving.name.removeprefix(SAVING)
        record_upcoming(self.path, entry, identity)
        self.store.put_file(RECORD_FILE, self.path / RECORD_FILE)
        self._commit(folder, (saving / RUN_FILE).read_bytes(), check_owner)
        self._leftovers.discard(folder)
        before = self.folders.get(entry.name)
        identity = publish(saving, entry, identity)
        self.folders[entry.name] = folder
        try:
            for name in (LATEST_FILE, RECORD_FILE):
                self.store.put_file(name, self.path / name)
            self.store.delete([f"{SAVING}{folder}"])
            if before is not None:
                self._delete(before)
        except OSError as error:  # the checkpoint is visible: a resume finds it through `latest.json`
            _LOG.warning("%s is saved, but the objects beside it are not updated: %s", self.store.url, error)
        return identity

    def _commit(self, folder: str, content: bytes, check_owner: Callable[[], object]) -> None:
        check_owner()
        try:
            self.store.put(_run_file(folder), content, _COMMIT)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            check_owner()  # waits until the store answers
            self.store.put(_run_file(folder), content, _COMMIT)

    # --- a deletion ---

    def remove(self, checkpoint: Path) -> None:
        """Deletes a checkpoint, on rank 0. checkpoint: its folder in the mirror. Raises OSError if it
        contains files that `run.json` does not list, or if the store cannot be accessed."""
        with suppress(FileNotFoundError):  # an earlier deletion removed `run.json` and then failed
            self._delete(self.folders[checkpoint.name])
        del self.folders[checkpoint.name]
        remove_checkpoint(checkpoint)

    def _delete(self, folder: str) -> None:
        found = self.store.list(folder)
        try:
            own = {RUN_FILE, *json.loads(self.store.read(_run_file(folder)))["files"]}
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"{self.store.url}/{_run_file(folder)} is damaged") from error
        if unlisted := sorted(found.keys() - {f"{folder}/{name}" for name in own}):
            raise OSError(
                f"{self.store.url} contains {first_few(unlisted)}, which {RUN_FILE} beside it does not list"
            )
        self._announce(folder)
        self.store.delete([_run_file(folder)])  # without it, the rest does not exist for any reader
        self.store.delete(found)
        self._forget(folder)

    def _clean_leftovers(self) -> None:
        """Removes what killed jobs and failed saves have left. Failures are logged, not raised."""
        replaced, self._replaced = self._replaced, []
        for name, folder in replaced:
            try:
                open_checkpoint(self.path / name)
                self._delete(folder)
            except UserError:
                continue  # the new one is damaged: keep the old one
            except OSError as error:
                _LOG.warning("%s/%s cannot be deleted: %s", self.store.url, folder, error)
                if error.errno == errno.EIO:
                    return  # after minutes of retries
        for folder in sorted(self._leftovers):
            try:
                found = self.store.list(folder)
                if _run_file(folder) not in found:
                    self.store.abort_uploads(folder)
                    self.store.delete(found)
                self._forget(folder)
            except OSError as error:
                _LOG.warning("%s/%s cannot be removed: %s", self.store.url, folder, error)
                if error.errno == errno.EIO:
                    return


def _run_file(folder: str) -> str:
    """Returns the key of the `run.json` of a checkpoint."""
    return f"{folder}/{RUN_FILE}"


def _digest_in(content: bytes) -> Any:
    """Returns the checksum in the content of a `run.json`; None if it is damaged."""
    try:
        return json.loads(content)["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
