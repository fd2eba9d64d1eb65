"""Real passes of well-known models' layers move the planned bytes with the planned number of launches."""

from __future__ import annotations

import pytest

from benchmarks.layer_bytes import COMMON, MODELS, MOST_BYTES, MOST_LAUNCHES, LayerBytes
from megatron.arguments import parse_args

# Launches of a forward pass: a norm, four products, attention, an addition with norm, the activation, an
# addition. The last two models also split and rotate.
LAUNCHES = {"GPT 1.3B, dropout 0.1": 9, "GPT 1.3B": 9, "Llama 8B": 10, "Qwen3 8B": 10}


@pytest.mark.gate(rows=0, also=["Qwen3 8B", "GPT 1.3B, dropout 0.1"])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_moves_about_the_bytes_of_its_operations(name: str) -> None:
    found = LayerBytes.of(parse_args([*COMMON.split(), *MODELS[name].split()], {}))
    assert 0.99 < found.share <= MOST_BYTES
    assert all(moved > 0.99 * least for moved, least in zip(found.moved, found.least, strict=True))
    assert found.launches[0] == LAUNCHES[name] <= MOST_LAUNCHES


SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 "
    "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 1 --hidden-dropout 0.1"
)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    # For each of 256 keys PyTorch keeps softmax in fp32, mask, and dropped softmax in bf16. Four heads share
    # a causal mask. The kernel keeps one fp32 number.
    [("triton", 4), ("pytorch", 256 * (4 + 1 + 2) + 64)],
)
def test_attention_with_dropout_keeps_scores_only_without_the_kernel(
    kernels: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected values are bytes per query. Without dropout PyTorch's fused attention keeps 4."""
    monkeypatch.setenv("MEGATRON_KERNELS", kernels)
    dropped, plain = (
        LayerBytes.of(parse_args(f"{COMMON}{SMALL} --attention-dropout {rate}".split(), {}))
        for rate in (0.1, 0)
    )
    assert (dropped.kept - plain.kept) / (4 * 256) + 4 == pytest.approx(expected, abs=4)
    assert (dropped.launches[0] > 100) == (kernels == "pytorch")
