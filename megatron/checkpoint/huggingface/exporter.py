"""Writes a checkpoint as a folder that Hugging Face's transformers reads.

`megatron.sha256` lists the digests of the files in the format of sha256sum, so `sha256sum -c megatron.sha256`
checks the files. This program does not read SHA256SUMS, in which other programs may list other files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import Files, describe_file, file_problem, file_sizes, read_with_retries
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import ReplicaMismatch, StateReader
from megatron.checkpoint.formats.writing import CheckpointWriter, full_state
from megatron.checkpoint.huggingface.family import Parameter, count_non_finite, family_of
from megatron.checkpoint.huggingface.rope import flat_settings, is_lost_in_flat_settings
from megatron.checkpoint.names import check_file
from megatron.checkpoint.record import TOKEN_IDS_KEY
from megatron.config import Config
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.errors import UserError
from megatron.files import read_json, read_small
from megatron.model.layer_list import ONLY_IN_TRAINING, PARAMETER_DTYPES
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece
from megatron.text_table import first_few
from megatron.tokenizer import TokenizerFlags, build_tokenizer

CONTIGUOUS = torch.contiguous_format
MAX_FILE_BYTES = 5 * 10**9
"""Size limit of one weight file in bytes. Only a file with a single tensor may be larger."""
# Files that contain ids of special tokens. They take these ids from the tokenizer.
_FILES_WITH_IDS = ("config.json", "generation_config.json")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DIGEST_FILE = "megatron.sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def format_differences(config: Config) -> list[str]:
    """Returns one sentence for each difference between the exported model and the trained model."""
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
    if config.model.num_experts and config.model.moe_aux_loss_coeff:
        found.append(
            "transformers normalizes the balance loss in another way: router_aux_loss_coef in config.json is "
            "its default, not --moe-aux-loss-coeff"
        )
    model_type, family = family_of(config.model)
    if is_lost_in_flat_settings({"model_type": model_type, **family.hf_settings(config.model)}):
        found.append(
            f"in transformers 4 the layers of {family.title} with a window cannot have their rotation "
            "(--window-rotary-base, or --rope-scaling-type in all layers): open the model with transformers 5"
        )
    return found


def takes_fp32_values(config: Config, precision: str | None) -> bool:
    """Returns whether an export in this precision needs the optimizer's fp32 values, because the weights in
    the run's precision are less precise."""
    return precision == "fp32" and config.precision.name != "fp32"


def weights_bytes(specs: Iterable[ParameterSpec], config: Config, precision: str | None = None) -> int:
    """Returns the size of these parameters' exported weights in bytes. precision: see `HuggingFaceWriter`."""
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

    tokenizer: the flags of the model's tokenizer; None: the flags of the run. recorded: the `token_ids` of
    the imported model, if it has not been trained since its import.
    """
    from transformers import AutoConfig, GenerationConfig

    model_type, family = family_of(config.model)
    settings = family.hf_settings(config.model) | {"vocab_size": vocab_size}
    # The model has no padding token. The setting must be None, because some classes of transformers have a
    # default padding token, which they would mask.
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
            # Some classes write a different name (`attribute_map`), which other readers do not know.
            content |= {name: getattr(hf_config, name) for _, name in family.fields if name not in content}
        if isinstance(own := found.get(name), dict):
            content |= {key: own.get(key) for key in ids}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def token_ids(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the ids of special tokens in the settings of a model: file -> setting -> id or list of ids."""
    found = {}
    for name in _FILES_WITH_IDS:
        with suppress(OSError, ValueError, AttributeError):  # transformers can do without the second file
            content = read_json(folder / name)
            found[name] = {key: content[key] for key in _TOKEN_IDS if type(content.get(key)) in (int, list)}
    return found


def _bos(flags: TokenizerFlags, eod: int | None) -> int | None:
    """Returns the id of the tokenizer's beginning-of-sequence token. If the tokenizer has none, or its files
    are not found, returns `eod`: in training data without BOS, `eod` also marks the start of a document."""
    if eod is None or not fitting_tokenizer_types(flags):
        return eod
    try:
        tokenizer = build_tokenizer(flags)
    except UserError:
        return eod
    return tokenizer.bos if tokenizer.eod == eod else eod


def write_tokenizer(config: Config, flags: TokenizerFlags, folder: Path) -> None:
    """Writes the tokenizer of `flags` into `folder`, which already has the settings of the model."""
    # The import is late: transformers' tokenizers take seconds to import.
    from megatron.tokenizer.hugging_face import save_as_hugging_face

    # Only a model with learned positions limits the number of tokens.
    model, kind = config.model, build_tokenizer(flags, config.model.vocab_size).name
    limit = model.max_position_embeddings if model.position_embedding_type == "absolute" else None
    save_as_hugging_face(kind, flags, folder, limit)


@dataclass(frozen=True)
class WeightFile:
    """A weight file that was written under a temporary name."""

    path: Path
    sha256: str
    names: tuple[str, ...]
    """Names of the weights in the file."""
    num_bytes: int


