"""Writes a checkpoint as a folder that Hugging Face's transformers reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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
from megatron.checkpoint.huggingface.rope import flat_settings, is_lost_in_flat_settings
from megatron.checkpoint.record import TOKEN_IDS_KEY, Checkpoint
from megatron.config import Config
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.errors import UserError
from megatron.files import read_json, rename_synced, sync_tree
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.tokenizer import TokenizerFlags, build_tokenizer

CONTIGUOUS = torch.contiguous_format
MAX_FILE_BYTES = 5 * 10**9
"""Size limit of one file of weights, unless a single tensor is larger."""
# Files with the ids of special tokens, and the ids that are the tokenizer's.
_FILES_WITH_IDS = ("config.json", "generation_config.json")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    model_type, family = family_of(config.model)
    if is_lost_in_flat_settings({"model_type": model_type, **family.hf_settings(config.model)}):
        found.append(
            f"in transformers 4 the layers of {family.title} with a window cannot have their rotation "
            "(--window-rotary-base, or --rope-scaling-type in all layers): open the model with transformers 5"
        )
    return found


def write_hugging_face(
    checkpoint: Checkpoint,
    output: Path,
    precision: str | None = None,
    tokenizer: TokenizerFlags | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    verify: bool = True,
) -> str:
    """Writes the folder `output` from a checkpoint: config.json, weights as safetensors, the tokenizer, and
    the digests of all files. Returns what the weights were compared with.

    precision: 'fp32', 'fp16' or 'bf16'; None: the precision of the run. tokenizer: its flags; None: none is
    written. verify: compare the weights with their digests if the checkpoint has any. Only one file of
    weights at a time is in memory. The folder appears complete and synced, or not at all. Raises UserError if
    no family can express the model, files are damaged, `output` exists or cannot be written, or the disk is
    too full.
    """
    config = checkpoint.config
    family_of(config.model)  # rejects other models before anything is written
    reader = open_reader(checkpoint)
    with temporary_folder(
        output, ".tmp", weights_bytes(reader.specs.values(), config, precision)
    ) as temporary:
        writer = HuggingFaceWriter(temporary, config, precision, max_file_bytes)
        writer.begin(checkpoint.vocab_size, checkpoint.eod, tokenizer, checkpoint.run.get(TOKEN_IDS_KEY))
        # The weights in the precision of the run may be less precise than the output.
        uses_master_weights = precision == "fp32" and config.precision.name != "fp32"
        read = reader.master_weights if uses_master_weights else reader.weights
        for name, tensor in read(verify=verify):
            values = iter([tensor[: reader.specs[name].num_valid_rows]])
            del tensor  # the writer frees it: its pages need not be resident while a file is written
            writer.write_parameter(name, values)
        writer.write_pending()
        writer.finish(writer.files)
        rename_synced(temporary, output)
    return reader.weights_verification(uses_master_weights)


def weights_bytes(specs: Iterable[ParameterSpec], config: Config, precision: str | None = None) -> int:
    """Returns the size of the written weights of these parameters. precision: see `HuggingFaceWriter`."""
    dtype = PARAMETER_DTYPES[precision or config.precision.name]
    return dtype.itemsize * sum(prod(spec.valid_shape) for spec in specs)


def write_settings(
    config: Config,
    vocab_size: int,
    eod: int | None,
    precision: str,
    folder: Path,
    tokenizer: TokenizerFlags | None = None,
    recorded: Any = None,
) -> None:
    """Writes config.json and generation_config.json of a model that a family can express.

    tokenizer: the flags of its tokenizer (default: of the run). recorded: the `token_ids` of the model that
    was imported, if it has not been trained since.
    """
    from transformers import AutoConfig, GenerationConfig

    model_type, family = family_of(config.model)
    settings = family.hf_settings(config.model) | {"vocab_size": vocab_size}
    # The model has no padding token. It is set to None, because transformers would mask the default padding
    # token of some classes.
    ids = {"bos_token_id": _bos(tokenizer or config.data, eod), "eos_token_id": eod, "pad_token_id": None}
    hf_config = AutoConfig.for_model(
        model_type,
        **settings,
        **ids,
        architectures=[family.architecture],
        dtype=PARAMETER_DTYPES[precision],
    )
    hf_config.save_pretrained(folder)
    GenerationConfig.from_model_config(hf_config).save_pretrained(folder)
    found = recorded if isinstance(recorded, dict) else {}
    for name in _FILES_WITH_IDS:
        path = folder / name
        content = json.loads(path.read_text())
        if name == "config.json":
            content |= {"torch_dtype": content["dtype"], **ids, **flat_settings(content)}
        if isinstance(own := found.get(name), dict):
            content |= {key: own.get(key) for key in ids}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def token_ids(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the ids of special tokens in the settings of a model: file -> setting -> id, or list of ids."""
    found = {}
    for name in _FILES_WITH_IDS:
        with suppress(OSError, ValueError, AttributeError):  # transformers does not need the second file
            content = read_json(folder / name)
            found[name] = {key: content[key] for key in _TOKEN_IDS if type(content.get(key)) in (int, list)}
    return found


