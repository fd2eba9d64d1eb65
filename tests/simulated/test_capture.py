"""The precondition of CUDA graphs: the passes of all micro-batches run equal operations with equal numbers.

A graph repeats what it has captured, so the host may not wait for the device, nor pass it a number or the
content of a host tensor that differs between micro-batches. docs/performance.md lists the exceptions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron.planner.layer_memory import planned_run
from megatron.planner.simulation import layer_costs
from tests.simulated.layouts import LLAMA, config_of
from tests.support.simulation.stages import run_in_processes

# Name -> flags; the first one has every feature with a host value.
RUNS = {
    "dropout": "--bf16 --world-size 4 --tensor-model-parallel-size 2 --zero-stage 1",
    "documents": "--fp16 --position-embedding-type alibi --reset-attention-mask --checkpoint-activations",
    "llama": f"--bf16 --world-size 2 --zero-stage 3 {LLAMA}",
}


class HostValues(TorchDispatchMode):
    """Records the operations on the device: name, numbers and contents of host tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values, _ = tree_flatten((args, kwargs or {}))
        if any(isinstance(x, FakeTensor) for x in values) or "device" in (kwargs or {}):
            self.calls.append((func.overloadpacket.__name__, [described(x) for x in values]))
        return func(*args, **(kwargs or {}))


def described(x: Any) -> Any:
    """What a captured graph would keep of an argument."""
    if isinstance(x, FakeTensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, Tensor):
        return x.tolist()
    return repr(x) if isinstance(x, int | float | bool | str) else type(x).__name__


def two_micro_batches(config: Any, entries: int, vocab_size: int) -> tuple[list[str], list[tuple], list[int]]:
    """Runs two micro-batches of different samples, after one that makes the tables. Returns the host's waits,
    the calls that differ, and the numbers of calls."""
    syncs: list[str] = []
    with layer_costs._rank_on_device(config, vocab_size, (0, entries), 0, True) as rank:
        rank.recorder.add_sync = syncs.append  # type: ignore[method-assign]
        rank.model.observe(rank.recorder, rank.simulated.memory.is_alive)
        found = []
        for first in (0, 64, 128):
            tokens = rank.tokens()
            labels = (torch.zeros_like(tokens), torch.ones(tokens.shape, device=tokens.device))
            samples = range(first, first + len(tokens))
            syncs.clear()
            rank.optimizer.unit_overlap.begin_micro_batch()
            with HostValues() as watched, rank.model.dropout_rng.use_samples(samples):
                with rank.model.fused_head_loss(rank.optimizer.scaler.scale):
                    loss = rank.model.loss(rank.model(tokens), labels)
                (loss * rank.optimizer.scaler.scale).backward()
            found.append(watched.calls)
    _, one, other = found
    return syncs, [(a, b) for a, b in zip(one, other, strict=False) if a != b], [len(one), len(other)]


@pytest.mark.parametrize("name", RUNS)
def test_a_micro_batch_passes_the_device_no_host_value_but_the_dropout_keys(name: str) -> None:
    config = config_of(f"{RUNS[name]} --num-layers 2")
    run = planned_run(config)
    ((syncs, differing, calls),) = run_in_processes(
        two_micro_batches, [(config, len(run.stages.layers), run.vocab.size)]
    )
    assert syncs == [] and calls[0] == calls[1] > 50
    for (operation, values), (_, others) in differing:
        assert operation in ("_to_copy", "copy_"), (operation, values, others)
        changed = [(a, b) for a, b in zip(values, others, strict=True) if a != b]
        # One 64-bit hash per dropout and sample, from pinned memory.
        (tables,) = changed
        assert {len(row) for table in tables for row in table} == {config.batch.micro_batch_size}
    assert len(differing) == ("--hidden-dropout 0" not in RUNS[name])  # one table for all dropouts
