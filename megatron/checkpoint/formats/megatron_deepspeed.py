"""Parameter names and arguments of Microsoft's Megatron-DeepSpeed, translated into this repository's.

Its pipeline has no function between the embedding and the first transformer layer, so it counts differently.
For L transformer layers (GPTModelPipe in its megatron/model/gpt_model.py):

    layer                   index there                         index here
    transformer layers      2 .. L+1                            3 .. L+2
    final norm              L+2                                 L+4
    word, positions         tied_modules.embed.*                the same
    the same, untied        1.*                                 tied_modules.embed.*
    untied LM head          L+3                                 L+5

Its list begins with the function `_to_float16` in every precision, so its indices do not depend on fp16 or
bf16. All other parts of a name are equal. With --no-pipeline-parallel its model is a GPTModel
(megatron/model/language_model.py), which counts the layers from 0:

    name there                                              name here
    language_model.embedding.*                              tied_modules.embed.*
    language_model.encoder.layers.<i>.*                     <i + 3>.*
    language_model.encoder.final_layernorm.*                <L + 4>.*
    language_model.output_layer.*                           <L + 5>.lm_head.*

Its Llama models have --swiglu, --normalization rmsnorm, --disable-bias-linear,
--use-rotary-position-embeddings (halves of a head are rotated, as here) and
--untie-embeddings-and-output-weights. With --num-key-value-heads `query_key_value` is laid out per group:
queries, one key, one value, as here.

Two kinds of parameters have their rows in another order (megatron/model/transformer.py):

- A gated MLP stacks the gate before the values; here the values come first.
- Since commit 676a482c of 2024 `query_key_value` has the queries of all heads of a tensor-parallel rank, then
  its keys, then its values. Before, it was laid out per head, as here. `checkpoint_version` is 3.0 in both.
  The same commit added the argument `ds_sequence_parallel_fpdt`. Since then the three blocks have equal
  sizes, so it computes nothing meaningful with fewer key and value heads: such checkpoints are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError, one_line
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER, TIED_EMBEDDING

_SOURCE_FIRST_LAYER = 2
# A transformer layer is recognized by this parameter. Longer numbers are of no model.
_INPUT_NORM = re.compile(r"(0|[1-9]\d{0,5})\.input_layernorm\.weight")
_INDEXED = re.compile(r"(0|[1-9]\d{0,5})\.(.+)")
_POSITIONS = f"tied_modules.{TIED_EMBEDDING}.position_embeddings.weight"
# Of a model without a pipeline.
_PLAIN_MODEL = "language_model."
_PLAIN_LAYER = re.compile(r"language_model\.encoder\.layers\.(0|[1-9]\d{0,5})\.(.+)")
_PLAIN_EMBEDDING = "language_model.embedding."
_PLAIN_FINAL_NORM = "language_model.encoder.final_layernorm."
_PLAIN_HEAD = "language_model.output_layer."
_UNTIED_EMBEDDING = "1."
# Arguments of its megatron/arguments.py, with the value that the model here has. Older versions lack some.
_SUPPORTED = {"apply_layernorm_1p": False, "num_experts": [1], "squared_relu": False}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# Of the result of `translate_arguments`: compared with the config's, beside the arguments of Megatron.
COMPARED_ARGUMENTS = ("activation", "normalization", "disable_bias_linear")
# An argument that only versions have in which queries, keys and values are blocks.
_NEWER_ARGUMENT = "ds_sequence_parallel_fpdt"
_ROTARY_DEFAULTS = {"rope_theta": 10000, "rotary_percent": 1.0}


def has_megatron_deepspeed_names(names: Collection[str]) -> bool:
    """Whether the transformer layers of these parameters begin at index 2, or they are of a model without a
    pipeline."""
    return _is_plain(names) or min(_transformer_layers(names), default=None) == _SOURCE_FIRST_LAYER


def translate_names(names: Collection[str]) -> dict[str, str]:
    """Parameter name here -> stored name. All names stay as they are without `has_megatron_deepspeed_names`."""
    if not has_megatron_deepspeed_names(names):
        return {name: name for name in names}
    if _is_plain(names):
        last = max(int(match[1]) for name in names if (match := _PLAIN_LAYER.fullmatch(name)))
        return {_translate_plain_name(name, last): name for name in names}
    last = max(_transformer_layers(names))
    return {_translate_name(name, last): name for name in names}


def describe_translation(names: Collection[str]) -> str:
    """What `translate_names` changes, for the log."""
    if _is_plain(names):
        return (
            "Its parameters are named as in Microsoft's Megatron-DeepSpeed with --no-pipeline-parallel: "
            f"language_model.encoder.layers.0 is layer {FIRST_TRANSFORMER_LAYER} here"
        )
    last = max(_transformer_layers(names))
    first, shift = _SOURCE_FIRST_LAYER, FIRST_TRANSFORMER_LAYER - _SOURCE_FIRST_LAYER
    return (
        f"Its layers are numbered as in Microsoft's Megatron-DeepSpeed: transformer layers {first} to {last} "
        f"are {first + shift} to {last + shift} here, the final norm {last + 1} is {last + 3}"
    )


def translate_arguments(args: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Its arguments, with those of the model that have another name here under that name too."""
    rotary = "rotary" if args.get("use_rotary_position_embeddings") else None
    positions = "absolute" if _POSITIONS in translate_names(names) else rotary
    norm, biases = args.get("normalization"), args.get("add_bias_linear")
    here = {
        **args,
        "position_embedding_type": positions,
        "glu_activation": "swiglu" if args.get("swiglu") else None,
        "activation": _activation(args),
        "normalization": _NORMS.get(norm, norm) if isinstance(norm, str) else None,
        "disable_bias_linear": None if biases is None else not biases,
        "untie_embeddings_and_output_weights": has_own_head(names),
    }
    if rotary:
        angles = {name: args.get(name) or default for name, default in _ROTARY_DEFAULTS.items()}
        here |= {"rotary_base": angles["rope_theta"], "rotary_percent": angles["rotary_percent"]}
    # Its own arguments of these names would be others.
    here |= {"group_query_attention": None, "num_query_groups": None}
    groups = args.get("num_key_value_heads")
    if groups not in (None, args.get("num_attention_heads")):
        here |= {"group_query_attention": True, "num_query_groups": groups}
    return here


