"""Universal checkpoints: one folder of fp32 tensors per parameter. The reader accepts four variants:

- This repository's: DeepSpeed's files and `run.json`.
- DeepSpeed's, versions 0.2 to 0.4, which its ds_to_universal.py makes for Microsoft's Megatron-DeepSpeed and
  others. They have no `run.json`; `mp_rank_XX_model_states.pt` hold the iteration, the arguments with the
  consumed samples, and the learning-rate schedule. Versions 0.3 (`sub_param_shape`) and 0.4 (widths per rank)
  added entries for parameters made of unequal parts, which no model of this program has.
- DeepSpeed's of an engine that runs without Megatron's arguments and patterns (see `external_universal`).
  From ZeRO-3 the converter writes flat tensors and no `step.pt`. Without patterns it concatenates the shards
  of tensor-parallel ranks along dimension 0.
- BLOOM's of 2022 (0.1): like DeepSpeed's, but the word embedding keeps its padding, the replicas on TP ranks
  were averaged, and there is no `step.pt`: the optimizer's step is taken to be the iteration.

Microsoft's Megatron-DeepSpeed names the layers differently. `UniversalReader` translates its names into this
program's names (see `megatron_deepspeed`). No reader runs code from a file (see `torch_archive`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import file_sizes
from megatron.checkpoint.foreign_arguments import MICROSOFT, Program, program_of
from megatron.checkpoint.formats import external_universal, megatron_deepspeed
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.external_universal import first_int, parameter_folders, without_wrappers
from megatron.checkpoint.formats.registry import PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateReader, check_shape
from megatron.checkpoint.formats.torch_archive import matches_checksums, read_file
from megatron.checkpoint.record import Checkpoint
from megatron.config import Config
from megatron.errors import UserError
from megatron.files import expect_layout
from megatron.model.layer_list import WORD_EMBEDDINGS
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import merge_shards

_LOG = logging.getLogger(__name__)

OPTIMIZER_STATE_FILE = "optimizer_state.pt"
STEP_FILE = "step.pt"
VALUES_FILE = "fp32.pt"
# The optimizer's name of a moment -> DeepSpeed's name of its file.
MOMENT_FILES = {name: f"{name}.pt" for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
STATE_FILES = {VALUES: VALUES_FILE, **MOMENT_FILES}
# A key in optimizer_state.pt. Not 'loss_scaler', where DeepSpeed's loader expects an object of its own class.
LOSS_SCALE_KEY = "loss_scaler_state"
# Maximum number of padded rows if the checkpoint does not say how it was padded. BLOOM has 200.
_MOST_PADDING = 1024


class UniversalReader(StateReader):
    """Reads a universal checkpoint."""

    verified_unit = "tensors and files"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._parameters = checkpoint.folder / PARAMETER_FOLDER
        # What the checkpoint of another framework says about itself: see `external_universal.open_external`.
        self._external = checkpoint.run if checkpoint.is_external else {}

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        checkpoint = external_universal.open_external(folder)
        has_steps = any((folder / PARAMETER_FOLDER).glob(f"*/{STEP_FILE}"))
        if has_steps or cls(checkpoint)._common_step is not None:
            return checkpoint
        note = (
            f"{checkpoint.unverified_note}. It has no {STEP_FILE}: the optimizer's step is taken to be the "
            f"iteration, {checkpoint.state.iteration}"
        )
        return replace(checkpoint, unverified_note=note)

    def external_differences(
        self, config: Config, specs: Mapping[str, ParameterSpec], vocab_size: int
    ) -> list[str]:
        """See `StateReader`. Compares the arguments that the other framework saved, and the vocabulary."""
        self._check_files()
        differences = self.program.differences(args, config) if (args := self._external["args"]) else []
        return differences + self._vocabulary_differences(specs, vocab_size)

    def recorded_model(self) -> tuple[dict[str, Any], int] | None:
        """See `StateReader`. The arguments of Megatron programs describe the model."""
        args = self._external["args"]
        if any(args.get(name) is None for name in ("num_layers", "hidden_size", "num_attention_heads")):
            return None
        fields = self.program.settings(args, self.folder)
        return fields, self._external["vocab_size"] or self.read(WORD_EMBEDDINGS, VALUES).shape[0]

    def _check_files(self) -> None:
        """Raises UserError if a parameter lacks a file that others have, as in an incomplete copy."""
        known = {STEP_FILE, *STATE_FILES.values()}
        folders = sorted(path for path in self._parameters.iterdir() if path.is_dir())
        files = {path.name: frozenset(known & {file.name for file in path.iterdir()}) for path in folders}
        all_names = frozenset().union(*files.values())
        for name, own in files.items():
            if lacking := sorted(all_names - own):
                raise UserError(
                    f"universal checkpoint {self.folder} is incomplete: {name} has no {lacking[0]}, which "
                    "other parameters have: copy it again"
                )

    def _vocabulary_differences(self, specs: Mapping[str, ParameterSpec], vocab_size: int) -> list[str]:
        """Compares the size without padding if the checkpoint records it, else the number of padded rows."""
        saved, args = self._external["vocab_size"], self._external["args"]
        if saved is not None:
            return [] if saved == vocab_size else [f"the vocabulary had {saved} tokens, has {vocab_size}"]
        name = next(name for name, spec in specs.items() if spec.num_valid_rows is not None)
        rows = self.read(name, VALUES).shape[0] if name in self._stored else vocab_size
        unit = first_int(args.get("make_vocab_size_divisible_by"), 128)
        unit *= first_int(args.get("tensor_model_parallel_size"), 1)
        if vocab_size <= rows <= vocab_size + max(unit, _MOST_PADDING):
            return []
        return [f"the vocabulary had {rows} rows with padding, and has {vocab_size} tokens"]

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Parameter -> its name in the files."""
        bare = without_wrappers(parameter_folders(self.folder))
        translated = megatron_deepspeed.translate_names(bare.keys())
        return {name: bare[source] for name, source in translated.items()}

    @cached_property
    def _is_megatron_deepspeed(self) -> bool:
        return bool(self._external) and self.program is MICROSOFT

    @property
    def program(self) -> Program:
        """See `StateReader`."""
        return program_of(without_wrappers(self._stored.values()).keys())

    @property
    def stored_names(self) -> Collection[str]:
        return self._stored.keys()

    def _folder_of(self, name: str) -> Path:
        return self._parameters / self._stored.get(name, name)

    def state_names(self, name: str) -> list[str]:
        folder = self._folder_of(name)
        return [VALUES, *(moment for moment, file in MOMENT_FILES.items() if (folder / file).exists())]

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        """See `StateReader`. The tensor is memory-mapped."""
        path = self._folder_of(name) / MOMENT_FILES.get(state_name, VALUES_FILE)
        entry = read_file(path)
        # DeepSpeed's converter writes a flat tensor alone for ZeRO-3.
        tensor = entry.get("param") if isinstance(entry, Mapping) else self._in_shape(name, entry)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or not tensor.is_floating_point():
            raise UserError(
                f"checkpoint file {path} holds no tensor under 'param': it is not of a universal checkpoint"
            )
        if spec is not None:
            if (ranks := self._external.get("unmerged_ranks", 1)) > 1:
                tensor = _merge_shards(tensor, spec, ranks)
            check_shape(tuple(tensor.shape), spec, f"{path} holds")
        if self._is_megatron_deepspeed:
            args, gated = self._external["args"], self._external["gated"]
            return megatron_deepspeed.translate_tensor(name, tensor, args, gated)
        return tensor

    def _in_shape(self, name: str, flat: Any) -> Any:
        """Returns a flat tensor in the shape of its parameter. Returns any other object as it is."""
        shape = self._external.get("shapes", {}).get(self._stored.get(name, name))
        fits = isinstance(flat, Tensor) and shape is not None and flat.numel() == prod(shape)
        return flat.reshape(shape) if fits else flat

    def files_to_verify(self) -> list[str]:
        """See `StateReader`. Returns all files, unless the tensors have digests."""
        if self.tensor_digests:
            return []
        return list(file_sizes(self.folder, "*.pt"))

    def file_problem(self, name: str) -> str | None:
        """See `StateReader`. Compares a file with its checksums from torch.save."""
        try:
            matches = matches_checksums(self.folder / name)
        except UserError as error:
            return f"{name} cannot be read ({error})"
        if matches is None:
            if not self.files_without_checksums:
                text = (
                    "%s has no checksums (torch.serialization.set_crc32_options(False)): it is not verified"
                )
                _LOG.warning(text, self.folder / name)
            self.files_without_checksums.add(name)
        return f"{name} is damaged: it does not match its checksum" if matches is False else None

    def has_digests(self) -> bool:
        """See `StateReader`. torch.save writes checksums into every file unless they are switched off."""
        return True

    def verify(self, weights_only: bool = False) -> tuple[int, list[str]]:
        """Compares the tensors with their digests, and all other files with their checksums."""
        count, problems = super().verify(weights_only)
        if weights_only:
            return count, problems
        compared = {
            f"{PARAMETER_FOLDER}/{self._stored.get(name, name)}/{MOMENT_FILES.get(state_name, VALUES_FILE)}"
            for state_name, by_parameter in self.tensor_digests.items()
            for name in by_parameter
        }
        others = file_sizes(self.folder, "*.pt").keys() - compared
        problems += [problem for name in sorted(others) if (problem := self.file_problem(name))]
        return count + len(others) - len(self.files_without_checksums), problems

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        path = self._parameters / OPTIMIZER_STATE_FILE
        with expect_layout(path, "the optimizer's state"):
            return read_file(path).get(LOSS_SCALE_KEY) if path.is_file() else None

    @cached_property
    def _common_step(self) -> Any:
        """The optimizer's step of all parameters, which only checkpoints of ZeRO-3 have; None if unknown."""
        path = self._parameters / OPTIMIZER_STATE_FILE
        with expect_layout(path, "the optimizer's state"):
            content = read_file(path) if path.is_file() else {}
            states = content.get("optimizer_state_dict", {}).get("state", {})
            return next((state["step"] for state in states.values() if "step" in state), None)

    @cached_property
    def moments(self) -> frozenset[str]:
        """See `StateReader`. Derived from the names of the files."""
        return frozenset(
            name for name, file in MOMENT_FILES.items() if any(self._parameters.glob(f"*/{file}"))
        )

    def optimizer_scalars(self, name: str) -> dict[str, Any]:
        path = self._folder_of(name) / STEP_FILE
        if len(self.state_names(name)) == 1 or not (self.counts_updates(name) or path.exists()):
            return {}
        with expect_layout(path, "the optimizer's step"):
            saved = read_file(path) if path.exists() else self._common_step
            if saved is None:
                saved = self.checkpoint.state.iteration
            step = torch.as_tensor(saved, dtype=torch.float32)
            if step.numel() != 1:
                raise ValueError("it is not one number")
        return {"step": step}


def _merge_shards(tensor: Tensor, spec: ParameterSpec, ranks: int) -> Tensor:
    """Returns the global parameter whose shards of `ranks` tensor-parallel ranks are concatenated along
    dimension 0. Replicas are averaged if they differ, as in Microsoft's Megatron-DeepSpeed."""
    if spec.num_valid_rows is not None or tensor.shape[0] % ranks:
        return tensor
    shards = tensor.chunk(ranks)
    if not spec.sharding:
        same = all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0] if same else torch.stack(shards).mean(dim=0)
    if tuple(shards[0].shape) != spec.local_shape([Axis("tp", 0, ranks)]):
        return tensor
    return merge_shards(spec, shards)
