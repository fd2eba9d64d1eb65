"""--cuda-graph-impl local: replays of a captured pass give the bits of eager passes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.layouts import (
    DROPOUT,
    GLOBAL_BATCH,
    RATE,
    Row,
    build_engine,
    config_of,
    evaluate,
    micro_batches,
    weights_of,
)
from tests.support.pool import run_world
from tests.support.recorded_graph import recorded_graphs

STEPS = 20
GRAPH = {"training": {"cuda_graph_impl": "local"}}


def train(
    row: Row, changes: dict[str, dict[str, Any]], with_flag: bool, with_graph: bool = False
) -> tuple[list[Any], Any, list[int]]:
    """Returns ((loss, grad norm, loss scale) of each step, the weights, the number of calls of each graph).

    with_graph: whether the accelerator offers graphs.
    """
    changes = {
        **changes,
        "training": {**changes.get("training", {}), **(GRAPH["training"] if with_flag else {})},
    }
    engine = build_engine(config_of(row, **changes))
    history = []
    with recorded_graphs() if with_graph else nullcontext([]) as graphs:
        for step in range(STEPS):
            loss = engine.train_step(micro_batches(engine, step), GLOBAL_BATCH, RATE)
            history.append((loss.item(), engine.optimizer.grad_norm, engine.optimizer.scaler.scale))
            if step == 10:  # replaces tables cached for this length
                batches = (batch.truncated(16) for batch in micro_batches(engine, 99))
                evaluate(engine, batches, GLOBAL_BATCH // row.micro_batch // row.dp, seq_length=16)
        if with_graph:
            kept = {storage.data_ptr() for storage in engine._graph._read}
            assert graphs[-1].outside - {0} <= kept
    return history, weights_of(engine).shards, [len(graph.calls) for graph in graphs]


RUNS: dict[str, tuple[Row, dict[str, dict[str, Any]]]] = {
    # The loss scale falls at once, and then grows every 4 steps.
    "fp16, dropout": (
        Row(precision="fp16", micro_batch=2),
        {
            "model": DROPOUT,
            "precision": {"fp16": True, "initial_loss_scale": 2.0**24, "loss_scale_window": 4},
        },
    ),
    "documents, recomputation": (
        Row(precision="bf16", positions="rotary", recompute=True),
        {"model": DROPOUT, "data": {"reset_attention_mask": True, "reset_position_ids": True}},
    ),
    "DP 2, ZeRO 1, window": (
        Row(dp=2, zero=1, positions="rotary"),
        {"model": {"window_size": 8}, "parallel": {"ddp_bucket_size": 1}},
    ),
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", RUNS)
def test_replays_of_a_cuda_graph_give_the_bits_of_eager_passes(name: str) -> None:
    row, changes = RUNS[name]
    eager = run_world(row.world_size, train, row, changes, False)
    replayed = run_world(row.world_size, train, row, changes, True, True)
    for (history, weights, _), (found, found_weights, calls) in zip(eager, replayed, strict=True):
        assert found == history
        assert all(torch.equal(found_weights[key], weight) for key, weight in weights.items())
        scales = [scale for _, _, scale in history[:-1]]
        changed = sum(a != b for a, b in pairwise(scales))
        assert len(calls) == 1 + changed and min(calls) > 100
        assert (changed > 3) == (row.precision == "fp16")


def test_without_graphs_of_the_accelerator_all_passes_are_eager() -> None:
    row, changes = RUNS["fp16, dropout"]
    assert run_world(1, train, row, changes, True)[0][0] == run_world(1, train, row, changes, False)[0][0]
