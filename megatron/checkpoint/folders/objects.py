"""A --save or --load folder in an object store.

An object store has no rename. The files of a save are uploaded to a folder (key prefix) that no other save
uses, global_step4.<8 hexadecimal digits>/. `run.json` is uploaded last; readers ignore a folder without it.
Before a save or a deletion begins, an empty object saving-<folder> announces it, so that a later save can
remove what a killed job left behind.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import Files, first_size_mismatch
from megatron.checkpoint.lineage.identity import (
    LATEST_FILE,
    RECORD_FILE,
    LineageEntry,
    RunIdentity,
    read_latest_record,
    record_upcoming,
    set_latest,
)
from megatron.checkpoint.lineage.owner import ClaimFolder
from megatron.checkpoint.names import check_file
from megatron.checkpoint.record import RUN_FILE, SAVING
from megatron.checkpoint.saving.publishing import Folder, free_space_text, warn_of_replacement
from megatron.errors import UserError
from megatron.files import MAX_JSON_BYTES, HostileFileError
from megatron.object_store.cache import explained_full_disk
from megatron.object_store.path import ObjectPath, ObjectTree
from megatron.object_store.store import ObjectInfo, ObjectStore, Retries
from megatron.text_table import first_few

# Name of a checkpoint's folder in a store. A folder that a user copied from a file system has no suffix.
FOLDER = re.compile(r"global_step[0-9]{1,12}(\.[0-9a-f]{8})?")
_CLAIMS = "owner"
_THREADS = 8
# These retries end before another job may take over the folder, see `Timing.stale_after_s`.
_COMMIT = Retries(total_s=25.0, request_s=20.0)
_LOG = logging.getLogger(__name__)


class ObjectClaims(ClaimFolder):
    """The owner files of a folder in an object store: objects in its folder `owner`. `write` also creates an
    object that does not exist. A job that has lost the folder may therefore write its file again, but the new
    owner has a higher number."""

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
        # A job prints its error only after this request, so the request must end even if the store does not
        # answer.
        self._store.delete([f"{_CLAIMS}/{name}"], Retries(attempts=2, request_s=10.0))


class ObjectFolder(Folder):
    """A folder of checkpoints in an object store."""

    def __init__(self, url: str, cache: Path) -> None:
        """cache: a folder on the node's disk for the files of checkpoints. Sends no request."""
        self.store = ObjectStore(url)
        self.tree = ObjectTree(self.store, cache)
        super().__init__(ObjectPath(self.tree))
        self.keys: dict[str, str] = {}
        """Checkpoint -> its folder in the store. Rank 0 knows all checkpoints, other ranks only the
        checkpoints that it shared."""
        self._leftovers: set[str] = set()
        self._replaced: dict[str, str] = {}
        """Folder in the store -> the checkpoint in it, whose current files are in a different folder."""

    def claims(self) -> ClaimFolder:
        return ObjectClaims(self.store)

    # --- what the store holds ---

    def read(self) -> None:
        """Reads from the store, on rank 0, which checkpoints it holds: one listing, then the small files.

        A job that is killed while it replaces a checkpoint leaves two complete folders of this checkpoint.
        The folder whose digest is in `latest.json` is used, otherwise the newer one.
        """
        listed = self.store.list()
        self.tree.folders = {"": {}} if listed else {}
        self.keys, self._leftovers, self._replaced = {}, set(), {}
        files: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
        for key, info in listed.items():
            folder, _, name = key.partition("/")
            with suppress(HostileFileError):  # a checkpoint never contains such a file
                if name and FOLDER.fullmatch(folder):
                    files[folder][check_file(name, self.store.url)] = info
            if key.startswith(SAVING) and FOLDER.fullmatch(key.removeprefix(SAVING)):
                self._leftovers.add(key.removeprefix(SAVING))
        run_files = [_run_file(folder) for folder in files if RUN_FILE in files[folder]]
        small = [key for key in (LATEST_FILE, RECORD_FILE, *run_files) if key in listed]
        with ThreadPoolExecutor(_THREADS) as pool:
            contents = dict(zip(small, pool.map(partial(self._read_small, listed), small), strict=True))
        for key in (LATEST_FILE, RECORD_FILE):
            if (content := contents.get(key)) is not None:
                self.tree.keep(key, content, listed[key].modified)
        record = read_latest_record(self.path)
        digests = {entry.sha256 for entry in record.entries} if record is not None else set()

        def priority(folder: str) -> tuple[bool, float]:
            key = _run_file(folder)
            return _digest_in(contents[key] or b"") in digests, listed[key].modified

        complete = (folder for folder in files if contents.get(_run_file(folder)) is not None)
        for folder in sorted(complete, key=priority):
            name = folder.partition(".")[0]
            if name in self.keys:
                self._replaced[self.keys[name]] = name
            self.add(name, folder, files[folder], contents[_run_file(folder)])

    def _read_small(self, listed: Mapping[str, ObjectInfo], key: str) -> bytes | None:
        """Returns the content of a small file; None if it has been deleted since the listing. If a file
        is too large, it returns only as many bytes as its reader needs to reject it."""
        is_small = listed[key].size <= MAX_JSON_BYTES
        try:
            return self.store.read(key, end=None if is_small else MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            return None

    def add(self, name: str, key: str, files: dict[str, ObjectInfo], run_file: bytes | None = None) -> None:
        """Adds a complete checkpoint; replaces an earlier one of the same name. key: its folder in the store.
        run_file: the content of its `run.json`; only rank 0 passes it."""
        self.keys[name] = key
        self.tree.folders[name] = files
        if run_file is not None:
            self.tree.keep(_run_file(name), run_file)

    def fetch(self, name: str, file: str, heartbeat: Callable[[], object]) -> None:
        """Downloads a file of a checkpoint into the cache. heartbeat: called after each block. Raises OSError
        if the file cannot be read."""
        path, size = self.tree.cache / name / file, (self.path / name / file).stat().st_size
        temporary = path.with_name(f".{path.name}.part")
        try:
            with explained_full_disk(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.store.download(f"{self.keys[name]}/{file}", temporary, size, heartbeat)
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove_fetched(self) -> None:
        """Removes the files of checkpoints from the node's disk, except `run.json`."""
        for path in self.tree.cache.glob("global_step*/**/*"):
            if path.is_file() and path.name != RUN_FILE:
                path.unlink(missing_ok=True)

    # --- a save ---

    def begin(self, saving_name: str) -> None:
        self._clean_leftovers()
        self._announce(saving_name.removeprefix(SAVING))

    def _announce(self, folder: str) -> None:
        self._leftovers.add(folder)
        self.store.put(f"{SAVING}{folder}", b"")

    def _forget(self, folder: str) -> None:
        self.store.delete([f"{SAVING}{folder}"])
        self._leftovers.discard(folder)

    def staging(self, saving_name: str) -> Path:
        for path in self.tree.cache.glob(f"{SAVING}*"):  # files of a save that has failed on another rank
            if path.name != saving_name:
                shutil.rmtree(path, ignore_errors=True)
        return self.tree.cache / saving_name

    def upload(self, saving: Path, names: Collection[str], count_bytes: Callable[[int], object]) -> None:
        for name in sorted(names):
            size = (saving / name).stat().st_size
            self.store.put_file(f"{saving.name.removeprefix(SAVING)}/{name}", saving / name)
            count_bytes(size)
            (saving / name).unlink()

    def size_mismatch(self, saving: Path, files: Files) -> str | None:
        folder = saving.name.removeprefix(SAVING)
        listed = self.store.list(folder).items()
        self.tree.folders[saving.name] = {key.removeprefix(f"{folder}/"): info for key, info in listed}
        return first_size_mismatch(self.path / saving.name, files)

    def publish(
        self,
        saving: Path,
        entry: LineageEntry,
        identity: RunIdentity,
        check_owner: Callable[[], object] = lambda: None,
    ) -> RunIdentity:
        folder, content = saving.name.removeprefix(SAVING), (saving / RUN_FILE).read_bytes()
        record_upcoming(self.path, entry, identity)
        cached = self.tree.cache / _run_file(entry.name)
        cached.parent.mkdir(parents=True, exist_ok=True)
        self._commit(folder, content, check_owner)
        # The checkpoint is complete from now on, whatever the node's disk does: a rename needs no space.
        os.replace(saving / RUN_FILE, cached)
        self._leftovers.discard(folder)
        shutil.rmtree(saving, ignore_errors=True)
        before = self.keys.get(entry.name)
        if before is not None:
            warn_of_replacement(self.path / entry.name, identity)
        files = self.tree.folders.pop(saving.name)
        self.add(entry.name, folder, {**files, RUN_FILE: ObjectInfo(len(content), time.time())})
        identity = identity.with_checkpoint(entry)
        try:
            set_latest(self.path, entry, identity)
            self.store.delete([f"{SAVING}{folder}"])
            if before is not None:
                self._delete(before)
        except OSError as error:  # the checkpoint is already visible: a resume finds it through `latest.json`
            _LOG.warning("%s is saved, but the objects beside it are not updated: %s", self.store.url, error)
        return identity

    def note_on_space(self, problem: str) -> str:
        disk = next(path for path in (self.tree.cache, *self.tree.cache.parents) if path.exists())
        return f"; the node's disk: {free_space_text(disk)}"

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
        name = checkpoint.name
        with suppress(FileNotFoundError):  # an earlier deletion removed `run.json` and then failed
            self._delete(self.keys[name])
        del self.keys[name]
        self.tree.folders.pop(name, None)
        shutil.rmtree(self.tree.cache / name, ignore_errors=True)

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
        self.store.delete([_run_file(folder)])  # without it, readers ignore all other files
        self.store.delete(found)
        self._forget(folder)

    def _clean_leftovers(self) -> None:
        """Removes what killed jobs and failed saves left behind. Failures are logged, not raised."""
        replaced, self._replaced = self._replaced, {}
        for folder in (*replaced, *sorted(self._leftovers - replaced.keys())):
            try:
                if folder in replaced:
                    open_checkpoint(self.path / replaced[folder])
                    self._delete(folder)
                    continue
                found = self.store.list(folder)
                if _run_file(folder) not in found:
                    self.store.abort_uploads(folder)
                    self.store.delete(found)
                self._forget(folder)
            except UserError:
                continue  # the new checkpoint is damaged: keep the old one
            except OSError as error:
                _LOG.warning("%s/%s cannot be removed: %s", self.store.url, folder, error)
                if error.errno == errno.EIO:
                    return  # after minutes of retries


def _run_file(folder: str) -> str:
    return f"{folder}/{RUN_FILE}"


def _digest_in(content: bytes) -> Any:
    """Returns the checksum in the content of a `run.json`; None if it is damaged."""
    try:
        return json.loads(content)["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
