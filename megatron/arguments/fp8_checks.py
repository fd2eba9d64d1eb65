"""Checks of --fp8-format and --fp8-recipe: the sizes of the matrices, and the GPU of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.registries import GPUS
from megatron.config.sections.model import ModelConfig

_BLOCK = 128
"""Elements that share a scale: `megatron.kernels.fp8.BLOCK`, whose module imports torch."""


def fp8_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for matrices whose shards are no whole blocks, for experts with one scale per tensor,
    and for a GPU without FP8."""
    model, recipe = config.model, config.precision.fp8_recipe
    if recipe is None:
        return
    gpu, suitable = config.training.gpu, [name for name in GPUS if _has_fp8(name)]
    if gpu is not None and gpu not in suitable:
        yield (
            f"--gpu {gpu} with --fp8-recipe {recipe}: this GPU cannot multiply FP8 matrices. Expected one "
            f"of {', '.join(suitable)}. Change --gpu, or remove --fp8-format and --fp8-recipe."
        )
    if recipe == "tensorwise" and model.num_experts is not None:
        yield (
            f"--fp8-recipe tensorwise with --num-experts {model.num_experts}: the scale of an expert's "
            "tokens would depend on the layout; set --fp8-recipe blockwise"
        )
    tensor = config.parallel.tensor_model_parallel_size
    for name, size, is_sharded in _sizes(model):
        ranks = tensor if is_sharded else 1
        if size % (_BLOCK * ranks):
            divided = f" / --tensor-model-parallel-size {ranks}" if ranks > 1 else ""
            yield (
                f"--fp8-recipe {recipe}: {name} {size}{divided} is not divisible by {_BLOCK}, the number of "
                f"elements that share a scale: change {'one of them' if ranks > 1 else 'it'}, or remove "
                "--fp8-format and --fp8-recipe"
            )


def _has_fp8(gpu: str) -> bool:
    rates: dict[str, float] = GPUS.load(gpu).peak_flops
    return rates["fp8"] > rates["fp32"]


def _sizes(model: ModelConfig) -> Iterator[tuple[str, int, bool]]:
    """Yields the rows and columns of the FP8 matrices: (what determines it, size, whether tensor-parallel
    ranks divide it)."""
    yield "--hidden-size", model.hidden_size, False
    yield "--num-attention-heads x --kv-channels =", model.query_width, True
    projected = model.query_width + 2 * model.key_width
    yield "(--num-attention-heads + 2 x --num-query-groups) x --kv-channels =", projected, True
    if "ffn_hidden_size" not in model.unused_fields():
        yield "--ffn-hidden-size", model.ffn_hidden_size, True
    if model.num_experts is not None:
        yield "--moe-ffn-hidden-size", model.expert_hidden_size, False
        yield "--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size or 0, True
