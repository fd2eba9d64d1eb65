"""Translates the parameter names and arguments of Microsoft's Megatron-DeepSpeed ("source" below).

The pipeline of the source has no function between the embedding and the first transformer layer, so its layer
indices differ from this program's. For L transformer layers (GPTModelPipe in megatron/model/gpt_model.py):

    layer                   in the source                       in this program
    transformer layers      2 .. L+1                            3 .. L+2
    final norm              L+2                                 L+4
    tied embeddings         tied_modules.embed.*                tied_modules.embed.*
    untied embeddings       1.*                                 tied_modules.embed.*
    untied LM head          L+3                                 L+5

The source's layer list begins with the function `_to_float16` in every precision, so its indices do not
depend on fp16 or bf16. The rest of each name is equal. With --no-pipeline-parallel the source's model is a
GPTModel (megatron/model/language_model.py), which counts the layers from 0:

    in the source                                           in this program
    language_model.embedding.*                              tied_modules.embed.*
    language_model.encoder.layers.<i>.*                     <i + 3>.*
    language_model.encoder.final_layernorm.*                <L + 4>.*
    language_model.output_layer.*                           <L + 5>.lm_head.*

The source's Llama models have --swiglu, --normalization rmsnorm, --disable-bias-linear,
--use-rotary-position-embeddings and --untie-embeddings-and-output-weights. As in this program, RoPE rotates
the first half of a head with the second, and with --num-key-value-heads `query_key_value` is laid out per
group: queries, key, value.

Two kinds of parameters have their rows in a different order (megatron/model/transformer.py):

- In a gated MLP of the source the gate comes before the values; in this program the values come first.
- Since commit 676a482c of 2024 `query_key_value` holds all queries of a tensor-parallel rank, then its keys,
  then its values. Earlier versions laid it out per head, as this program does. `checkpoint_version` is 3.0 in
  both cases, but the argument `ds_sequence_parallel_fpdt` exists only since that commit. The three blocks
  have equal sizes, which is wrong for grouped queries: such checkpoints are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError, one_line
from megatron.model.layer_list import EMBEDDING, FIRST_TRANSFORMER_LAYER, final_norm_of

_SOURCE_FIRST_LAYER = 2
# Every transformer layer has exactly one parameter of this name. Layer numbers have at most six digits.
_INPUT_NORM = re.compile(r"(0|[1-9]\d{0,5})\.input_layernorm\.weight")
_INDEXED = re.compile(r"(0|[1-9]\d{0,5})\.(.+)")
# Prefix of all names in a model without a pipeline.
_PLAIN_MODEL = "language_model."
_PLAIN_LAYER = re.compile(r"language_model\.encoder\.layers\.(0|[1-9]\d{0,5})\.(.+)")
_UNTIED_EMBEDDING = "1."
# Only versions that store queries, keys and values as three blocks have this argument.
NEWER_ARGUMENT = "ds_sequence_parallel_fpdt"


def has_megatron_deepspeed_names(names: Collection[str]) -> bool:
    """Returns whether the names are the source's: its layers begin at index 2, or it has no pipeline."""
    return _is_plain(names) or min(_transformer_layers(names), default=None) == _SOURCE_FIRST_LAYER


def translate_names(names: Collection[str]) -> dict[str, str]:
    """Returns this program's parameter name -> stored name. The two are equal unless the source wrote
    them."""
    if not has_megatron_deepspeed_names(names):
        return {name: name for name in names}
    if _is_plain(names):
        last = max(int(match[1]) for name in names if (match := _PLAIN_LAYER.fullmatch(name)))
        return {_translate_plain_name(name, last): name for name in names}
    last = max(_transformer_layers(names))
    return {_translate_name(name, last): name for name in names}


def describe_translation(names: Collection[str]) -> str:
    """Returns the log line that says what `translate_names` changes."""
    if _is_plain(names):
        return (
            "Its parameters are named as in Microsoft's Megatron-DeepSpeed with --no-pipeline-parallel: "
            f"language_model.encoder.layers.0 is layer {FIRST_TRANSFORMER_LAYER} in this program"
        )
    last = max(_transformer_layers(names))
    first, shift = _SOURCE_FIRST_LAYER, FIRST_TRANSFORMER_LAYER - _SOURCE_FIRST_LAYER
    return (
        f"Its layers are numbered as in Microsoft's Megatron-DeepSpeed: transformer layers {first} to {last} "
        f"are {first + shift} to {last + shift} in this program, the final norm {last + 1} is {last + 3}"
    )


def has_gated_mlp(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Returns whether the first matrix of an MLP has twice as many rows as the second has columns."""
    first, second = ("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight")
    name = next((name for name in shapes if name.endswith(first)), "")
    other = shapes.get(name.removesuffix(first) + second, ())
    return len(other) == 2 and shapes[name][0] == 2 * other[1]


def translate_tensor(name: str, tensor: Tensor, args: Mapping[str, Any], gated: bool) -> Tensor:
    """Returns a global parameter or moment with its rows in this program's order, as a copy if rows move.

    name: this program's name. args: the source's arguments, {} if it saved none. gated: whether the MLP is
    gated. Raises UserError if the arguments do not fit the tensor.
    """
    if gated and ".mlp.dense_h_to_4h." in name:
        return torch.cat(tensor.chunk(2)[::-1])
    if NEWER_ARGUMENT in args and ".query_key_value." in name:
        return _interleave_heads(name, tensor, args)
    return tensor


def _interleave_heads(name: str, tensor: Tensor, args: Mapping[str, Any]) -> Tensor:
    """Returns a tensor with its rows, [ranks, 3, heads per rank, head_dim], reordered to [heads, 3,
    head_dim]."""
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
    """Returns whether all names have the prefix of a model without a pipeline."""
    layers = any(_PLAIN_LAYER.fullmatch(name) for name in names)
    return layers and all(name.startswith(_PLAIN_MODEL) for name in names)


def _translate_plain_name(name: str, last: int) -> str:
    """Translates a name of a model without a pipeline. last: index of its last transformer layer."""
    final = final_norm_of(last + 1)
    outer = {
        "language_model.embedding.": EMBEDDING,
        "language_model.encoder.final_layernorm.": f"{final}.",
        "language_model.output_layer.": f"{final + 1}.lm_head.",
    }
    for prefix, own in outer.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    match = _PLAIN_LAYER.fullmatch(name)
    return name if match is None else f"{int(match[1]) + FIRST_TRANSFORMER_LAYER}.{match[2]}"


def _transformer_layers(names: Collection[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _INPUT_NORM.fullmatch(name))]


def _translate_name(name: str, last: int) -> str:
    """Translates a name of a model with a pipeline. last: index of its last transformer layer. Different
    names of a model stay different, because it has the word embeddings under only one of their two names."""
    if name.startswith(_UNTIED_EMBEDDING):
        return EMBEDDING + name.removeprefix(_UNTIED_EMBEDDING)
    match = _INDEXED.fullmatch(name)
    if match is None or int(match[1]) < _SOURCE_FIRST_LAYER:
        return name
    # This program's layer list has one more function before the transformer layers, and one more after them.
    index = int(match[1]) + (1 if int(match[1]) <= last else 2)
    return f"{index}.{match[2]}"
