"""Runs of the tiny model that save to a bucket, on simulated nodes. All functions run inside `run_world`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, train, unconnected_run


def run_in_bucket(
    row: Row,
    url: str,
    environment: Mapping[str, str],
    nodes: Sequence[str],
    last: int,
    saves: Mapping[int, str],
    **settings: Any,
) -> tuple[int, str, list[tuple[float, float]]]:
    """Trains to the step `last`. Returns (step of the start, log line of the start, (loss, grad norm) of each
    step).

    nodes: the name of each rank's node. Each node has a cache in SLURM_TMPDIR. saves: step -> 'direct',
    'background' or 'rollback'.
    """
    import os
    from pathlib import Path

    import torch.distributed as dist

    from megatron.checkpoint.folders.of_run import open_folders
    from megatron.checkpoint.selection import find_checkpoint, select_valid_checkpoint

    os.environ.update(environment)
    config = config_of(row, checkpoint={"save": url, "load": url, **settings})
    rank = dist.get_rank()
    with ExitStack() as stack:
        folders = stack.enter_context(open_folders(config.checkpoint, nodes[rank]))
        found = None
        if rank == 0:
            folders.read()
            found = find_checkpoint(unconnected_run(config), path_of=folders.at)
        folders.connect(nodes[rank])
        assert [len(ranks) for ranks in folders.nodes.ranks] == [
            nodes.count(node) for node in dict.fromkeys(nodes)
        ]
        found = select_valid_checkpoint(found, unconnected_run(config), folders=folders)
        manager = make_manager(build_engine(config), url, folders=folders)
        lines: list[str] = []
        state, history = manager.restore_or_init(found, lambda text: lines.append(str(text))), []
        for step in range(state.iteration, last):
            history += train(manager.engine, [step])
            kind = saves.get(step + 1)
            if kind in ("direct", "background"):
                manager.save(state_after(step + 1), kind == "background")
            elif kind == "rollback":
                before = manager.rollback()
                assert before is not None
                history += train(manager.engine, range(before.state.iteration, step + 1))
        manager.finish_save()
        assert all(not end.problem for end in manager.background.take_outcomes())
        # Only small files remain on a disk.
        dist.barrier()
        names = {path.name for path in Path(os.environ["SLURM_TMPDIR"]).rglob("*") if path.is_file()}
        assert names <= {"lock", "latest", "latest.json", "run.json"}
        dist.barrier()
    return state.iteration, lines[0], history
