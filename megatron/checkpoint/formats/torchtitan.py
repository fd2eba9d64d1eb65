"""Checkpoints of torchtitan's Llama 3: folders of torch.distributed.checkpoint with torchtitan's names.

Such a folder does not say how many heads the model has, nor how its rotary embedding is scaled. Both are read
from the config.json of the Hugging Face model, which the user copies into the folder. Then the folder is read
like a Hugging Face model: weights only, at iteration 0.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.formats.dcp import DcpWriter
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateBlocks, StateReader
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
        keys = [torchtitan_name(hf_name) for hf_name in parameter.hf]
        for state_name, blocks in states.items():
            if parameter.transform is IDENTITY:
                if name == WORD_EMBEDDINGS and state_name == VALUES and self._is_tied:
                    blocks = list(blocks)
                    self.write_state(torchtitan_name(LM_HEAD), state_name, shape, blocks)
                self.write_state(keys[0], state_name, shape, blocks)
                continue
            full = torch.empty(shape)
            start = 0
            for block in blocks:
                full.view(-1)[start : start + block.numel()].copy_(block.reshape(-1))
                start += block.numel()
            parts = parameter.transform.to_hf(full, self._model)
            for key, hf_name, part in zip(keys, parameter.hf, parts, strict=True):
                rows = rows_of_pairs(part, self._model.kv_channels) if ROTATED.fullmatch(hf_name) else part
                self.write_state(key, state_name, part.shape, [rows])
        for key in keys if step is not None else ():
            self.write_state(key, "step", (), [torch.tensor(step)])

    def finish(self) -> None:
        """See `ParameterWriter`. The folder has no `run.json`: its weights have other names."""
        self.distcp.finish()
        checkpoint = self.reader.checkpoint
        facts = (checkpoint.vocab_size, checkpoint.eod, "fp32", self.folder)
        write_settings(checkpoint.config, *facts, recorded=checkpoint.run.get(TOKEN_IDS_KEY))