def _bos(flags: TokenizerFlags, eod: int | None) -> int | None:
    """Returns the id of the tokenizer's beginning-of-sequence token. If it has none, or its files are not
    found, returns `eod`: in training data without BOS it also marks the start of a document."""
    if eod is None or not fitting_tokenizer_types(flags):
        return eod
    try:
        tokenizer = build_tokenizer(flags)
    except UserError:
        return eod
    return tokenizer.bos if tokenizer.eod == eod else eod


def write_tokenizer(config: Config, flags: TokenizerFlags, folder: Path) -> None:
    """Writes the tokenizer of `flags` for a model whose settings are in `folder`."""
    # Imported only here: transformers' tokenizers take seconds.
    from megatron.tokenizer.hugging_face import save_as_hugging_face

    # Only learned positions limit the number of tokens.
    model, kind = config.model, build_tokenizer(flags, config.model.vocab_size).name
    limit = model.max_position_embeddings if model.position_embedding_type == "absolute" else None
    save_as_hugging_face(kind, flags, folder, limit)


@dataclass(frozen=True)
class WeightFile:
    """A file of weights that was written, under a temporary name."""

    path: Path
    sha256: str
    names: tuple[str, ...]
    """Names of the weights in it."""
    num_bytes: int


class HuggingFaceWriter:
    """Writes a folder of Hugging Face, for a conversion and for the ranks of a run. One process calls `begin`
    first and `finish` last. In between, each process writes the weights that it has. Only one file of weights
    at a time is in memory. Moments are not written.

    precision: 'fp32', 'fp16' or 'bf16'; None: the precision of the run. prefix: of the temporary names of the
    files, which differ between the processes.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        precision: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        prefix: str = "part",
    ) -> None:
        self.folder = folder
        self._config, self._model, self._max_file_bytes = config, config.model, max_file_bytes
        self._precision = precision or config.precision.name
        _, family = family_of(config.model)
        names = family.names(config.model.num_layers, config.model.untie_embeddings_and_output_weights)
        self._parameters = {parameter.megatron: parameter for parameter in names}
        self._prefix = prefix
        self.files: list[WeightFile] = []
        self._pending: dict[str, Tensor] = {}

    def begin(
        self, vocab_size: int, eod: int | None, tokenizer: TokenizerFlags | None, recorded: Any = None
    ) -> None:
        """Writes all files except the weights. tokenizer: its flags; None: none is written. recorded: see
        `write_settings`."""
        facts = vocab_size, eod, self._precision, self.folder, tokenizer, recorded
        write_settings(self._config, *facts)
        if tokenizer is not None:
            write_tokenizer(self._config, tokenizer, self.folder)

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

    def finish(self, files: Sequence[WeightFile]) -> None:
        """Names the files of weights of all processes as `save_pretrained` does, and writes the digests."""
        digests = {}
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {},
        }
        for number, file in enumerate(files):
            name = "model.safetensors"
            if len(files) > 1:
                name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            file.path.rename(self.folder / name)
            index["weight_map"] |= dict.fromkeys(file.names, name)
            digests[name] = file.sha256
        if len(files) > 1:
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        write_digests(self.folder, digests)
        sync_tree(self.folder)
