#!/usr/bin/env python3
"""Counts the bytes that a transformer layer reads and writes in a forward and a backward pass, its kernel
launches, and the bytes that it keeps for the backward pass.

    python benchmarks/layer_bytes.py [MODEL ...]     no GPU needed; half a minute

The layers of a run are executed on the simulated accelerator, with the Triton kernels, or without them
(--kernels pytorch). The benchmark adds the bytes of all tensors that operations read or write, and compares
the sum with its minimum, in which each fused operation reads its operands once and writes its results once.
Nothing is measured. `step_cost.py` lists the operations.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from benchmarks.machine import LLAMA, benchmark_parser
from megatron.arguments import parse_args
from megatron.config import Config
from megatron.config.registries import POSITION_EMBEDDINGS
from megatron.model.layer_kinds import layer_kinds
from megatron.planner.layer_memory import planned_run
from megatron.planner.simulation.passes import Kernel
from megatron.planner.simulation.stage_costs import stage_costs
from megatron.text_table import format_table

COMMON = "--dry-run --bf16 --lr 1e-4 --train-iters 100 "
_GPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 "
    "--max-position-embeddings 2048 --micro-batch-size 8 --global-batch-size 8 "
)
_LLAMA = (
    f"{LLAMA} --hidden-size 4096 --num-attention-heads 32 --kv-channels 128 --num-query-groups 8 "
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 1 "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
)
MODELS = {
    "GPT 1.3B, dropout 0.1": _GPT,
    "GPT 1.3B": _GPT + "--attention-dropout 0 --hidden-dropout 0 ",
    "Llama 8B": _LLAMA + "--num-layers 32 --ffn-hidden-size 14336 --vocab-size 128256 ",
    "Qwen3 8B": _LLAMA + "--num-layers 36 --ffn-hidden-size 12288 --vocab-size 151936 --qk-layernorm ",
}
MOST_BYTES = 1.05
"""Goal: maximum bytes of both passes, relative to their minimum."""
MOST_LAUNCHES = 12
"""Goal: maximum number of launches of a forward pass."""


@dataclass(frozen=True)
class LayerBytes:
    """The costs of the forward and the backward pass of a model's layer, for one micro-batch. Pairs are
    (forward pass, backward pass)."""

    launches: tuple[int, int]
    moved: tuple[float, float]
    """Bytes that the operations read and write."""
    least: tuple[float, float]
    """The minimum of `moved`."""
    kept: int
    """Bytes that stay allocated for the backward pass."""

    @classmethod
    def of(cls, config: Config) -> LayerBytes:
        assert config.model.vocab_size is not None
        layers = stage_costs(planned_run(config, config.model.vocab_size), 0).layers
        layer = layers[len(layers) // 2]  # not the first layer, which also computes tables
        forward, backward = (
            [action for action in cost.actions if isinstance(action, Kernel)]
            for cost in (layer.forward, layer.backward)
        )
        return cls(
            (len(forward), len(backward)),
            (sum(kernel.bytes for kernel in forward), sum(kernel.bytes for kernel in backward)),
            (least_forward_bytes(config), least_backward_bytes(config)),
            layer.forward.change,
        )

    @property
    def share(self) -> float:
        """Returns the bytes of both passes divided by their minimum."""
        return sum(self.moved) / sum(self.least)


@dataclass(frozen=True)
class _Widths:
    """Numbers of elements per token in the activations of a pre-norm layer on a rank. ffn_in: output of the
    MLP's first product. shard: hidden states between the blocks, which --sequence-parallel shards."""

    hidden: float
    shard: float
    query: float
    projection: float
    ffn: float
    ffn_in: float

    @classmethod
    def of(cls, config: Config) -> _Widths:
        model, tp_size = config.model, config.parallel.tensor_model_parallel_size
        query, key, ffn = (n / tp_size for n in (model.query_width, model.key_width, model.ffn_hidden_size))
        shards = tp_size if config.parallel.sequence_parallel else 1
        ffn_in = ffn if model.glu_activation is None else 2 * ffn
        return cls(model.hidden_size, model.hidden_size / shards, query, query + 2 * key, ffn, ffn_in)

    @property
    def products(self) -> float:
        """Returns the number of elements per token that the four products read and write, without weights."""
        return 4 * self.hidden + self.projection + self.query + self.ffn_in + self.ffn


def least_forward_bytes(config: Config) -> float:
    """Returns the bytes that a pre-norm layer's forward pass moves if each operation reads its operands once
    and writes its result once: a norm, four matrix products with their weights, the split of the projection
    with norms and rotation (without rotary positions it is a view), attention, a residual addition with
    dropout, bias and norm, the MLP's activation, and a residual addition with dropout and bias."""
    widths = _Widths.of(config)
    per_token = (
        2 * widths.shard
        + widths.products
        + _rotates(config) * 2 * widths.projection
        + (widths.projection + widths.query)
        + 4 * widths.shard
        + (widths.ffn_in + widths.ffn)
        + 3 * widths.shard
    )
    return _element_size(config) * (_tokens(config) * per_token + _matrix_elements(config))


def least_backward_bytes(config: Config) -> float:
    """Returns the bytes of the backward passes of the operations of `least_forward_bytes`. A matrix product
    has two backward products, and adds the gradient of its weight to the fp32 sum. The gradient of a bias is
    computed in the operation after its product. The exceptions are the projection's bias, and the last bias
    without dropout: their gradients read the gradient of the output once more."""
    model = config.model
    widths, drops = _Widths.of(config), model.hidden_dropout > 0
    adds_bias = not model.disable_bias_linear
    norms_heads = _rotates(config) and model.qk_layernorm
    per_token = (
        (2 * widths.shard if drops else adds_bias * widths.shard)
        + 2 * widths.products
        + (2 * widths.ffn_in + widths.ffn)
        + (5 if drops else 4) * widths.shard
        + (2 * widths.projection + 2 * widths.query)
        + (3 if norms_heads else 2) * widths.projection  # joined
        + model.qkv_bias * widths.projection
        + 4 * widths.shard
    )
    size = _element_size(config)
    return size * _tokens(config) * per_token + (size + 8) * _matrix_elements(config)


def _rotates(config: Config) -> bool:
    return POSITION_EMBEDDINGS.load(config.model.position_embedding_type).rotary is not None


def _tokens(config: Config) -> int:
    return config.batch.micro_batch_size * config.model.seq_length


def _element_size(config: Config) -> int:
    return 4 if config.precision.name == "fp32" else 2


def _matrix_elements(config: Config) -> float:
    return layer_kinds(config.model)[0].matrix_elements / config.parallel.tensor_model_parallel_size


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--kernels", choices=("triton", "pytorch"), default="triton")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.models} - {*MODELS}):
        sys.exit(f"{parser.prog}: error: {', '.join(unknown)}: unknown. Expected: {', '.join(MODELS)}.")
    os.environ["MEGATRON_KERNELS"] = arguments.kernels  # read by the simulation
    cells: list[tuple[str, ...]] = [
        ("model", "forward MB", "backward MB", "of minimum", "kept MB", "launches", "backward launches")
    ]
    for name in arguments.models or MODELS:
        found = LayerBytes.of(parse_args([*COMMON.split(), *MODELS[name].split()], {}))
        forward, backward, kept = (f"{size / 1e6:,.0f}" for size in (*found.moved, found.kept))
        cells.append((name, forward, backward, f"{found.share:.3f}", kept, *map(str, found.launches)))
    print("a transformer layer, one micro-batch, counted on the simulated accelerator; no GPU was used")
    print(format_table(cells))


if __name__ == "__main__":
    main()
