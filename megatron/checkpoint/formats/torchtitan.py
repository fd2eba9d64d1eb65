"""Checkpoints of torchtitan's Llama 3: folders of torch.distributed.checkpoint with torchtitan's names.

Such a folder does not say how many heads the model has, nor how its rotary embedding is scaled. Both are read
from the config.json of the Hugging Face model, which the user copies into the folder. Then the folder is read
like a Hugging Face model: weights only, at iteration 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.formats.dcp import key_of
from megatron.checkpoint.formats.dcp_writer import CHUNK_BYTES, DcpWriter, save_piece
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.writing import by_state, full_state, in_rows
from megatron.checkpoint.huggingface.exporter import write_settings
from megatron.checkpoint.huggingface.family import FAMILIES, IDENTITY, LM_HEAD, setting
from megatron.checkpoint.huggingface.reader import HuggingFaceReader
from megatron.checkpoint.huggingface.torchtitan_names import (
    CONFIG_FILE,
    ROTATED,
    rows_of_pairs,
    torchtitan_name,
)
from megatron.checkpoint.record import TOKEN_IDS_KEY, Checkpoint
from megatron.errors import UserError
from megatron.model.layer_list import WORD_EMBEDDINGS
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece


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


class TorchtitanWriter(DcpWriter):
    """Writes weights and moments with torchtitan's names, and config.json of the Hugging Face model.

    A parameter that torchtitan divides or orders differently is in memory as a whole, and so is a tied
    embedding: torchtitan's folders also hold it as the LM head, without moments.
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
        """Yields the pieces of the parameters that torchtitan has in place of this one."""
        parameter = self._parameters[name]
        keys = [torchtitan_name(hf_name) for hf_name in parameter.hf]
        if parameter.transform is IDENTITY:
            for piece in in_rows(pieces, CHUNK_BYTES):
                if name == WORD_EMBEDDINGS and VALUES in piece.values and self._is_tied:
                    yield replace(piece, name=torchtitan_name(LM_HEAD), step=None)
                yield replace(piece, name=keys[0])
            return
        for state_name, of_state in by_state(pieces):
            parts = parameter.transform.to_hf(full_state(of_state), self._model)
            for key, hf_name, part in zip(keys, parameter.hf, parts, strict=True):
                rows = rows_of_pairs(part, self._model.kv_channels) if ROTATED.fullmatch(hf_name) else part
                spec, values = ParameterSpec(tuple(part.shape)), {state_name: rows.reshape(-1)}
                yield Piece(key, spec, (), 0, rows.numel(), values, self.reader.step_of(name))

    def complete(self) -> None:
        """See `CheckpointWriter`. The folder has no `run.json`: its weights have other names."""
        self.distcp.close()
        self.write_table([(self.distcp.chunks, None)], self._shapes.__getitem__)
        checkpoint = self.reader.checkpoint
        facts = (checkpoint.vocab_size, checkpoint.eod, "fp32", self.folder)
        write_settings(checkpoint.config, *facts, recorded=checkpoint.run.get(TOKEN_IDS_KEY))
