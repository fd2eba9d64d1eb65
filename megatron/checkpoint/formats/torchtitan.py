"""Checkpoints of torchtitan's Llama 3: folders of torch.distributed.checkpoint with torchtitan's names.

Such a folder does not say how many heads the model has, nor how its rotary embedding is scaled. Both are read
from the config.json of the Hugging Face model, which the user copies into the folder. Then the folder is read
like a Hugging Face model: weights only, at iteration 0.

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

from megatron.checkpoint.formats.dcp import DcpWriter
from megatron.checkpoint.formats.dcp_storage import DcpFolder
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateBlocks, StateReader
from megatron.checkpoint.huggingface.exporter import write_settings
from megatron.checkpoint.huggingface.family import FAMILIES, IDENTITY, LM_HEAD, setting
from megatron.checkpoint.huggingface.reader import HuggingFaceReader
from megatron.checkpoint.names import is_plain, shown
from megatron.checkpoint.record import TOKEN_IDS_KEY, Checkpoint
from megatron.errors import UserError
from megatron.model.layer_list import WORD_EMBEDDINGS

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
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.weight")
# Entries beside the weights: the optimizer, the schedule, the position in the data. Versions before 0.2 put a
# prefix before the weights.
_NO_WEIGHTS = re.compile(r"(optimizer|lr_scheduler|lr_schedulers|dataloader|train_state)(\.|$)")
_PREFIX = "model."


class TorchtitanReader(HuggingFaceReader):
    """Reads the weights of a torchtitan checkpoint, like a Hugging Face model."""

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(
                f"{folder} is a checkpoint of torch.distributed.checkpoint that this program did not write: "
                f"if torchtitan wrote it, copy the {CONFIG_FILE} of the Hugging Face model of the same shape "
                "into the folder, which says how many heads the model has"
            )
        checkpoint = super().open_external(folder)
        note = f"{checkpoint.unverified_note}; torchtitan's optimizer state is not read"
        return Checkpoint(folder, checkpoint.state, checkpoint.run, unverified_note=note)


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
        if _ROTATED.fullmatch(hf_name):
            if len(record.shape) != 2 or record.shape[0] % head_dim:
                raise UserError(
                    f"{folder} holds {key} of shape {record.shape}, expected {head_dim} rows per head, as "
                    f"its {CONFIG_FILE} says"
                )
            read = partial(_read_rotated, read, head_dim)
        yield hf_name, torch.Size(record.shape), record.dtype, read


def _read_rotated(read: Callable[[], Tensor], head_dim: int) -> Tensor:
    return rows_of_halves(read(), head_dim)


def rows_of_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Orders the rows of queries or keys as Hugging Face does: the first of each pair, then the second."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def rows_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Returns the inverse of `rows_of_halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


class TorchtitanWriter(DcpWriter):
    """Writes weights and moments with torchtitan's names, and config.json of the Hugging Face model.

    A parameter that torchtitan divides or orders differently is in memory as a whole, and so is a tied
    embedding: torchtitan's folders also hold it as the LM head, without moments.
    """

    def __init__(self, folder: Path, reader: StateReader) -> None:
        super().__init__(folder, reader)
        model = reader.checkpoint.config.model
        family = FAMILIES.load("llama")
        if needed := family.differences(model):
            raise UserError(
                f"checkpoint {reader.folder} cannot be written for torchtitan: its Llama 3 needs "
                f"{' and '.join(setting(field, value) for field, value in needed.items())}; use --format dcp"
            )
        self._model = model
        self._is_tied = not model.untie_embeddings_and_output_weights
        names = family.names(model.num_layers, not self._is_tied)
        self._parameters = {parameter.megatron: parameter for parameter in names}

    def write_parameter(self, name: str, states: StateBlocks, step: float | None) -> None:
        parameter, shape = self._parameters[name], self.reader.specs[name].valid_shape
        keys = [_torchtitan_name(hf_name) for hf_name in parameter.hf]
        for state_name, blocks in states.items():
            if parameter.transform is IDENTITY:
                if name == WORD_EMBEDDINGS and state_name == VALUES and self._is_tied:
                    blocks = list(blocks)
                    self.write_state(_torchtitan_name(LM_HEAD), state_name, shape, blocks)
                self.write_state(keys[0], state_name, shape, blocks)
                continue
            full = torch.empty(shape)
            start = 0
            for block in blocks:
                full.view(-1)[start : start + block.numel()].copy_(block.reshape(-1))
                start += block.numel()
            parts = parameter.transform.to_hf(full, self._model)
            for key, hf_name, part in zip(keys, parameter.hf, parts, strict=True):
                rows = rows_of_pairs(part, self._model.kv_channels) if _ROTATED.fullmatch(hf_name) else part
                self.write_state(key, state_name, part.shape, [rows])
        for key in keys if step is not None else ():
            self.write_state(key, "step", (), [torch.tensor(step)])

    def finish(self) -> None:
        """See `ParameterWriter`. The folder has no `run.json`: its weights have other names."""
        self.distcp.finish()
        checkpoint = self.reader.checkpoint
        facts = (checkpoint.vocab_size, checkpoint.eod, "fp32", self.folder)
        write_settings(checkpoint.config, *facts, recorded=checkpoint.run.get(TOKEN_IDS_KEY))


def _torchtitan_name(hf_name: str) -> str:
    pattern, block = _pattern_of(hf_name)
    return _NAMES[pattern][0].format(block=block)


def _pattern_of(name: str) -> tuple[str, str]:
    """Returns a name with `{block}` for the number of the transformer layer, and the number, "" if none."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return (name.replace(match[0], f"{_BLOCK}.", 1), match[1]) if match else (name, "")
