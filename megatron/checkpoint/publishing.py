"""File operations of a save: removes leftovers, renames the new checkpoint into place, deletes old ones."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.discovery import REPLACED, RUN_FILE, SAVING, open_checkpoint
from megatron.checkpoint.integrity.files import sync_file
from megatron.checkpoint.lineage.identity import CHECKPOINT_NAME, LineageEntry, RunIdentity
from megatron.checkpoint.lineage.latest import record_upcoming, set_latest
from megatron.config import CheckpointConfig, ConfigError

# Names of unfinished saves; the suffix is the job's attempt, which older versions did not write.
_UNFINISHED = re.compile(rf"{SAVING}global_step[0-9]+(\.[0-9a-f]{{8}})?")

_LOG = logging.getLogger(__name__)


def saving_name(name: str, identity: RunIdentity) -> str:
    """The folder's name while a checkpoint is written. It differs in each job, because a process of a
    previous job may still be writing."""
    return f"{SAVING}{name}.{identity.attempt}"


def clean_leftovers(folder: Path) -> None:
    """Removes unfinished saves of killed jobs, and finishes or undoes an interrupted replacement. Only the
    owner of the folder may call it. Failures are logged, not raised."""
    for path in sorted(folder.iterdir()):
        try:
            if _UNFINISHED.fullmatch(path.name):
                _remove(path)
            elif path.name.endswith(REPLACED) and CHECKPOINT_NAME.fullmatch(path.name.removesuffix(REPLACED)):
                _finish_replacement(path, path.with_name(path.name.removesuffix(REPLACED)))
        except OSError as error:
            _LOG.warning("%s cannot be removed: %s", path, error)


def _finish_replacement(replaced: Path, final: Path) -> None:
    if not final.exists():
        os.rename(replaced, final)
        return
    try:
        open_checkpoint(final)
    except ConfigError:
        return  # the new one is damaged: keep the old one
    _remove(replaced)


def publish(saving: Path, entry: LineageEntry, identity: RunIdentity) -> RunIdentity:
    """Renames a complete checkpoint into place and updates `latest`; returns the run's new identity. At every
    instant each complete checkpoint has a name under which a resume finds it."""
    folder = saving.parent
    sync_file(saving)
    record_upcoming(folder, entry, identity)
    final = folder / entry.name
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        if entry.name not in {before.name for before in identity.lineage}:
            _LOG.warning("replacing %s, which belongs to another branch or run", final)
        _remove(replaced)
        os.rename(final, replaced)
    os.rename(saving, final)
    sync_file(folder)
    identity = identity.with_checkpoint(entry)
    set_latest(folder, entry, identity)
    try:
        _remove(replaced)
    except OSError as error:
        _LOG.warning("%s cannot be removed: %s", replaced, error)
    return identity


def delete_old_checkpoints(
    folder: Path, lineage: Sequence[LineageEntry], options: CheckpointConfig, protected: str | None
) -> None:
    """Deletes the checkpoints that --keep-last does not keep. lineage: of this run, oldest first, the new
    checkpoint last.

    protected: name of a checkpoint that is always kept. Only checkpoints of the lineage are deleted,
    identified by the checksum of their `run.json`. Failures are logged, not raised.
    """
    if options.keep_last is None:
        return
    interval, kept = options.save_retain_interval, 0
    for entry in reversed(lineage):
        path = folder / entry.name
        if kept < options.keep_last:
            kept += is_same_checkpoint(folder, entry)
        elif entry.name == protected or (interval and entry.iteration % interval == 0):
            continue
        elif is_same_checkpoint(folder, entry):
            try:
                _remove(path)
            except OSError as error:
                _LOG.warning("the old checkpoint %s cannot be deleted: %s", path, error)


def is_same_checkpoint(folder: Path, entry: LineageEntry) -> bool:
    """Whether the folder's checkpoint of this name is the one in the lineage entry."""
    if CHECKPOINT_NAME.fullmatch(entry.name) is None or not (folder / entry.name / RUN_FILE).is_file():
        return False
    try:
        found = open_checkpoint(folder / entry.name, with_files=False).run
    except ConfigError:
        return False
    if entry.sha256 is None:  # written before run ids existed: only the name can be compared
        return "run_id" not in found
    return bool(found["sha256"] == entry.sha256)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # never delete the target of a link
    elif folder.exists():
        # run.json first: without it the folder counts as incomplete if the job is killed during the deletion.
        (folder / RUN_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)
