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

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.formats import external_universal, megatron_deepspeed
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.external_universal import first_int, parameter_folders, without_wrappers
from megatron.checkpoint.formats.megatron_deepspeed import COMPARED_ARGUMENTS
from megatron.checkpoint.formats.registry import PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateBlocks, StateReader, StateWriter, check_shape
from megatron.checkpoint.formats.torch_archive import is_intact, matches_checksums, read_file, write_tensor
from megatron.checkpoint.record import Checkpoint
from megatron.config import Config
from megatron.config.model import MEGATRON_MODEL_ARGS, argument_differences
from megatron.errors import UserError
from megatron.files import expect_layout, rename_synced, sync_tree
from megatron.model.layer_list import TIED_EMBEDDING
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, merge_shards

_LOG = logging.getLogger(__name__)

OPTIMIZER_STATE_FILE = "optimizer_state.pt"
STEP_FILE = "step.pt"
VALUES_FILE = "fp32.pt"
# The optimizer's name of a moment -> DeepSpeed's name of its file.
MOMENT_FILES = {name: f"{name}.pt" for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
_STATE_FILES = {VALUES: VALUES_FILE, **MOMENT_FILES}
# A key in optimizer_state.pt. Not 'loss_scaler', where DeepSpeed's loader expects an object of its own class.
LOSS_SCALE_KEY = "loss_scaler_state"
# In an unfinished checkpoint: the folder of parameters that are being written.
UNFINISHED_FOLDER = "unfinished"
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
        saved, compared = self._external["args"], {*MEGATRON_MODEL_ARGS}
        if self._is_megatron_deepspeed:
            compared |= {*COMPARED_ARGUMENTS}
            if variants := megatron_deepspeed.unsupported(saved, self._stored.values()):
                raise UserError(
                    f"checkpoint {self.folder} was written by Microsoft's Megatron-DeepSpeed, with settings "
                    f"that cannot be converted: {'; '.join(variants)}"
                )
        self._check_files()
        return argument_differences(config, saved, compared) + self._vocabulary_differences(specs, vocab_size)

    def recorded_model(self) -> tuple[dict[str, Any], int] | None:
        """See `StateReader`. The arguments of Megatron programs describe the model."""
        args = self._external["args"]
        if any(args.get(name) is None for name in ("num_layers", "hidden_size", "num_attention_heads")):
            return None
        fields = {"activation": megatron_deepspeed.gelu_of(args)}
        fields |= {name: args.get(name) for name in (*MEGATRON_MODEL_ARGS, *COMPARED_ARGUMENTS)}
        words = f"tied_modules.{TIED_EMBEDDING}.word_embeddings.weight"
        num_tokens = self._external["vocab_size"] or self.read(words, VALUES).shape[0]
        return {name: value for name, value in fields.items() if value is not None}, num_tokens

    def _check_files(self) -> None:
        """Raises UserError if a parameter lacks a file that others have, as in an incomplete copy."""
        known = {STEP_FILE, *_STATE_FILES.values()}
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
        names = without_wrappers(self._stored.values()).keys()
        return bool(self._external) and megatron_deepspeed.has_megatron_deepspeed_names(names)

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
            return megatron_deepspeed.translate_tensor(name, tensor, self._external["args"])
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
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.pt"))

    def file_problem(self, name: str) -> str | None:
        """Reads a file and compares it with its checksums from torch.save. Raises OSError if it cannot be
        read now."""
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
        others = [str(path.relative_to(self.folder)) for path in sorted(self.folder.rglob("*.pt"))]
        others = [name for name in others if name not in compared]
        problems += [problem for name in others if (problem := self.file_problem(name))]
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


class UniversalWriter(StateWriter):
    """Writes a universal checkpoint: each parameter's folder is complete and synced, or it does not exist.

    zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": global tensor, "cat_dim": ...}
    zero/<parameter name>/step.pt                               the optimizer's step

    The folder must exist. Several processes may write into it at once, even the same parameter.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._token = secrets.token_hex(8)

    def write_parameter(
        self, name: str, spec: ParameterSpec, states: StateBlocks, step: float | None = None
    ) -> None:
        """See `StateWriter`. Writes each block as it arrives."""
        self._remove(self.folder / UNFINISHED_FOLDER / name)  # of a process that has ended
        # Not with parents: once another process has published the folder, nothing may create it again.
        (self.folder / UNFINISHED_FOLDER).mkdir(exist_ok=True)
        unfinished = self._unfinished(name)
        unfinished.mkdir(parents=True)
        for state_name, blocks in states.items():
            if state_name not in _STATE_FILES:
                raise UserError(
                    f"the optimizer's {state_name} of {name} cannot be stored in a universal checkpoint: "
                    f"expected {', '.join(_STATE_FILES)}"
                )
            parts = (block.contiguous().numpy() for block in blocks)
            write_tensor(unfinished / _STATE_FILES[state_name], spec.valid_shape, parts, _merge_entry(spec))
        if step is not None:
            write_tensor(unfinished / STEP_FILE, (), [np.float32(step)])

    def finish_parameter(self, name: str) -> None:
        """Syncs the parameter's folder and renames it, so that it is complete even after a power failure."""
        (self.folder / PARAMETER_FOLDER).mkdir(exist_ok=True)
        sync_tree(self._unfinished(name))
        try:
            rename_synced(self._unfinished(name), self.folder / PARAMETER_FOLDER / name)
        except OSError as error:
            # A process without this one's locks was faster: its files hold equal bytes.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        self._remove(self.folder / UNFINISHED_FOLDER / name)

    def _unfinished(self, name: str) -> Path:
        """Returns a folder that no other process writes to."""
        return self.folder / UNFINISHED_FOLDER / name / self._token

    def _remove(self, folder: Path) -> None:
        """Removes a folder after a rename: another process finds all of it, or nothing."""
        removed = self.folder / UNFINISHED_FOLDER / f"removed-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def has_parameter(
        self, name: str, spec: ParameterSpec, state_names: Collection[str], step: float | None
    ) -> bool:
        """Returns whether an interrupted conversion has finished the parameter: all of its files exist, have
        the right shape and match their checksums. Otherwise its folder is removed."""
        folder = self.folder / PARAMETER_FOLDER / name
        if not folder.exists():
            return False
        shapes = {_STATE_FILES[state]: spec.valid_shape for state in state_names if state in _STATE_FILES}
        shapes |= {} if step is None else {STEP_FILE: ()}
        try:
            complete = {path.name for path in folder.iterdir()} == shapes.keys() and all(
                is_intact(folder / file, shape) for file, shape in shapes.items()
            )
        except (OSError, UserError):
            complete = False
        if not complete:
            (self.folder / UNFINISHED_FOLDER).mkdir(exist_ok=True)
            self._remove(folder)
        return complete


def _merge_shards(tensor: Tensor, spec: ParameterSpec, ranks: int) -> Tensor:
    """Returns the global parameter whose shards of `ranks` tensor-parallel ranks are concatenated along
    dimension 0. Replicas are averaged if they differ, as in Microsoft's Megatron-DeepSpeed."""
    if spec.num_valid_rows is not None or tensor.shape[0] % ranks:
        return tensor
    shards = tensor.chunk(ranks)
    if spec.shard_dim is None:
        same = all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0] if same else torch.stack(shards).mean(dim=0)
    if tuple(shards[0].shape) != local_shape(spec, TPGroup(0, ranks)):
        return tensor
    return merge_shards(spec, shards)


def _merge_entry(spec: ParameterSpec) -> dict[str, Any]:
    """Returns the entries beside the tensor in DeepSpeed's file of the parameter."""
    entry: dict[str, Any] = {} if spec.shard_dim is None else {"cat_dim": spec.shard_dim}
    if spec.num_fused_parts > 1:
        entry["param_n_sub_params"] = spec.num_fused_parts
    if spec.num_valid_rows is not None:
        entry["vocab_tensor"] = True
    return entry
