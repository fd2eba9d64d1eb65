"""Writes a checkpoint as a folder that Hugging Face's transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.conversion.output_folder import temporary_folder
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.family import Parameter, count_non_finite, family_of
from megatron.checkpoint.huggingface.file_digests import digest_of, write_digests
from megatron.checkpoint.record import Checkpoint
from megatron.config import Config, ModelConfig
from megatron.errors import UserError
from megatron.files import rename_synced, sync_tree
from megatron.model.layer_list import PARAMETER_DTYPES

CONTIGUOUS = torch.contiguous_format
MAX_FILE_BYTES = 5 * 10**9
"""Size limit of one file of weights, unless a single tensor is larger."""


def format_differences(config: Config) -> list[str]:
    """Returns one sentence for each difference between the written model and the trained model."""
    found = []
    if config.data.reset_attention_mask or config.data.reset_position_ids:
        found.append(
            "the model was trained with documents kept apart (--reset-attention-mask, --reset-position-ids), "
            "which Hugging Face's model does not do: give it one document at a time"
        )
    if config.precision.fp32_residual_connection and config.precision.name != "fp32":
        found.append(
            "the model was trained with --fp32-residual-connection: Hugging Face's model rounds the residual "
            f"stream to {config.precision.name}, unless it is loaded in fp32"
        )
    return found


def write_hugging_face(
    checkpoint: Checkpoint,
    output: Path,
    precision: str | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    verify: bool = True,
) -> str:
    """Writes the folder `output`: config.json, weights as safetensors, the files of `write_tokenizer`, and
    the digests of all files. Returns what the weights were compared with.

    precision: 'fp32', 'fp16' or 'bf16'; None: the precision of the run. verify: compare the weights with
    their digests if the checkpoint has any. Only one file of weights at a time is in memory. The folder
    appears complete and synced, or not at all. Raises UserError if no family can express the model, files are
    damaged, `output` exists or cannot be written, or the disk is too full.
    """
    config = checkpoint.config
    family_of(config.model)  # rejects other models before anything is written
    precision = precision or config.precision.name
    reader = open_reader(checkpoint)
    num_elements = sum(prod(spec.valid_shape) for spec in reader.specs.values())
    size_bytes = PARAMETER_DTYPES[precision].itemsize * num_elements
    with temporary_folder(output, ".tmp", size_bytes) as temporary:
        write_settings(config, checkpoint.vocab_size, checkpoint.eod, precision, temporary)
        writer = HuggingFaceWriter(temporary, config.model, precision, max_file_bytes)
        # The weights in the precision of the run may be less precise than the output.
        uses_master_weights = precision == "fp32" and config.precision.name != "fp32"
        read = reader.master_weights if uses_master_weights else reader.weights
        for name, tensor in read(verify=verify):
            values = iter([tensor[: reader.specs[name].num_valid_rows]])
            del tensor  # the writer frees it: its pages need not be resident while a file is written
            writer.write_parameter(name, values)
        writer.write_pending()
        digests = number_files(temporary, writer.files)
        if write_tokenizer is not None:
            write_tokenizer(temporary)
        write_digests(temporary, digests)
        sync_tree(temporary)
        rename_synced(temporary, output)
    return reader.weights_verification(uses_master_weights)


def write_settings(config: Config, vocab_size: int, eod: int | None, precision: str, folder: Path) -> None:
    """Writes config.json and generation_config.json of a model that a family can express."""
    from transformers import AutoConfig, GenerationConfig

    model_type, family = family_of(config.model)
    settings = family.hf_settings(config.model) | {"vocab_size": vocab_size}
    # In the training data one token marks both the end of a document and the start of the next. The model has
    # no padding token. It is set to None, because transformers would mask the default padding token of some
    # classes.
    hf_config = AutoConfig.for_model(
        model_type,
        **settings,
        bos_token_id=eod,
        eos_token_id=eod,
        pad_token_id=None,
        architectures=[family.architecture],
        dtype=PARAMETER_DTYPES[precision],
    )
    hf_config.save_pretrained(folder)
    GenerationConfig.from_model_config(hf_config).save_pretrained(folder)


def max_length_of(model: ModelConfig) -> int | None:
    """Returns the most tokens that a model accepts; None if its positions are not learned."""
    return model.max_position_embeddings if model.position_embedding_type == "absolute" else None


@dataclass(frozen=True)
class WeightFile:
    """A file of weights that was written, under a temporary name."""

    path: Path
    sha256: str
    names: tuple[str, ...]
    """Names of the weights in it."""
    num_bytes: int


class HuggingFaceWriter:
    """Writes the weights of a model, or a part of them, as safetensors files. Does not write moments. Only
    one file of weights at a time is in memory.

    prefix: of the temporary names of the files, see `number_files`.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, precision: str, max_file_bytes: int, prefix: str = "part"
    ) -> None:
        self.folder = folder
        self._model, self._precision, self._max_file_bytes = model, precision, max_file_bytes
        _, family = family_of(model)
        names = family.names(model.num_layers, model.untie_embeddings_and_output_weights)
        self._parameters = {parameter.megatron: parameter for parameter in names}
        self._prefix = prefix
        self.files: list[WeightFile] = []
        self._pending: dict[str, Tensor] = {}

    def write_parameter(self, name: str, values: Iterator[Tensor]) -> None:
        """Writes the tensor that `values` yields. Raises UserError if the precision cannot hold it."""
        parameter = self._parameters[name]
        parts = self._converted(values, parameter)
        for hf_name, part in zip(parameter.hf, parts, strict=True):
            pending_bytes = sum(tensor.nbytes for tensor in self._pending.values())
            if pending_bytes + part.nbytes > self._max_file_bytes:
                self.write_pending()
            self._pending[hf_name] = part

    def _converted(self, blocks: Iterator[Tensor], parameter: Parameter) -> list[Tensor]:
        """Returns the Hugging Face tensors of one Megatron parameter."""
        (values,) = blocks
        converted = values.to(PARAMETER_DTYPES[self._precision])
        rounded = converted.dtype != values.dtype
        if rounded and count_non_finite(converted) and not count_non_finite(values):
            raise UserError(
                f"--dtype {self._precision} cannot hold the values of {parameter.megatron}: use bf16 or fp32"
            )
        parts = parameter.transform.to_hf(converted, self._model)
        # Tensors in one file must not share memory.
        return [
            part.contiguous() if len(parts) == 1 else part.clone(memory_format=CONTIGUOUS) for part in parts
        ]

    def write_pending(self) -> None:
        """Writes the weights that are in no file so far, if any."""
        from safetensors.torch import save_file

        if not self._pending:
            return
        path = self.folder / f"{self._prefix}-{len(self.files)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        # safetensors writes files that only their owner can read: set the mode of the other files.
        path.chmod((self.folder / "config.json").stat().st_mode)
        num_bytes = sum(tensor.nbytes for tensor in self._pending.values())
        # The digest is computed now, while the file is still in the page cache.
        self.files.append(WeightFile(path, digest_of(path), tuple(self._pending), num_bytes))
        self._pending = {}


def number_files(folder: Path, files: Sequence[WeightFile]) -> dict[str, str]:
    """Renames the files of weights to model.safetensors, or to several files with an index, the names of
    `save_pretrained`. Returns their digests by name."""
    if len(files) == 1:
        files[0].path.rename(folder / "model.safetensors")
        return {"model.safetensors": files[0].sha256}
    digests = {}
    total_size = sum(file.num_bytes for file in files)
    index: dict[str, Any] = {"metadata": {"total_size": total_size}, "weight_map": {}}
    for number, file in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        file.path.rename(folder / name)
        index["weight_map"] |= dict.fromkeys(file.names, name)
        digests[name] = file.sha256
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return digests
