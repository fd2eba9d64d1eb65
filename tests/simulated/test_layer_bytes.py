"""The bytes and the launches of layers of well-known models, from their real passes."""

from __future__ import annotations

import pytest

from benchmarks.layer_bytes import COMMON, MODELS, MOST_BYTES, MOST_LAUNCHES, LayerBytes
from megatron.arguments import parse_args

# Launches of a forward pass: a norm, four products, attention, an addition with norm, the activation, an
# addition; the last two models also split and rotate.
LAUNCHES = {"GPT 1.3B, dropout 0.1": 9, "GPT 1.3B": 9, "Llama 8B": 10, "Qwen3 8B": 10}


@pytest.mark.gate(rows=0, also=["Qwen3 8B", "GPT 1.3B, dropout 0.1"])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_moves_about_the_bytes_of_its_operations(name: str) -> None:
    found = LayerBytes.of(parse_args([*COMMON.split(), *MODELS[name].split()], {}))
    assert 0.99 < found.share <= MOST_BYTES
    assert all(moved > 0.99 * least for moved, least in zip(found.moved, found.least, strict=True))
    assert found.launches[0] == LAUNCHES[name] <= MOST_LAUNCHES
