"""Saves to a folder: removes what killed jobs left, renames the new checkpoint into place, deletes old
ones."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.discovery import open_checkpoint, open_or_none
from megatron.checkpoint.files import DISK_IS_FULL, RETRY_DELAYS_S, Files, first_size_mismatch
from megatron.checkpoint.lineage.identity import (
    CHECKPOINT_NAME,
    LATEST_FILE,
    LineageEntry,
    RunIdentity,
    record_upcoming,
    set_latest,
)
from megatron.checkpoint.lineage.owner import ClaimFolder
from megatron.checkpoint.record import REPLACED, RUN_FILE, SAVING
from megatron.config import CheckpointConfig
from megatron.errors import UserError, is_access_error, one_line
from megatron.files import HostileFileError, read_json, sync_file
from megatron.object_store.path import ObjectPath
from megatron.text_table import first_few

# Folder names of unfinished saves. Older versions wrote names without a suffix.
UNFINISHED = re.compile(rf"{SAVING}global_step[0-9]+(\.[0-9a-f]{{8}})?")

_LOG = logging.getLogger(__name__)


def saving_name(name: str) -> str:
    """Returns a temporary name for a checkpoint that is being written or deleted. The name differs in each
    save, because a process of a previous job may still be writing."""
    return f"{SAVING}{name}.{secrets.token_hex(4)}"


def with_final_names(text: str) -> str:
    """Returns a message about a save with the checkpoint's final name instead of its temporary name."""
    return re.sub(rf"{SAVING}(global_step[0-9]+)(\.[0-9a-f]{{8}})?", r"\1", text)


