"""Dense relatives of Llama that differ from it in a few settings: SmolLM3, Seed-OSS, ERNIE 4.5, Helium,
Ministral, CWM, EXAONE 4, StableLM and StarCoder 2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.families.llama import (
    CONSTANTS,
    CONVERSIONS,
    FIELDS,
    LLAMA,
    NO_WINDOW,
    OLMO2,
    PARAMETERS,
    QKV_BIAS,
    QUERY_GROUPS,
    UNTIED,
    WINDOW,
    in_layer,
    parameters_without,
)
from megatron.checkpoint.huggingface.family import (
    INITIALIZATION,
    SIZES,
    Conversion,
    Parameter,
    exact_or_tanh,
)
from megatron.checkpoint.huggingface.rope import PARTIAL_ROPE, ROPE, WINDOWS, rotary_in_windows
from megatron.config import ModelConfig
from megatron.config.sections.layer_pattern import NO_ROTARY, ROTARY, ROTARY_PATTERN
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# --- SmolLM3: no rotary embeddings in every fourth layer ---


def _rotary_to_hf(model: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(model.has_rotary(layer)) for layer in range(model.num_layers)]}


def _rotary_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    found, num_layers = hf_config.no_rope_layers, hf_config.num_hidden_layers
    if not isinstance(found, list) or len(found) < num_layers or set(found) - {0, 1}:
        raise UserError(
            f"the model has no_rope_layers = {one_line(found)}: expected 0 or 1 for each of the {num_layers} "
            "layers"
        )
    letters = [ROTARY if has_rotary else NO_ROTARY for has_rotary in found[:num_layers]]
    return {"no_rope_freq": ROTARY_PATTERN.parse(letters, num_layers)} if NO_ROTARY in letters else {}


SOME_ROTARY = Conversion(
    megatron=("no_rope_freq",),
    hf=("no_rope_layers", "no_rope_layer_interval"),
    to_hf=_rotary_to_hf,
    to_megatron=_rotary_to_megatron,
)

SMOLLM3 = replace(
    LLAMA,
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    fields=FIELDS,
    conversions=(*CONVERSIONS, NO_WINDOW, SOME_ROTARY),
    ignored=("max_window_layers",),
)

# --- with biases, interleaved RoPE or windows ---

SEED_OSS = replace(
    LLAMA,
    title="Seed-OSS",
    architecture="SeedOssForCausalLM",
    fields=(*LLAMA.fields, ("add_qkv_bias", "attention_bias")),
    training_fields=(*LLAMA.training_fields, ("hidden_dropout", "residual_dropout")),
    megatron_training={},
    hf_constants={"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
    parameters=(*PARAMETERS, QKV_BIAS),
)

ERNIE = replace(
    LLAMA,
    title="ERNIE 4.5",
    architecture="Ernie4_5ForCausalLM",
    megatron_constants={**CONSTANTS, "rotary_interleaved": True},
    training_fields=INITIALIZATION,
    hf_constants={"hidden_act": "silu", "use_bias": False},
)

HELIUM = replace(
    LLAMA, title="Helium", architecture="HeliumForCausalLM", megatron_constants=ERNIE.megatron_constants
)

MINISTRAL = replace(
    LLAMA,
    title="Ministral",
    architecture="MinistralForCausalLM",
    conversions=(QUERY_GROUPS, UNTIED, WINDOWS),
)

EXAONE4 = replace(
    OLMO2,
    title="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    fields=LLAMA.fields,
    megatron_constants={**OLMO2.megatron_constants, "qk_layernorm_scope": "head"},
    hf_constants={"hidden_act": "silu"},
    conversions=(QUERY_GROUPS, UNTIED, rotary_in_windows(without_windows=True)),
)

# --- with layer norms ---

_NORMS = ("{layer}.input_layernorm", "{layer}.post_attention_layernorm", "{final}")
NORM_BIASES = tuple(
    Parameter(each.megatron.replace(".weight", ".bias"), (each.hf[0].replace(".weight", ".bias"),))
    for each in PARAMETERS
    if each.megatron.startswith(_NORMS)
)

STABLELM = replace(
    LLAMA,
    title="StableLM",
    architecture="StableLmForCausalLM",
    fields=(
        *FIELDS[:-1],
        ("layernorm_epsilon", "layer_norm_eps"),
        ("add_qkv_bias", "use_qkv_bias"),
    ),
    training_fields=(*LLAMA.training_fields, ("hidden_dropout", "hidden_dropout")),
    megatron_training={},
    megatron_constants={**CONSTANTS, "normalization": "LayerNorm"},
    hf_constants={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False},
    conversions=(QUERY_GROUPS, UNTIED, PARTIAL_ROPE),
    parameters=(*PARAMETERS, *NORM_BIASES, QKV_BIAS),
)

STARCODER2 = replace(
    STABLELM,
    title="StarCoder 2",
    architecture="Starcoder2ForCausalLM",
    fields=(*SIZES, ("ffn_hidden_size", "intermediate_size"), ("layernorm_epsilon", "norm_epsilon"), WINDOW),
    training_fields=(
        *LLAMA.training_fields,
        *(("hidden_dropout", "residual_dropout"), ("hidden_dropout", "embedding_dropout")),
    ),
    megatron_constants={"position_embedding_type": "rotary"},
    hf_constants={"use_bias": True},
    conversions=(QUERY_GROUPS, UNTIED, ROPE, exact_or_tanh("hidden_act")),
    parameters=(
        *parameters_without("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *(*NORM_BIASES, QKV_BIAS, in_layer("self_attention.dense.bias", "self_attn.o_proj.bias")),
        *(in_layer(f"mlp.dense_h_to_4h.{kind}", f"mlp.c_fc.{kind}") for kind in ("weight", "bias")),
        *(in_layer(f"mlp.dense_4h_to_h.{kind}", f"mlp.c_proj.{kind}") for kind in ("weight", "bias")),
    ),
)
