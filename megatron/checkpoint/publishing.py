"""The files of --save around a save: room before it, the new checkpoint in its place, old ones deleted."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from megatron.checkpoint.discovery import REPLACED, RUN_FILE, SAVING, open_checkpoint
from megatron.checkpoint.integrity.files import sync_file
from megatron.checkpoint.lineage.identity import CHECKPOINT_NAME, LineageEntry, RunIdentity
from megatron.checkpoint.lineage.latest import announce, point_to
from megatron.config import CheckpointConfig, ConfigError

# A checkpoint of these names is a job's unfinished save: of one attempt, or as this repo wrote them before.
_UNFINISHED = re.compile(rf"{SAVING}global_step[0-9]+(\.[0-9a-f]{{8}})?")

_LOG = logging.getLogger(__name__)


def saving_name(name: str, identity: RunIdentity) -> str:
    """The folder's name while a checkpoint is written. Another in each job: a process of a job that is over
    may still write to its own."""
    return f"{SAVING}{name}.{identity.attempt}"


def clean_leftovers(folder: Path) -> None:
    """Removes what killed saves left behind, and finishes or undoes an interrupted replacement. To be called
    by the owner of the folder, before a save needs the space. A failure is logged."""
    for path in sorted(folder.iterdir()):
        try:
            if _UNFINISHED.fullmatch(path.name):
                _remove(path)
            elif path.name.endswith(REPLACED) and CHECKPOINT_NAME.fullmatch(path.name.removesuffix(REPLACED)):
                _settle_replaced(path, path.with_name(path.name.removesuffix(REPLACED)))
        except OSError as error:
            _LOG.warning("%s cannot be removed: %s", path, error)


def _settle_replaced(replaced: Path, final: Path) -> None:
    if not final.exists():
        os.rename(replaced, final)
        return
    try:
        open_checkpoint(final)
    except ConfigError:
        return  # the old one may be worth more
    _remove(replaced)


def publish(saving: Path, entry: LineageEntry, identity: RunIdentity) -> RunIdentity:
    """Renames a complete checkpoint into place and lets `latest` name it; returns the run's new identity.
    What is complete is found at every instant, under one name or another."""
    folder = saving.parent
    sync_file(saving)
    announce(folder, entry, identity)
    final = folder / entry.name
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        own = (before for before in identity.lineage if before.name == entry.name)
        if not any(is_in_place(folder, before) for before in own):
            _LOG.warning("%s of another branch or run is replaced", final)
        if _is_unknown(final):
            kept = final.with_name(f"unknown-{final.name}.{secrets.token_hex(4)}")
            _LOG.warning("%s has no %s, so nothing says whose it is: it is kept as %s", final, RUN_FILE, kept)
            os.rename(final, kept)
        else:
            _remove(replaced)
            os.rename(final, replaced)
    os.rename(saving, final)
    sync_file(folder)
    identity = identity.after(entry)
    point_to(folder, entry, identity)
    try:
        _remove(replaced)
    except OSError as error:
        _LOG.warning("%s cannot be removed: %s", replaced, error)
    return identity


def _is_unknown(folder: Path) -> bool:
    """Whether it holds files and no `run.json`: another program's checkpoint, or what is left of one."""
    return not (folder / RUN_FILE).exists() and any(folder.iterdir())


def remove_old(folder: Path, identity: RunIdentity, options: CheckpointConfig, protected: str | None) -> None:
    """Deletes what --keep-last does not keep. identity: with the new checkpoint at the end of its lineage.

    protected: a name that stays in any case. Only checkpoints that this run saved are deleted: the lineage
    also has those of the run that it began from. The digest of `run.json` identifies them. A failure is
    logged.
    """
    if options.keep_last is None:
        return
    interval, kept = options.save_retain_interval, 0
    for entry in reversed([entry for entry in identity.lineage if identity.saved(entry)]):
        path = folder / entry.name
        if kept < options.keep_last:
            kept += is_in_place(folder, entry)
        elif entry.name == protected or (interval and entry.iteration % interval == 0):
            continue
        elif is_in_place(folder, entry):
            try:
                _remove(path)
            except OSError as error:
                _LOG.warning("the old checkpoint %s cannot be deleted: %s", path, error)


def is_in_place(folder: Path, entry: LineageEntry) -> bool:
    """Whether the checkpoint of this name in the folder is the one of the lineage."""
    if CHECKPOINT_NAME.fullmatch(entry.name) is None or not (folder / entry.name / RUN_FILE).is_file():
        return False
    try:
        found = open_checkpoint(folder / entry.name, with_files=False).run
    except ConfigError:
        return False
    if entry.sha256 is None:  # from before run ids: the name is all that is known
        return "run_id" not in found
    return bool(found["sha256"] == entry.sha256)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # what it points to is somebody's elsewhere
    elif folder.exists():
        if not _UNFINISHED.fullmatch(folder.name):
            # The rest takes time, in which the job may be killed: `clean_leftovers` then finds it.
            name = folder.name.removesuffix(REPLACED)
            folder = folder.rename(folder.with_name(f"{SAVING}{name}.{secrets.token_hex(4)}"))
        shutil.rmtree(folder)
