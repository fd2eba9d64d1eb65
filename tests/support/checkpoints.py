"""Checkpoints of the tiny model of `layouts.py`. All functions run inside `run_world`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.checkpoint.record import TrainingState
from tests.support.layouts import FINGERPRINT as FINGERPRINT
from tests.support.layouts import GLOBAL_BATCH, SEQ, Row, build_engine, config_of, train

if TYPE_CHECKING:
    from megatron.checkpoint.folders.of_run import Folders
    from megatron.checkpoint.lineage.owner import FolderOwner
    from megatron.checkpoint.local.saves import LocalCheckpoints
    from megatron.checkpoint.manager import CheckpointManager
    from megatron.engine.pipeline_engine import GPTEngine


def state_after(steps: int) -> TrainingState:
    """Returns the training state of a run after `steps` steps."""
    return TrainingState(steps, steps * GLOBAL_BATCH, steps * GLOBAL_BATCH * SEQ)


def make_manager(
    engine: GPTEngine,
    folder: Path | str,
    owner: FolderOwner | None = None,
    local: LocalCheckpoints | None = None,
    folders: Folders | None = None,
) -> CheckpointManager:
    """Returns a manager that saves checkpoints of the engine to the folder, and loads them."""
    from torch.distributed.distributed_c10d import _get_default_store

    from megatron.checkpoint.manager import CheckpointManager

    store = _get_default_store()
    places = {"local": local, **({} if folders is None else {"folders": folders})}
    return CheckpointManager(engine, folder, owner, store=store, **places)


def save_midway(row: Row, folder: Path, steps: int, **changes: dict[str, Any]) -> GPTEngine:
    """Trains the tiny model from step 0 and writes `global_step{steps}`. Returns the engine."""
    engine = build_engine(config_of(row, **changes))
    train(engine, range(steps))
    make_manager(engine, folder).save(state_after(steps))
    return engine


@contextmanager
def all_tensors_staged(piece_bytes: int) -> Iterator[None]:
    """Makes saves copy all tensors as they copy tensors of a device, through buffers of `piece_bytes`
    bytes."""
    from megatron.checkpoint.formats import archive_writer
    from megatron.checkpoint.saving import background

    buffers = archive_writer.StagingBuffers(piece_bytes)
    with (
        mock.patch.object(archive_writer, "is_staged", lambda device: True),
        mock.patch.object(background, "is_staged", lambda device: True),
        mock.patch.object(archive_writer, "_buffers", lambda: buffers),
    ):
        yield
