"""The captured passes of --cuda-graph-impl local do not involve the host, since a graph repeats what it
captured.

So the host may not wait for the device. It may not pass the device the content of a host tensor, or a number
that depends on the micro-batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron.engine.cuda_graph import MicroBatchGraph
from megatron.planner.layer_memory import planned_run
from megatron.planner.simulation import layer_costs
from tests.simulated.layouts import LLAMA, config_of
from tests.support.simulation.stages import run_in_processes

# Name -> flags. The first row has every feature with a host value.
RUNS = {
    "dropout": "--bf16 --world-size 4 --tensor-model-parallel-size 2 --zero-stage 1",
    "documents": "--fp16 --position-embedding-type alibi --reset-attention-mask --checkpoint-activations",
    "llama": f"--bf16 --world-size 2 {LLAMA}",
}


class Calls(TorchDispatchMode):
    """A graph that records the operations on the device: name, numbers and contents of host tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values, _ = tree_flatten((args, kwargs or {}))
        if any(isinstance(x, FakeTensor) for x in values) or "device" in (kwargs or {}):
            self.calls.append((func.overloadpacket.__name__, [described(x) for x in values]))
        return func(*args, **(kwargs or {}))


def described(x: Any) -> Any:
    """Returns what a captured graph would keep of an argument."""
    if isinstance(x, FakeTensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, Tensor):
        return {"on the host": x.tolist()}
    return repr(x) if isinstance(x, int | float | bool | str) else type(x).__name__


def capture_twice(config: Any, entries: int, vocab_size: int) -> tuple[list[str], list[list[Any]]]:
    """Captures a pass twice, with different samples. Returns (the host's waits, the calls of each
    capture)."""
    syncs: list[str] = []
    found = []

    def capture(graph: Calls) -> AbstractContextManager:
        syncs.clear()
        return graph

    with layer_costs._rank_on_device(config, vocab_size, (0, entries), 0, True) as rank:
        rank.recorder.add_sync = syncs.append  # type: ignore[method-assign]
        rank.model.observe(rank.recorder, rank.simulated.memory.is_alive)
        accelerator = get_accelerator()
        with (
            mock.patch.object(accelerator, "create_graph", Calls),
            mock.patch.object(accelerator, "capture_to_graph", capture),
            mock.patch.object(
                accelerator, "replay_graph", lambda graph: found.append((list(syncs), graph.calls))
            ),
        ):
            for first in (0, 64):
                graph = MicroBatchGraph(rank.model)
                for step in range(2):  # the first pass is eager
                    tokens = rank.tokens()
                    mask = torch.ones(tokens.shape, device=tokens.device)
                    samples = range(first + step * len(tokens), first + (step + 1) * len(tokens))
                    graph.run(
                        (tokens, torch.zeros_like(tokens), mask), samples, rank.optimizer.scaler.scale, 4
                    )
    return [sync for waits, _ in found for sync in waits], [calls for _, calls in found]


@pytest.mark.parametrize("name", RUNS)
def test_a_captured_pass_neither_waits_for_the_device_nor_reads_the_host(name: str) -> None:
    config = config_of(f"{RUNS[name]} --num-layers 2 --cuda-graph-impl local")
    run = planned_run(config)
    ((syncs, (one, other)),) = run_in_processes(
        capture_twice, [(config, len(run.stages.layers), run.vocab.size)]
    )
    assert syncs == [] and one == other and len(one) > 50
    assert [call for call in one if any(isinstance(value, dict) for value in call[1])] == []
