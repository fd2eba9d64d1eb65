"""Checkpoints of torchtitan's Llama 3: folders of torch.distributed.checkpoint with torchtitan's names.

Such a folder does not record how many heads the model has, nor how its rotary embedding is scaled. This
program reads both from the config.json of the Hugging Face model, which the user copies into the folder. It
then reads the folder like a Hugging Face model: only the weights, at iteration 0.

torchtitan's RoPE rotates pairs of neighboring rows of queries and keys; Hugging Face rotates the first half
of a head with the second. Therefore these rows are permuted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.formats.dcp import DcpFolder, key_of
from megatron.checkpoint.formats.dcp_writer import CHUNK_BYTES, DcpWriter, save_piece
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.writing import by_state, full_state, in_rows
from megatron.checkpoint.huggingface.exporter import write_settings
from megatron.checkpoint.huggingface.family import FAMILIES, IDENTITY, LM_HEAD, setting
from megatron.checkpoint.huggingface.importer import HuggingFaceModel, StoredWeight, read_hugging_face
from megatron.checkpoint.huggingface.reader import HuggingFaceReader
from megatron.checkpoint.names import is_plain, shown
from megatron.checkpoint.record import TOKEN_IDS_KEY, Checkpoint
from megatron.config import ModelConfig
from megatron.errors import UserError
from megatron.model.layer_list import WORD_EMBEDDINGS
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

_BLOCK = "layers.{block}"
# Hugging Face name -> torchtitan's names: first of version 0.3, which is written, then of older versions.
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
# Entries that are not weights: the optimizer, the schedule, the position in the data. Versions before 0.2 put
# a prefix before the names of weights.
_NO_WEIGHTS = re.compile(r"(optimizer|lr_scheduler|lr_schedulers|dataloader|train_state)(\.|$)")
_PREFIX = "model."


def hugging_face_weights(folder: Path, model: ModelConfig) -> dict[str, StoredWeight]:
    """Returns every weight in torchtitan's folder: Hugging Face name -> weight. Raises UserError for a weight
    that torchtitan's Llama 3 does not have."""
    stored, head_dim, weights = DcpFolder(folder), model.kv_channels, dict[str, StoredWeight]()
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
                    f"its config.json says"
                )
            read = partial(lambda read: _rows_of_halves(read(), head_dim), read)
        weights[hf_name] = StoredWeight(torch.Size(record.shape), record.dtype, read)
    return weights


def _rows_of_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Returns the rows of queries or keys in Hugging Face's order: first rows of all pairs, then second
    rows."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _rows_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Returns the rows of queries or keys in torchtitan's order, the inverse of `_rows_of_halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _torchtitan_name(hf_name: str) -> str:
    pattern, block = _pattern_of(hf_name)
    return _NAMES[pattern][0].format(block=block)


def _pattern_of(name: str) -> tuple[str, str]:
    """Returns a name with `{block}` for the number of the transformer layer, and the number ("" if none)."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return (name.replace(match[0], f"{_BLOCK}.", 1), match[1]) if match else (name, "")


class TorchtitanReader(HuggingFaceReader):
    """Reads the weights of a torchtitan checkpoint as it reads a Hugging Face model."""

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} is a checkpoint of torch.distributed.checkpoint that this program did not write: "
                f"if torchtitan wrote it, copy the config.json of the Hugging Face model of the same shape "
                "into the folder, which says how many heads the model has"
            )
        checkpoint = super().open_external(folder)
        note = f"{checkpoint.unverified_note}; torchtitan's optimizer state is not read"
        return replace(checkpoint, unverified_note=note)

    @cached_property
    def model(self) -> HuggingFaceModel:
        return read_hugging_face(self.folder, hugging_face_weights)


class TorchtitanWriter(DcpWriter):
    """Writes weights and moments under torchtitan's names, and the Hugging Face model's config.json.

    A parameter that torchtitan divides or orders differently is in memory as a whole. So is a tied embedding,
    because torchtitan's folders store it a second time as the LM head, without moments.
    """

    def __init__(self, folder: Path, source: StateReader) -> None:
        super().__init__(folder, source)
        model = source.checkpoint.config.model
        family = FAMILIES.load("llama")
        if needed := family.differences(model):
            raise UserError(
                f"checkpoint {source.folder} cannot be written for torchtitan: its Llama 3 needs "
                f"{' and '.join(setting(field, value) for field, value in needed.items())}; use --format dcp"
            )
        self._model = model
        self._is_tied = not model.untie_embeddings_and_output_weights
        self._parameters = {parameter.megatron: parameter for parameter in family.names(model)}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        with self.distcp.append() as (archives, file):
            for piece in self._pieces(name, pieces):
                shape = piece.spec.global_shape
                states = (*piece.values, *(() if piece.step is None else ("step",)))
                self._shapes |= {key_of(piece.name, s): () if s == "step" else shape for s in states}
                save_piece(piece, archives, self.distcp.chunks, file)

    def _pieces(self, name: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces of the torchtitan parameters that correspond to this parameter."""
        parameter = self._parameters[name]
        keys = [_torchtitan_name(hf_name) for hf_name in parameter.hf]
        if parameter.transform is IDENTITY:
            for piece in in_rows(pieces, CHUNK_BYTES):
                if name == WORD_EMBEDDINGS and VALUES in piece.values and self._is_tied:
                    yield replace(piece, name=_torchtitan_name(LM_HEAD), step=None)
                yield replace(piece, name=keys[0])
            return
        for state_name, of_state in by_state(pieces):
            parts = parameter.transform.to_hf(full_state(of_state), self._model.of_layer(parameter.block))
            for key, hf_name, part in zip(keys, parameter.hf, parts, strict=True):
                rows = _rows_of_pairs(part, self._model.kv_channels) if _ROTATED.fullmatch(hf_name) else part
                spec, values = ParameterSpec(tuple(part.shape)), {state_name: rows.reshape(-1)}
                yield Piece(key, spec, (), 0, rows.numel(), values, self.reader.step_of(name))

    def complete(self) -> None:
        """See `CheckpointWriter`. The folder gets no `run.json`, because its weights have other names."""
        self.distcp.close()
        self.write_table([(self.distcp.chunks, None)], self._shapes.__getitem__)
        checkpoint = self.reader.checkpoint
        write_settings(
            checkpoint.config,
            checkpoint.vocab_size,
            checkpoint.eod,
            "fp32",
            self.folder,
            recorded=checkpoint.run.get(TOKEN_IDS_KEY),
        )
