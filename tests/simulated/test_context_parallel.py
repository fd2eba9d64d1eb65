"""Activation memory per rank falls as 1 / CP, except for the gathered keys and values."""

from __future__ import annotations

import pytest

from megatron.planner.layer_memory import planned_run
from megatron.planner.memory import plan_memory
from tests.simulated.layouts import GROUPS, LLAMA, config_of

LONG = f"--bf16 --seq-length 131072 --max-position-embeddings 131072 {LLAMA} {GROUPS} --micro-batch-size 1"
# Bytes of keys and values of a layer: 131072 tokens of 4 groups with heads of 32 elements, in 16 bits.
GATHERED_BYTES = 2 * 131072 * 4 * 32 * 2


def planned(config):
    (memory,) = plan_memory(planned_run(config))
    return memory.total - memory.state


@pytest.mark.parametrize(
    "flags,layers,tolerance",
    [
        # Only the recomputed layer keeps its gathered keys and values.
        ("--checkpoint-activations", 1, 0.01),
        # All four layers keep their gathered keys and values. The temporary memory of the loss does not
        # depend on the number of tokens.
        pytest.param("", 4, 0.12, marks=pytest.mark.full),
    ],
)
def test_all_but_the_gathered_keys_and_values_is_divided_among_the_ranks(flags, layers, tolerance):
    sizes = (1, 2, 4)
    found = {
        size: planned(config_of(f"--world-size {size} --context-parallel-size {size} {LONG} {flags}"))
        for size in sizes
    }
    gathered = layers * GATHERED_BYTES
    for size in sizes:
        # While the layer runs, a rank that gathers keys and values also has its own part.
        own = GATHERED_BYTES / size if size > 1 else 0
        expected = (found[1] - gathered) / size + gathered + own
        assert found[size] == pytest.approx(expected, rel=tolerance), size
