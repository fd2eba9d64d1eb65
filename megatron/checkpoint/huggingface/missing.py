"""Lists the features that this program lacks, and the model types that cannot be converted for
this reason."""

from __future__ import annotations

# What this program lacks -> model types of transformers that need it.
_MISSING = {
    "linear attention": "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp "
    "qwen4_exp_text minimax kimi_linear bailing_hybrid olmo_hybrid",
    "Mamba layers": "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 falcon_h1 nemotron_h "
    "granitemoehybrid",
    "recurrent layers": "recurrent_gemma rwkv xlstm hrm_text",
    "convolutions between its layers": "lfm2 lfm2_moe lfm3 inkling_text inkling2_text zaya",
    "sparse attention with an index of the tokens": "deepseek_v32 deepseek_v4 glm_moe_dsa glm5_next axk2 "
    "hy_v4 dots3_note dots3_note_text minimax_m3_vl_text",
    "attention in chunks, and expert weights that multiply an expert's input": "llama4 llama4_text",
    "embeddings of its own in each layer": "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified_text",
    "a limit of the activation in some layers, and an encoder of images": "step3p7 step3p5",
    "two attention heads in a difference": "diffllama",
    "queries that grow with the position": "ministral3 mistral4 mistral_large4",
    "norms of heads after the rotation": "hunyuan_v1_dense hunyuan_v1_moe nanochat",
    "multipliers of the residual connection": "granite granitemoe granitemoeshared granite_swa "
    "granitemoe_swa hyperclovax minicpm",
    "the activation squared ReLU": "arcee nemotron jais2",
    "the activation xIELU": "apertus",
    "layer norms without parameters": "olmo",
    "a bias of the LM head": "phi phimoe gptj codegen",
    "a bias of softmax or logit scores for the choice of experts": "ernie4_5_moe kolibri1",
    "dense and expert MLPs side by side": "cohere2_moe longcat_flash",
    "experts of attention heads": "jetmoe",
    "matrices with three values": "bitnet",
    "an encoder of images": "gemma3 llava mistral3 mllama qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v",
}
_LACKING = {name: lacking for lacking, names in _MISSING.items() for name in names.split()}


def lacking_for(model_type: str) -> str | None:
    """Returns what this program lacks for models of this type; None if the type is unknown."""
    return _LACKING.get(model_type)
