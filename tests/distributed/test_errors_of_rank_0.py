"""Only rank 0 reads files and the owner of --save. All ranks raise the errors that rank 0 finds."""

import logging
import re
from dataclasses import replace
from unittest import mock

import torch.distributed as dist

from megatron.checkpoint import manager, selection
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.manager import SaveError
from megatron.checkpoint.ranks import first_problem
from megatron.checkpoint.saving import publishing
from megatron.checkpoint.saving.background import DirectFiles
from megatron.checkpoint.selection import select_valid_checkpoint
from megatron.errors import UserError
from megatron.files import HostileFileError
from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, unconnected_run
from tests.support.pool import run_world
from tests.support.trainers import make_trainer, outcome
from tests.unit.checkpoint.saved_runs import Run, steps_in


class FailingOwner:
    """An owner file. Reads raise OSError from attempt number `first` on."""

    def __init__(self, first):
        self.looks, self.first = 0, first

    def problem(self):
        self.looks += 1
        if self.looks >= self.first:
            raise OSError(5, "Input/output error", "owner file")


def fail(*_, **__):
    raise OSError(13, "Permission denied", "the folder")


def meet_errors(folder):
    """Returns the errors of saves and starts on which rank 0 cannot read the owner file or list the
    folder."""
    engine = build_engine(config_of(Row(dp=2, zero=1)))
    rank_0, found = engine.global_rank == 0, []

    def save(owner=None):
        try:
            make_manager(engine, folder, owner).save(state_after(9))
        except SaveError as error:
            # Each rank asks for the free space on its own, and the free space changes.
            found.append(re.sub(r"[\d,.]+ MB are free", "N MB are free", str(error)))

    for first_failure in (1, 2):
        save(FailingOwner(first_failure) if rank_0 else None)
    names = ("is_same_checkpoint", "start_identity")
    failing = {name: fail if rank_0 else getattr(manager, name) for name in names}
    damaged = {"find_checkpoint": fail if rank_0 else selection.find_checkpoint}
    damaged["first_problem"] = lambda *_: "a file is damaged"
    config = replace(engine.run.config, checkpoint=replace(engine.run.config.checkpoint, load="/load"))
    checkpoint = open_checkpoint(folder / "global_step2")
    checkpoints = make_manager(engine, folder)
    with (
        mock.patch.multiple(manager, **failing),
        mock.patch.object(publishing.Folder, "begin", fail if rank_0 else publishing.Folder.begin),
        mock.patch.multiple(selection, **damaged),
    ):
        save()
        for call in (
            lambda: checkpoints.newest_valid(True),
            lambda: select_valid_checkpoint(checkpoint, unconnected_run(config)),
            lambda: checkpoints.restore_or_init(None, lambda text: None),
        ):
            checkpoints.identity = checkpoint if rank_0 else None  # any object with a lineage
            try:
                call()
            except UserError as error:
                found.append(str(error))
    return found


def test_an_error_on_rank_0_is_raised_on_all_ranks(tmp_path):
    Run(tmp_path, tmp_path).save(1, 2)
    first, second = run_world(2, meet_errors, tmp_path)
    assert first == second and len(first) == 6
    expected = ("Input/output error", "Input/output error", *["Permission denied"] * 4)
    assert all(text in sentence for text, sentence in zip(expected, first, strict=True))
    assert "--load /load cannot be read" in first[4]
    assert steps_in(tmp_path) == [1, 2]


def save_to_read_only(folder):
    """Returns the error of a save into a folder that has become read-only, and DeepSpeed's log lines."""
    engine, error, lines = build_engine(config_of(Row(dp=2, zero=1))), "", []
    handler, logger = logging.Handler(logging.ERROR), logging.getLogger("DeepSpeed")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)

    def make_folder(_, path):
        if path != folder:
            raise OSError(30, "Read-only file system", str(path))

    with mock.patch.object(DirectFiles, "make_folder", make_folder):
        try:
            make_manager(engine, folder).save(state_after(9))
        except SaveError as found:
            error = str(found)
    logger.removeHandler(handler)
    return error, lines


def test_a_folder_that_becomes_read_only_is_one_sentence(tmp_path):
    for error, lines in run_world(2, save_to_read_only, tmp_path):
        assert "Read-only file system" in error and lines == []


def lose_the_folder():
    """Trains while rank 0's heartbeat finds a new owner of the folder during the third step."""
    trainer = make_trainer(config_of(Row(dp=2, zero=1)))
    steps = trainer.metrics.steps

    class Owner:
        @property
        def lost_reason(self):
            return "the folder was taken over" if len(steps) >= 2 else None

    owner = Owner() if trainer.engine.global_rank == 0 else None
    checkpoints = make_manager(trainer.engine, "", owner)
    trainer = replace(trainer, checkpoints=checkpoints)
    logged, _, end = outcome(trainer)
    return sorted(logged), end


def test_a_job_that_lost_its_folder_stops_after_the_step_on_all_ranks():
    (steps, first), (same_steps, second) = run_world(2, lose_the_folder)
    assert steps == same_steps == [1, 2, 3]
    assert first == "the folder was taken over" and "lost the --save folder" in second


def read_a_malicious_file():
    def find_problem(name):
        if dist.get_rank() == 1:
            raise HostileFileError(f"{name} may be malicious")

    try:
        first_problem(["first", "second"], find_problem)
    except UserError as error:
        return str(error)


def test_an_error_of_one_rank_that_shares_the_reading_of_files_is_raised_on_all_ranks():
    assert run_world(2, read_a_malicious_file) == ["second may be malicious"] * 2
