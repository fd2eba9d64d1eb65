"""Checks of --fp8-format and --fp8-recipe: layers, sizes of matrices, experts, and the GPU of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.registries import GPUS
from megatron.config.sections.fp8_layers import BLOCK, is_small
from megatron.config.sections.model import ModelConfig

_Size = tuple[str, int, bool]
"""A size of a matrix: (flags that determine it, the size, whether tensor-parallel ranks divide it)."""


def fp8_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a run in which all layers or all matrices compute in bf16, for matrices whose
    shards do not consist of whole blocks, for experts with one scale per tensor, and for a GPU without
    FP8."""
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
    layers = [layer for layer in range(model.num_layers) if not model.is_bf16_layer(layer)]
    option = "--fp8-layer-pattern" if model.fp8_layer_pattern else "--first-last-layers-bf16"
    given = model.first_last_layers_bf16 or model.fp8_layer_pattern
    if not layers or (given and len(layers) == model.num_layers):
        yield (
            f"{option} computes {len(layers)} of {model.num_layers} layers in FP8: expected layers in FP8 "
            f"and in bf16; change {option}, or remove it{'' if layers else ', --fp8-format and --fp8-recipe'}"
        )
    least, tensor = config.precision.fp8_min_size, config.parallel.tensor_model_parallel_size
    kinds = dict.fromkeys((model.has_window(layer), model.has_experts(layer)) for layer in layers)
    found = [matrix for kind in kinds for matrix in _matrices(model, *kind)]
    if model.mtp_num_layers and model.num_layers - 1 in layers:  # eh_proj
        hidden = model.hidden_size
        found.append((("--hidden-size", hidden, True), ("2 x --hidden-size =", 2 * hidden, False), 1))
    large = [(rows, columns) for rows, columns, n in found if not is_small(n * rows[1], columns[1], least)]
    if found and not large:
        yield (
            f"--fp8-recipe {recipe} computes no matrix in FP8, because all are smaller than --fp8-min-size "
            f"{least}: reduce it, or remove --fp8-format and --fp8-recipe"
        )
    for name, size, is_sharded in dict.fromkeys(size for matrix in large for size in matrix):
        ranks = tensor if is_sharded else 1
        if size % (BLOCK * ranks):
            divided = f" / --tensor-model-parallel-size {ranks}" if ranks > 1 else ""
            yield (
                f"--fp8-recipe {recipe}: {name} {size}{divided} is not divisible by {BLOCK}, the number of "
                f"elements that share a scale: change {'one of them' if ranks > 1 else 'it'}, or remove "
                "--fp8-format and --fp8-recipe"
            )


def _has_fp8(gpu: str) -> bool:
    rates: dict[str, float] = GPUS.load(gpu).peak_flops
    return rates["fp8"] > rates["fp32"]


def _matrices(model: ModelConfig, has_window: bool, has_experts: bool) -> Iterator[tuple[_Size, _Size, int]]:
    """Yields (rows, columns, number of fused parts with these rows) for each linear layer of a transformer
    layer, except the down projection of latent keys and values, which computes in bf16."""
    flags = _flags_of_attention(model, has_window)
    for name, sizes in model.of_kind(has_window).attention_matrices.items():
        if name in flags:
            of_rows, of_columns, sharded = flags[name]
            yield (of_rows, sizes[0], sharded == 0), (of_columns, sizes[1], sharded == 1), 1
    hidden = "--hidden-size", model.hidden_size, False
    of_mlp = [("--ffn-hidden-size", model.ffn_hidden_size, True)]
    if has_experts:
        shared = model.moe_shared_expert_intermediate_size
        of_mlp = [("--moe-ffn-hidden-size", model.expert_hidden_size, False)]
        of_mlp += [("--moe-shared-expert-intermediate-size", shared, True)] if shared else []
    for size in of_mlp:
        yield size, hidden, 2 if model.glu_activation else 1
        yield hidden, size, 1


def _flags_of_attention(model: ModelConfig, has_window: bool) -> dict[str, tuple[str, str, int | None]]:
    """Returns name of a linear layer -> (flags of its rows, flags of its columns, the dimension that
    tensor-parallel ranks divide)."""
    hidden, rank, compressed = "--hidden-size", "--q-lora-rank", "--kv-lora-rank"
    heads, groups, size = (
        model.option_of(name, has_window)
        for name in ("num_attention_heads", "num_query_groups", "kv_channels")
    )
    rows = f"({'2 x ' * model.attention_output_gate}{heads} + 2 x {groups}) x {size}"
    if model.v_channels or model.attention_output_gate_scope == "head":
        rows = f"rows of queries, keys, values and gates ({heads}, {groups}, {size}, --v-channels)"
    queries = f"{heads} x (--qk-head-dim + --qk-pos-emb-head-dim) ="
    value = "--v-head-dim" if model.multi_latent_attention else "--v-channels" if model.v_channels else size
    return {
        "query_key_value": (f"{rows} =", hidden, 0),
        "q_proj": (queries, hidden, 0),
        "q_down_proj": (rank, hidden, None),
        "q_up_proj": (queries, rank, 0),
        "kv_up_proj": (f"{heads} x (--qk-head-dim + --v-head-dim) =", compressed, 0),
        "dense": (hidden, f"{heads} x {value} =", 1),
    }