class HuggingFaceWriter(CheckpointWriter):
    """Writes a Hugging Face folder, for a conversion and for the ranks of a run. In a run one process calls
    `begin` first and `finish` last; in between, each process writes the weights that it has. Only one weight
    file at a time is in memory. Moments are not written. A table (see `CheckpointWriter`) has the weight
    files of a process."""

    weights_only = True

    def __init__(
        self,
        folder: Path,
        source: StateReader | None = None,
        config: Config | None = None,
        precision: str | None = None,
        tokenizer: TokenizerFlags | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        prefix: str = "part",
    ) -> None:
        """source: the checkpoint's reader, in a conversion. config: the run's config, in a run. precision:
        'fp32', 'fp16' or 'bf16'; None: the precision of the run. tokenizer: the flags of the tokenizer; None:
        no tokenizer is written. prefix: prefix of the files' temporary names; it differs between the
        processes. Raises UserError if no family can express the model."""
        super().__init__(folder, source)
        config = config or self.reader.checkpoint.config
        self._config, self._model, self._max_file_bytes = config, config.model, max_file_bytes
        self._precision = precision or config.precision.name
        _, family = family_of(config.model)  # raises UserError before anything is written
        self._parameters = {parameter.megatron: parameter for parameter in family.names(config.model)}
        self._tokenizer, self._prefix = tokenizer, prefix
        self.files: list[WeightFile] = []
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        if source is not None:
            checkpoint = source.checkpoint
            self.begin(checkpoint.vocab_size, checkpoint.eod, checkpoint.run.get(TOKEN_IDS_KEY))

    def begin(self, vocab_size: int, eod: int | None, recorded: Any = None) -> None:
        """Writes all files except the weights. recorded: see `write_settings`."""
        write_settings(self._config, vocab_size, eod, self._precision, self.folder, self._tokenizer, recorded)
        if self._tokenizer is not None:
            write_tokenizer(self._config, self._tokenizer, self.folder)

    def parameter_bytes(self) -> dict[str, int]:
        return {
            name: weights_bytes([spec], self._config, self._precision)
            for name, spec in self.reader.specs.items()
        }

    def source_pieces(self, name: str, mismatch: ReplicaMismatch, verify: bool) -> Iterator[Piece]:
        if takes_fp32_values(self._config, self._precision):
            return self.reader.pieces(name, mismatch, verify, [VALUES])
        return self.reader.weight_pieces(name, mismatch, verify)

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        """See `CheckpointWriter`. Raises UserError if the precision cannot represent a value."""
        if name.endswith(ONLY_IN_TRAINING):
            return
        parameter = self._parameters[name]
        parts = dict(zip(parameter.hf, self._converted(pieces, parameter), strict=True))
        parts |= {copy: parts[parameter.hf[0]].clone() for copy in parameter.copies}
        for hf_name, part in parts.items():
            if self._pending_bytes + part.nbytes > self._max_file_bytes:
                self._write_pending()
            self._pending[hf_name] = part
            self._pending_bytes += part.nbytes

    def _converted(self, pieces: Iterator[Piece], parameter: Parameter) -> Iterator[Tensor]:
        values = full_state(pieces)
        converted = values.to(torch.float32 if parameter.is_fp32 else PARAMETER_DTYPES[self._precision])
        rounded = converted.dtype != values.dtype
        if rounded and count_non_finite(converted) and not count_non_finite(values):
            raise UserError(
                f"--dtype {self._precision} cannot hold the values of {parameter.megatron}: use bf16 or fp32"
            )
        parts = parameter.transform.to_hf(converted, self._model.of_layer(parameter.block))
        for part in parts:  # safetensors accepts no tensors that share memory
            yield part.contiguous() if len(parts) == 1 else part.clone(memory_format=CONTIGUOUS)

    def _write_pending(self) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"{self._prefix}-{len(self.files)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        # safetensors creates files that only their owner can read. Set the mode that the other files have.
        path.chmod((self.folder / "config.json").stat().st_mode)
        # The digest is computed now, while the file is still in the page cache.
        digest = describe_file(path)["sha256"]
        self.files.append(WeightFile(path, digest, tuple(self._pending), self._pending_bytes))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> tuple[Files, list[WeightFile]]:
        """See `CheckpointWriter`. Writes the weights that no file contains yet."""
        if self._pending:
            self._write_pending()
        return {}, self.files

    def complete(self) -> None:
        """See `CheckpointWriter`. The folder gets no `run.json`."""
        _, files = self.close()
        self.finish({}, [files])

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `CheckpointWriter`. Renames the weight files of all processes as `save_pretrained` names them,
        and writes the digests. Raises UserError if a weight is in no file, or in two files."""
        files: list[WeightFile] = [file for table in tables for file in table]
        found = Counter(name for file in files for name in file.names)
        found.subtract(name for each in self._parameters.values() for name in (*each.hf, *each.copies))
        if wrong := sorted(name for name, count in found.items() if count):
            raise UserError(
                f"{self.folder} has {found[wrong[0]] + 1} weights {wrong[0]}, expected 1 ({len(wrong)} such "
                "weights): this is an error of the program, and the folder is not complete"
            )
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
        return run


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Writes the digests of all files below a folder. known: file name -> digest that is already known."""
    digests = {name: known.get(name) or describe_file(folder / name)["sha256"] for name in file_sizes(folder)}
    (folder / DIGEST_FILE).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def read_digests(folder: Path) -> dict[str, str]:
    """Returns file name -> SHA-256; {} for a folder without digests.

    Raises UserError if the digests are malformed, and OSError if they cannot be read now.
    """
    path = folder / DIGEST_FILE
    if not path.exists():
        return {}
    text = read_with_retries(path, lambda: read_small(path)).decode(errors="replace")
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    if not all(found):
        raise UserError(f"{path} is damaged: expected a digest and a file's name in each line")
    return {check_file(match[2], path): match[1] for match in found if match}


def check_digests(folder: Path) -> None:
    """Raises UserError if files differ from their digests. The message names these files."""
    problems = [file_problem(folder, *entry, DIGEST_FILE) for entry in read_digests(folder).items()]
    if damaged := [problem for problem in problems if problem]:
        raise UserError(
            f"{folder}: {first_few(damaged)}: copy the folder again, or remove {DIGEST_FILE} if you have "
            "changed the folder yourself"
        )
