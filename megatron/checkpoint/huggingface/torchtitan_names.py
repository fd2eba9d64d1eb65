"""The names of torchtitan's Llama 3 and its order of rows, translated to Hugging Face's.

torchtitan rotates pairs of neighboring rows of queries and keys, Hugging Face the first half of a head with
the second, so these rows are permuted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.formats.dcp_storage import DcpFolder
from megatron.checkpoint.huggingface.family import LM_HEAD
from megatron.checkpoint.names import is_plain, shown
from megatron.errors import UserError

CONFIG_FILE = "config.json"
_BLOCK = "layers.{block}"
# Hugging Face name -> torchtitan's names: of version 0.3, which are written, and of older versions.
_NAMES: dict[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    f"model.{_BLOCK}.input_layernorm.weight": (f"{_BLOCK}.attention_norm.weight",),
    **{
        f"model.{_BLOCK}.self_attn.{part}_proj.weight": (
            f"{_BLOCK}.attention.qkv_linear.w{part}.weight",
            f"{_BLOCK}.attention.w{part}.weight",
        )
        for part in "qkv"
    },
    f"model.{_BLOCK}.self_attn.o_proj.weight": (f"{_BLOCK}.attention.wo.weight",),
    f"model.{_BLOCK}.post_attention_layernorm.weight": (f"{_BLOCK}.ffn_norm.weight",),
    f"model.{_BLOCK}.mlp.gate_proj.weight": (f"{_BLOCK}.feed_forward.w1.weight",),
    f"model.{_BLOCK}.mlp.down_proj.weight": (f"{_BLOCK}.feed_forward.w2.weight",),
    f"model.{_BLOCK}.mlp.up_proj.weight": (f"{_BLOCK}.feed_forward.w3.weight",),
    "model.norm.weight": ("norm.weight",),
    LM_HEAD: ("lm_head.weight", "output.weight"),
}
_HUGGING_FACE_NAMES = {name: hf_name for hf_name, names in _NAMES.items() for name in names}
ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.weight")
# Entries beside the weights: the optimizer, the schedule, the position in the data. Versions before 0.2 put a
# prefix before the weights.
_NO_WEIGHTS = re.compile(r"(optimizer|lr_scheduler|lr_schedulers|dataloader|train_state)(\.|$)")
_PREFIX = "model."


def hugging_face_weights(folder: Path, head_dim: int) -> Iterator[tuple[str, torch.Size, Any, Any]]:
    """Yields (Hugging Face name, shape, dtype, function that reads the tensor) of every weight in a folder of
    torchtitan. Raises UserError for a weight that torchtitan's Llama 3 does not have."""
    stored = DcpFolder(folder)
    for key, record in stored.tensors.items():
        if _NO_WEIGHTS.match(key):
            continue
        pattern, block = _pattern_of(key.removeprefix(_PREFIX))
        if pattern not in _HUGGING_FACE_NAMES:
            raise UserError(
                f"{folder} holds {key if is_plain(key) else shown(key)}, which no Llama 3 model of "
                "torchtitan has: use a checkpoint of a Llama 3 model"
            )
        hf_name = _HUGGING_FACE_NAMES[pattern].format(block=block)
        read: Callable[[], Tensor] = partial(stored.read, key)
        if ROTATED.fullmatch(hf_name):
            if len(record.shape) != 2 or record.shape[0] % head_dim:
                raise UserError(
                    f"{folder} holds {key} of shape {record.shape}, expected {head_dim} rows per head, as "
                    f"its {CONFIG_FILE} says"
                )
            read = partial(lambda read: rows_of_halves(read(), head_dim), read)
        yield hf_name, torch.Size(record.shape), record.dtype, read


def rows_of_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Orders the rows of queries or keys as Hugging Face does: the first of each pair, then the second."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def rows_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Returns the inverse of `rows_of_halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def torchtitan_name(hf_name: str) -> str:
    pattern, block = _pattern_of(hf_name)
    return _NAMES[pattern][0].format(block=block)


def _pattern_of(name: str) -> tuple[str, str]:
    """Returns a name with `{block}` for the number of the transformer layer, and the number, "" if none."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return (name.replace(match[0], f"{_BLOCK}.", 1), match[1]) if match else (name, "")
