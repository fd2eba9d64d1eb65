"""A run that saves small checkpoints with the program's own functions, for tests without an engine."""

import dataclasses
import errno
import json
import os
import re
import secrets
from pathlib import Path

from megatron.checkpoint import files as checkpoint_files
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import add_checksum, describe_file
from megatron.checkpoint.lineage.identity import LineageEntry
from megatron.checkpoint.lineage.start import (
    check_load_folder,
    check_save_folder,
    check_save_is_outside_checkpoints,
    choose_checkpoint,
    start_identity,
)
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.saving import publishing
from megatron.config import CheckpointConfig
from tests.support.layouts import Row, config_of

FILE = "layer_01-model_00-model_states.pt"


class Killed(BaseException):
    """Stands for SIGKILL: no code handles it."""


class Run:
    """A run that saves checkpoints of one small file with the program's own functions."""

    def __init__(self, save, load=None, checkpoint=None, old_format=False, **flags):
        self.folder, self.old_format = Path(save), old_format
        load = None if load is None else str(load)
        self.options = CheckpointConfig(save=str(save), load=load, **flags)
        self.config = dataclasses.replace(config_of(Row()), checkpoint=self.options)
        check_save_is_outside_checkpoints(self.config)
        self.folder.mkdir(exist_ok=True)
        check_load_folder(self.config)
        self.start = checkpoint or choose_checkpoint(self.options, None)
        check_save_folder(self.start, self.config)
        self.identity = start_identity(self.start, self.options)

    @property
    def started_from(self):
        return None if self.start is None else self.start.folder.name

    def save(self, *steps, protected=None):
        for step in steps:
            folder = publishing.Folder(self.folder)
            folder.begin("")
            entry = self.write(step)
            self.identity = folder.publish(self.saving(entry), entry, self.identity)
            folder.delete_old(self.identity, self.options, protected)
        return self

    def saving(self, entry):
        """Returns the folder of the unpublished checkpoint."""
        (saving,) = self.folder.glob(f"saving-{entry.name}.*")
        return saving

    def write(self, step):
        """Writes an unpublished checkpoint. Returns its lineage entry."""
        name = f"global_step{step}"
        saving = self.folder / publishing.saving_name(name)
        saving.mkdir()
        (saving / FILE).write_text(f"weights of {self.identity.run_id} at {step}, {secrets.token_hex(4)}")
        run = {
            "state": dataclasses.asdict(TrainingState(iteration=step)),
            "files": {FILE: describe_file(saving / FILE)},
            **self.identity.record(),
        }
        if self.old_format:
            run["lineage"] = [entry.name for entry in self.identity.lineage]
            del run["run_id"], run["origin"]
        run = add_checksum(run)
        (saving / "run.json").write_text(json.dumps(run))
        run_id = None if self.old_format else self.identity.run_id
        return LineageEntry(name, step, run_id, run["sha256"])


def old_folder(folder, *steps):
    """Writes checkpoints in the form that they had before run ids existed."""
    run = Run(folder, folder, old_format=True).save(*steps)
    (folder / "latest.json").unlink()
    return run


def make_unreadable(patch, *paths):
    """Makes every attempt to open one of these files, or to list one of these folders, an I/O error. Returns
    the list of waits between attempts."""
    waits = []

    def failing(function):
        def call(name, *args, **kwargs):
            parent = Path() if isinstance(name, int) else Path(name).parent
            if parent in paths or (function is open_file and Path(name) in paths):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(name, *args, **kwargs)

        return call

    open_file = os.open
    patch.setattr(os, "open", failing(os.open))
    patch.setattr(os, "stat", failing(os.stat))
    patch.setattr(checkpoint_files.time, "sleep", waits.append)
    return waits


def steps_in(folder):
    return sorted(int(re.sub(r"\D", "", path.name)) for path in folder.glob("global_step*"))


def digest(folder, step):
    return open_checkpoint(folder / f"global_step{step}").run["sha256"]


def damage(folder, step, file=FILE):
    (folder / f"global_step{step}" / file).write_text("{")
