"""Runs of the tiny model that save to the disks of simulated nodes. A disk is a folder. All functions run
inside `run_world`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, train, unconnected_run

if TYPE_CHECKING:
    from megatron.checkpoint.manager import CheckpointManager
    from megatron.checkpoint.record import Checkpoint, TrainingState


@dataclass(frozen=True)
class Started:
    """A run after its start. checkpoint: the checkpoint from which it started; None if it initialized from
    scratch."""

    manager: CheckpointManager
    checkpoint: Checkpoint | None
    state: TrainingState
    line: str
    """The log line of the start."""


def start(row: Row, folder: Path, nodes: Sequence[str], **settings: Any) -> Started:
    """Starts or resumes a run that saves to `folder`/save and to the disks `folder`/disks/<node>.

    nodes: the name of each rank's node. settings: fields of CheckpointConfig.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from megatron.checkpoint.local.saves import LocalCheckpoints
    from megatron.checkpoint.local.start import select_checkpoint
    from megatron.checkpoint.selection import find_checkpoint

    save = str(folder / "save")
    Path(save).mkdir(parents=True, exist_ok=True)
    places = {"save": save, "load": save, "save_local": str(folder / "disks" / "{node}")}
    config = config_of(row, checkpoint={**places, "save_local_interval": 1, **settings})
    rank, options = dist.get_rank(), config.checkpoint
    found = find_checkpoint(unconnected_run(config)) if rank == 0 else None
    local = None
    if options.save_local is not None:
        local = LocalCheckpoints.connect(options, nodes[rank], _get_default_store())
    found = select_checkpoint(found, local, unconnected_run(config), lambda: None)
    manager = make_manager(build_engine(config), Path(save), local=local)
    lines: list[str] = []
    state = manager.restore_or_init(found, lambda text: lines.append(str(text)))
    return Started(manager, found, state, lines[0])


def run_on_nodes(
    row: Row, folder: Path, nodes: Sequence[str], last: int, saves: Mapping[int, str], **settings: Any
) -> tuple[int, str, list[tuple[float, float]]]:
    """Trains to the step `last`. saves: step -> 'local' or 'shared'. Returns (step of the start, log line of
    the start, (loss, grad norm) of each step)."""
    started = start(row, folder, nodes, **settings)
    manager, history = started.manager, []
    for step in range(started.state.iteration, last):
        history += train(manager.engine, [step])
        kind = saves.get(step + 1)
        if kind == "shared":
            manager.save(state_after(step + 1))
        elif kind == "local":
            assert manager.save_local(state_after(step + 1))
            outcome = manager.finish_save()
            assert outcome is not None and outcome.problem == "" and outcome.is_local
    return started.state.iteration, started.line, history
