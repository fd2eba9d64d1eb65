"""OLMo 2: Llama with norms after attention and MLP, and one over all query heads and one over all keys."""

from dataclasses import replace

from megatron.checkpoint.huggingface.families.llama import CONSTANTS, FIELDS, LLAMA, PARAMETERS
from megatron.checkpoint.huggingface.families.qwen3 import QK_NORM_PARAMETERS
from megatron.checkpoint.huggingface.family import Parameter, equal_heads

_INPUT_NORM = "{layer}.input_layernorm.weight"
_OUTPUT_NORM = Parameter(
    "{layer}.post_mlp_layernorm.weight", ("model.layers.{block}.post_feedforward_layernorm.weight",)
)

OLMO2 = replace(
    LLAMA,
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    fields=FIELDS,
    megatron_constants={
        **CONSTANTS,
        "layer_arrangement": "post-norm",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
    },
    megatron_derived={"kv_channels": equal_heads},
    hf_constants={"hidden_act": "silu", "attention_bias": False},
    parameters=(
        *(parameter for parameter in PARAMETERS if parameter.megatron != _INPUT_NORM),
        *QK_NORM_PARAMETERS,
        _OUTPUT_NORM,
    ),
    ignored=(),
)
