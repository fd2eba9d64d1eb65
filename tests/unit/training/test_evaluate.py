"""An evaluation in groups of micro-batches, which can be stopped between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from megatron.config import parse_args
from megatron.training.trainer import evaluate

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 6 --lr 1e-3 --train-iters 5 --dry-run --eval-iters 3"
).split()


class Engine:
    """The loss of a micro-batch is its number."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    def evaluate(self, micro_batches, num_micro_batches, heartbeat):
        group = list(islice(micro_batches, num_micro_batches))
        for _ in group:
            heartbeat()
        self.groups.append(group)
        return torch.tensor(group, dtype=torch.float32).mean()


def run(flags: str, stop_after: int = 99) -> tuple[float | None, list[list[int]], int]:
    config = parse_args([*FLAGS, *flags.split()], {})
    engine, heartbeats = Engine(), []

    def micro_batches(first: int, samples: int) -> Iterator[int]:
        return iter(range(first, first + samples))

    loss = evaluate(
        engine,
        SimpleNamespace(micro_batches=micro_batches),
        config,
        100,
        stop_requested=lambda: len(engine.groups) >= stop_after,
        heartbeat=lambda: heartbeats.append(1),
    )
    return loss, engine.groups, len(heartbeats)


@pytest.mark.parametrize("stages", [1, 2])
def test_loss_is_the_mean_over_all_micro_batches(stages: int) -> None:
    loss, groups, heartbeats = run(f"--world-size {stages} --pipeline-model-parallel-size {stages}")
    assert loss == pytest.approx(sum(range(100, 118)) / 18)
    assert [number for group in groups for number in group] == list(range(100, 118))
    assert {len(group) for group in groups[:-1]} == {4 * stages} and heartbeats == 18


def test_request_stops_between_groups_without_a_result() -> None:
    loss, groups, _ = run("", stop_after=2)
    assert loss is None and len(groups) == 2
