"""A simulated step has the calls, in order, and the FLOPs and parameters of a real step on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.planner.simulation.device import describe_call
from tests.distributed.test_optimizer import reduce_scatters
from tests.support.layouts import GLOBAL_BATCH, VOCAB, Row, build_engine, config_of, train
from tests.support.pool import run_world
from tests.support.simulation.rank import simulate_rank
from tests.support.simulation.record import StepRecord
from tests.support.simulation.stages import run_in_processes

ROWS = [
    Row(dp=2, zero=1, precision="bf16", recompute=True),
    Row(tp=2, pp=2, zero=1, precision="bf16", micro_batch=2),
    Row(dp=2, zero=3, positions="rotary"),
    Row(pp=4, recompute=True, positions="alibi"),
    Row(tp=2, pp=2, dp=2, precision="fp16", positions="alibi"),
]


class StepCounter(TorchDispatchMode):
    """Counts for real tensors what the simulated device counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append(describe_call(func.overloadpacket.__name__, args))
        result = func(*args, **(kwargs or {}))
        # An in-place variant counts as the plain operation.
        plain = func.overloadpacket.__name__.removesuffix("_")
        packet = getattr(torch.ops.aten, plain, func.overloadpacket)
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
        return result


def settings(row: Row):
    """Returns settings with attention dropout. Its matrix products are equal on every device; fused attention
    kernels differ."""
    return config_of(
        row,
        model={"vocab_size": VOCAB, "attention_dropout": 0.1, "hidden_dropout": 0.1},
        training={"dry_run": True},
    )


def real_step(row: Row):
    """Returns (calls, FLOPs, number of parameters) of this rank's second step."""
    torch.manual_seed(0)
    engine = build_engine(settings(row))
    train(engine, [0])
    counter = StepCounter()
    with reduce_scatters(), counter:
        train(engine, [1], exit_code_fn=int)
    return counter.calls, counter.flops, sum(p.numel() for p in engine.module.parameters())


def simulate_without_kernels(*arguments: Any) -> StepRecord:
    """Simulates, in a separate process, the step of a GPU that runs PyTorch's operations, as a CPU does."""
    os.environ["MEGATRON_KERNELS"] = "pytorch"
    return simulate_rank(*arguments)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_simulated_step_is_the_real_one(row):
    count = GLOBAL_BATCH // (row.micro_batch * row.dp)
    ranks = [(settings(row), rank, count) for rank in range(row.world_size)]
    simulated = run_in_processes(simulate_without_kernels, ranks)
    for record, (calls, flops, parameters) in zip(
        simulated, run_world(row.world_size, real_step, row), strict=True
    ):
        assert record.parameters == parameters, f"rank {record.rank}"
        assert record.flops == flops, f"rank {record.rank}"
        assert list(record.calls) == calls, f"rank {record.rank}"