class Folder:
    """A --save folder in a file system. (`ObjectFolder` is a --save folder in an object store.)

    path: the folder of the checkpoints; an `ObjectPath` in an object store. The argument `saving` of methods
    is the folder with the files of a save on this rank's node, under its temporary name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def claims(self) -> ClaimFolder:
        """Returns the owner files of the folder, which show which job may write to it."""
        return ClaimFolder(self.path)

    def begin(self, saving_name: str) -> None:
        """Removes unfinished saves of killed jobs, and finishes or undoes an interrupted replacement. Only
        the owner of the folder may call it, before each save. Failures are logged, not raised."""
        for path in sorted(self.path.iterdir() if self.path.is_dir() else ()):
            name = path.name.removesuffix(REPLACED)
            try:
                if UNFINISHED.fullmatch(path.name):
                    remove_checkpoint(path)
                elif name != path.name and CHECKPOINT_NAME.fullmatch(name):
                    _finish_replacement(path, path.with_name(name))
            except OSError as error:
                _LOG.warning("%s cannot be removed: %s", path, error)

    def staging(self, saving_name: str) -> Path:
        """Returns the folder `saving` of a new save."""
        return self.path / saving_name

    def upload(self, saving: Path, names: Collection[str], count_bytes: Callable[[int], object]) -> None:
        """Moves files of a save to the object store; does nothing in a file system. count_bytes: called with
        the number of bytes of each file. Raises OSError."""

    def size_mismatch(self, saving: Path, files: Files) -> str | None:
        """Returns, on rank 0, which file of a save is missing or has the wrong size; None if none is."""
        return first_size_mismatch(saving, files)

    def publish(
        self,
        saving: Path,
        entry: LineageEntry,
        identity: RunIdentity,
        check_owner: Callable[[], object] = lambda: None,
    ) -> RunIdentity:
        """Gives a complete checkpoint its name and updates `latest`, on rank 0. Returns the run's new
        identity. At any time each complete checkpoint has a name under which a resume finds it. Raises
        OSError if the checkpoint cannot get its name.

        check_owner: raises an error if another job has taken over the folder. An object store calls it
        immediately before each request for `run.json`.
        """
        folder = saving.parent
        sync_file(saving)
        record_upcoming(folder, entry, identity)
        final = folder / entry.name
        replaced = final.with_name(f"{final.name}{REPLACED}")
        for old in (replaced, final):
            _set_aside_unknown(old)
        if final.exists():
            warn_of_replacement(final, identity)
            remove_checkpoint(replaced)
            os.rename(final, replaced)
        os.rename(saving, final)
        identity = identity.with_checkpoint(entry)
        try:
            sync_file(folder)
            set_latest(folder, entry, identity)
        # The checkpoint already has its name: a resume finds it through `latest.json`.
        except OSError as error:
            _LOG.warning("%s is saved, but %s cannot be updated: %s", final, folder / LATEST_FILE, error)
        try:
            remove_checkpoint(replaced)
        except OSError as error:
            _LOG.warning("%s cannot be removed: %s", replaced, error)
        return identity

    def remove(self, checkpoint: Path) -> None:
        """Deletes a checkpoint, on rank 0. Raises OSError if it contains files that `run.json` does not list,
        or if it cannot be accessed."""
        remove_checkpoint(checkpoint)

    def delete_old(self, identity: RunIdentity, options: CheckpointConfig, protected: str | None) -> None:
        """Deletes the checkpoints that --keep-last does not keep. identity: the run, whose lineage ends with
        the new checkpoint.

        protected: name of a checkpoint that is always kept. Deletes only checkpoints that this run saved,
        identified by the checksum of `run.json`, and none of the run that this run started from. Failures are
        logged, not raised.
        """
        if options.keep_last is None:
            return
        interval, kept = options.save_retain_interval, 0
        earlier = (0, *(entry.iteration for entry in identity.lineage))
        for entry, previous in reversed([*zip(identity.lineage, earlier, strict=False)]):
            if not identity.saved(entry):
                continue
            path = self.path / entry.name
            try:
                if kept < options.keep_last:
                    kept += is_same_checkpoint(self.path, entry, ())
                elif entry.name == protected or (
                    interval and entry.iteration // interval > previous // interval
                ):
                    continue
                elif is_same_checkpoint(self.path, entry, ()):
                    self.remove(path)
            except OSError as error:
                _LOG.warning("the old checkpoint %s cannot be deleted: %s", path, error)
                if isinstance(path, ObjectPath) and error.errno == errno.EIO:
                    return  # the object store has not answered for minutes

    def note_on_space(self, problem: str) -> str:
        """Returns a text on the free space of the disk; "" if the problem of a save says that the disk is
        full."""
        return "" if DISK_IS_FULL in problem else f"; {free_space_text(self.path)}"


def _finish_replacement(replaced: Path, final: Path) -> None:
    if not final.exists():
        os.rename(replaced, final)
        return
    try:
        open_checkpoint(final)
    except UserError:
        return  # the new checkpoint is damaged: keep the old one
    remove_checkpoint(replaced)


def warn_of_replacement(checkpoint: Path, identity: RunIdentity) -> None:
    """Logs a warning if a save replaces a checkpoint that is not in the lineage of the run."""
    own = (entry for entry in identity.lineage if entry.name == checkpoint.name)
    with suppress(OSError):
        if any(is_same_checkpoint(checkpoint.parent, entry, ()) for entry in own):
            return
    _LOG.warning("replacing %s, which belongs to another branch or run", checkpoint)


def _set_aside_unknown(folder: Path) -> None:
    """Renames the folder if its files may not belong to this run, so that a save does not delete them. It is
    renamed if it cannot be read now, if it has files but no `run.json` (a complete or incomplete checkpoint
    of another framework), or if its `run.json` does not list all of its files."""
    if not folder.exists():
        return
    try:
        if not (folder / RUN_FILE).exists() and any(folder.iterdir()):
            reason = f"has no {RUN_FILE}, so its run is not known"
        elif unlisted := _unlisted(folder):
            reason = _unlisted_text(unlisted)
        else:
            return
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    kept = folder.with_name(f"unknown-{folder.name}.{secrets.token_hex(4)}")
    _LOG.warning("%s %s: it is kept as %s", folder, reason, kept)
    os.rename(folder, kept)


def _unlisted(folder: Path) -> list[str]:
    """Returns the names in a checkpoint's folder that its `run.json` does not list, such as another run's
    checkpoints. A save writes no sub-folders, so without an intact `run.json` it returns all sub-folders.
    Raises OSError if the folder cannot be read now."""
    try:
        own = {RUN_FILE, *read_json(folder / RUN_FILE)["files"]}
    except (OSError, ValueError, KeyError, TypeError, HostileFileError) as error:
        if is_access_error(error):
            raise
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path.name for path in folder.iterdir() if path.name not in own)


def _unlisted_text(names: list[str]) -> str:
    return f"contains {first_few(map(one_line, names))}, which {RUN_FILE} does not list"


def is_same_checkpoint(
    folder: Path, entry: LineageEntry, retry_delays_s: Sequence[float] = RETRY_DELAYS_S
) -> bool:
    """Returns whether the checkpoint with the entry's name in `folder` is the checkpoint of the entry. Raises
    OSError if it cannot be read now. retry_delays_s: () if retries would delay every save."""
    if CHECKPOINT_NAME.fullmatch(entry.name) is None or not (folder / entry.name / RUN_FILE).is_file():
        return False
    found = open_or_none(folder / entry.name, retry_delays_s)
    if found is None or entry.sha256 is None:  # of a version without run ids: only the name can be compared
        return found is not None and "run_id" not in found.run
    return bool(found.run["sha256"] == entry.sha256)


def remove_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint or an unfinished save. Raises OSError if it contains unlisted files."""
    if folder.is_symlink():
        folder.unlink()  # removes a link, never the target of the link
    elif folder.exists():
        if unlisted := _unlisted(folder):
            raise OSError(f"it {_unlisted_text(unlisted)}")
        if not UNFINISHED.fullmatch(folder.name):
            # The deletion takes time. If the job is killed during it, `Folder.begin` removes the rest.
            folder = folder.rename(folder.with_name(saving_name(folder.name.removesuffix(REPLACED))))
        shutil.rmtree(folder)


def free_space_text(folder: Path) -> str:
    """Returns a text on the free space of a folder's disk."""
    try:
        free = shutil.disk_usage(folder).free
        return f"{free / 1e6:,.1f} MB are free there" if free else DISK_IS_FULL
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"