def _activation(args: Mapping[str, Any]) -> str | None:
    """The value of --activation; None for a gated MLP, and if the arguments do not say it."""
    fused = args.get("bias_gelu_fusion")
    if args.get("swiglu") or (fused is None and not args.get("onnx_safe") and not args.get("openai_gelu")):
        return None
    # Its openai_gelu and its fused kernel are the tanh approximation; onnx_safe and torch's GELU are exact.
    is_tanh = args.get("openai_gelu") or (fused and not args.get("onnx_safe"))
    return "gelu" if is_tanh else "gelu_exact"


def has_own_head(names: Collection[str]) -> bool:
    """Whether the LM head has a weight of its own."""
    return any(".lm_head." in name or name.startswith(_PLAIN_HEAD) for name in names)


def unsupported(args: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """What its model has and is not read, as 'argument is value, expected value'.

    args: the result of `translate_arguments`.
    """
    found = [
        f"{key} is {args[key]}, expected {value}"
        for key, value in _SUPPORTED.items()
        if args.get(key) not in (None, value)
    ]
    if args.get("group_query_attention") and _NEWER_ARGUMENT in args:
        found.append(
            f"num_key_value_heads is {args['num_key_value_heads']}, expected "
            f"{args.get('num_attention_heads')}: since commit 676a482c that program takes each third of the "
            "rows for queries, keys and values"
        )
    if args["position_embedding_type"] is None:
        found.append("it has neither learned nor rotary position embeddings")
    return found


def translate_tensor(name: str, tensor: Tensor, args: Mapping[str, Any]) -> Tensor:
    """A global parameter or moment with its rows in the order of the model here. Reordering copies it.

    name: here. args: the result of `translate_arguments`. UserError if they do not fit the tensor.
    """
    if args["glu_activation"] is not None and ".mlp.dense_h_to_4h." in name:
        return torch.cat(tensor.chunk(2)[::-1])
    if _NEWER_ARGUMENT in args and ".query_key_value." in name:
        return _interleave_heads(name, tensor, args)
    return tensor


def _interleave_heads(name: str, tensor: Tensor, args: Mapping[str, Any]) -> Tensor:
    """[ranks, 3, heads per rank, head_dim] x ... -> [heads, 3, head_dim] x ..., both with flat rows."""
    heads, ranks = args.get("num_attention_heads"), args.get("tensor_model_parallel_size")
    if (
        not (type(heads) is int and type(ranks) is int and 0 < ranks <= heads)
        or heads % ranks
        or len(tensor) % (3 * heads)
    ):
        raise UserError(
            f"{name} has {len(tensor)} rows, which do not fit the checkpoint's arguments num_attention_heads "
            f"{one_line(heads)} and tensor_model_parallel_size {one_line(ranks)}: it is damaged"
        )
    blocks = tensor.reshape(ranks, 3, heads // ranks, -1, *tensor.shape[1:])
    return blocks.transpose(1, 2).reshape(tensor.shape)


def _is_plain(names: Collection[str]) -> bool:
    """Whether all names are those of a model without a pipeline."""
    layers = any(_PLAIN_LAYER.fullmatch(name) for name in names)
    return layers and all(name.startswith(_PLAIN_MODEL) for name in names)


def _translate_plain_name(name: str, last: int) -> str:
    """last: index of the last transformer layer there. Distinct names stay distinct."""
    if name.startswith(_PLAIN_EMBEDDING):
        return f"tied_modules.{TIED_EMBEDDING}.{name.removeprefix(_PLAIN_EMBEDDING)}"
    if name.startswith(_PLAIN_FINAL_NORM):
        # A function comes between the last transformer layer and the final norm here.
        return f"{last + FIRST_TRANSFORMER_LAYER + 2}.{name.removeprefix(_PLAIN_FINAL_NORM)}"
    if name.startswith(_PLAIN_HEAD):
        return f"{last + FIRST_TRANSFORMER_LAYER + 3}.lm_head.{name.removeprefix(_PLAIN_HEAD)}"
    match = _PLAIN_LAYER.fullmatch(name)
    return name if match is None else f"{int(match[1]) + FIRST_TRANSFORMER_LAYER}.{match[2]}"


def _transformer_layers(names: Collection[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _INPUT_NORM.fullmatch(name))]


def _translate_name(name: str, last: int) -> str:
    """last: index of the last transformer layer there. Distinct names stay distinct, in a folder of one
    model: it has the word embeddings under one of their two names."""
    if name.startswith(_UNTIED_EMBEDDING):
        return f"tied_modules.{TIED_EMBEDDING}.{name.removeprefix(_UNTIED_EMBEDDING)}"
    match = _INDEXED.fullmatch(name)
    if match is None or int(match[1]) < _SOURCE_FIRST_LAYER:
        return name
    # A function comes before the transformer layers here, and another one after them.
    index = int(match[1]) + (1 if int(match[1]) <= last else 2)
    return f"{index}.{match[2]}"
