"""Universal checkpoints: one folder of fp32 tensors per parameter. The reader accepts four variants:

- This repository's variant: DeepSpeed's files and `run.json`.
- DeepSpeed's variant, versions 0.2 to 0.4, which its ds_to_universal.py makes for Microsoft's
  Megatron-DeepSpeed and other programs. It has no `run.json`; `mp_rank_XX_model_states.pt` hold the
  iteration, the arguments with the consumed samples, and the learning-rate schedule. Versions 0.3
  (`sub_param_shape`) and 0.4 (widths per rank) added entries for parameters made of unequal parts, which no
  model of this program has.
- DeepSpeed's variant for engines that run without Megatron's arguments and patterns. Its files have only the
  last two entries below; the flags of the run determine everything else. From ZeRO-3 the converter writes
  flat tensors and no `step.pt`. Without patterns it concatenates the shards of tensor-parallel ranks along
  dimension 0.
- BLOOM's variant of 2022 (0.1): like DeepSpeed's, but the word embedding keeps its padding, the replicas on
  tensor-parallel ranks were averaged, and there is no `step.pt`: the iteration is used as the optimizer's
  step.

Microsoft's Megatron-DeepSpeed names the layers differently. `UniversalReader` translates its names into this
program's names (see `megatron_deepspeed`). DeepSpeed's converter copies these entries from another
framework's model-state files:

    args, iteration, checkpoint_version     of Megatron programs
    universal_checkpoint_info               of programs that describe how their parameters are sharded
    global_steps, global_samples            of every DeepSpeed engine: iteration and consumed samples
    param_shapes                            names and shapes of the parameters of a tensor-parallel rank

No reader runs code from a file (see `torch_archive`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import file_sizes
from megatron.checkpoint.foreign_arguments import MICROSOFT, Program, plain_arguments, program_of
from megatron.checkpoint.formats import megatron_deepspeed
from megatron.checkpoint.formats.deepspeed_files import VALUES, model_files, sharded_weight_files
from megatron.checkpoint.formats.registry import PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateReader, check_shape
from megatron.checkpoint.formats.torch_archive import matches_checksums, read_file
from megatron.checkpoint.formats.universal_info import INFO_KEY, SHARDING, VOCAB_SIZE_KEY, check_info
from megatron.checkpoint.names import check_parameter, shown
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState, step_of
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
# Key in optimizer_state.pt. DeepSpeed's loader expects an object of its own class under the key
# 'loss_scaler'.
LOSS_SCALE_KEY = "loss_scaler_state"
# Largest number of padded rows that is accepted if a checkpoint does not record its padding. BLOOM has 200.
_MOST_PADDING = 1024
# Modules that wrap a model add this prefix to the names of all parameters, each module once.
_WRAPPER = "module."
_INPUT_NORM = "input_layernorm.weight"
_NOT_COMPARED = (
    "Another framework wrote it. Its data, dropout and schedule were not compared with this run's; its "
    "model was compared only by the shapes of its tensors and the arguments that it holds"
)
_NO_ARGUMENTS = (
    "It has no arguments of Megatron: query_key_value is taken to be laid out per head, as in Megatron's "
    "checkpoint_version 3.0"
)


class UniversalReader(StateReader):
    """Reads a universal checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._parameters = checkpoint.folder / PARAMETER_FOLDER
        self._lock = Lock()
        # What the checkpoint of another framework records about itself: see `_open_external`.
        self._external = checkpoint.run if checkpoint.is_external else {}

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        checkpoint = _open_external(folder)
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
        """See `StateReader`. Compares the arguments that the other framework saved, and the vocabulary
        size."""
        self._check_files()
        differences = self.program.differences(args, config) if (args := self._external["args"]) else []
        return differences + self._vocabulary_differences(specs, vocab_size)

    def recorded_model(self) -> tuple[dict[str, Any], int] | None:
        args = self._external["args"]
        if any(args.get(name) is None for name in ("num_layers", "hidden_size", "num_attention_heads")):
            return None
        fields = self.program.settings(args, self.folder)
        return fields, self._external["vocab_size"] or self.read(WORD_EMBEDDINGS, VALUES).shape[0]

    def _check_files(self) -> None:
        """Raises UserError if a parameter lacks a file that other parameters have, as in an incomplete
        copy."""
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
        """Compares the vocabulary size without padding if it is recorded, else the number of padded rows."""
        saved, args = self._external["vocab_size"], self._external["args"]
        if saved is not None:
            return [] if saved == vocab_size else [f"the vocabulary had {saved} tokens, has {vocab_size}"]
        name = next(name for name, spec in specs.items() if spec.num_valid_rows is not None)
        rows = self.read(name, VALUES).shape[0] if name in self._stored else vocab_size
        unit = _first_int(args.get("make_vocab_size_divisible_by"), 128)
        unit *= _first_int(args.get("tensor_model_parallel_size"), 1)
        if vocab_size <= rows <= vocab_size + max(unit, _MOST_PADDING):
            return []
        return [f"the vocabulary had {rows} rows with padding, and has {vocab_size} tokens"]

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Name of a parameter -> its name in the files."""
        bare = without_wrappers(_parameter_folders(self.folder))
        translated = megatron_deepspeed.translate_names(bare.keys())
        return {name: bare[source] for name, source in translated.items()}

    @cached_property
    def _is_megatron_deepspeed(self) -> bool:
        return bool(self._external) and self.program is MICROSOFT

    @property
    def program(self) -> Program:
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
        """See `StateReader`. The returned tensor is memory-mapped."""
        path = self._folder_of(name) / MOMENT_FILES.get(state_name, VALUES_FILE)
        entry = read_file(path)
        # For ZeRO-3 DeepSpeed's converter writes a flat tensor without a dict around it.
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
        """Returns a flat tensor in the shape of its parameter. Returns any other object unchanged."""
        shape = self._external.get("shapes", {}).get(self._stored.get(name, name))
        fits = isinstance(flat, Tensor) and shape is not None and flat.numel() == prod(shape)
        return flat.reshape(shape) if fits else flat

    def files_to_verify(self) -> list[str]:
        """See `StateReader`. Returns [] if the tensors have digests."""
        return [] if self.tensor_digests else self.compared_files()

    def file_problem(self, name: str) -> str | None:
        """See `StateReader`. Compares a file with the checksums that torch.save wrote into it."""
        try:
            matches = matches_checksums(self.folder / name)
        except UserError as error:
            return f"{name} cannot be read ({error})"
        if matches is None:
            with self._lock:
                if not self.files_without_checksums:
                    flag = "torch.serialization.set_crc32_options(False)"
                    _LOG.warning("%s has no checksums (%s): it is not verified", self.folder / name, flag)
                self.files_without_checksums.add(name)
        return f"{name} is damaged: it does not match its checksum" if matches is False else None

    def compared_files(self, weights_only: bool = False) -> list[str]:
        """See `StateReader`. Returns the files whose tensor has no digest. torch.save writes checksums into
        every file unless they are switched off."""
        if weights_only:
            return []
        have_digests = {
            f"{PARAMETER_FOLDER}/{self._stored.get(name, name)}/{MOMENT_FILES.get(state_name, VALUES_FILE)}"
            for state_name, by_parameter in self.tensor_digests.items()
            for name in by_parameter
        }
        return sorted(file_sizes(self.folder, "*.pt").keys() - have_digests)

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        path = self._parameters / OPTIMIZER_STATE_FILE
        with expect_layout(path, "the optimizer's state"):
            return read_file(path).get(LOSS_SCALE_KEY) if path.is_file() else None

    @cached_property
    def _common_step(self) -> Any:
        """The optimizer's common step of all parameters, which only checkpoints of ZeRO-3 have; else None."""
        path = self._parameters / OPTIMIZER_STATE_FILE
        with expect_layout(path, "the optimizer's state"):
            content = read_file(path) if path.is_file() else {}
            states = content.get("optimizer_state_dict", {}).get("state", {})
            return next((state["step"] for state in states.values() if "step" in state), None)

    @cached_property
    def moments(self) -> frozenset[str]:
        """See `StateReader`. Finds the moments by the names of the files."""
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
    """Returns the global parameter from a tensor that concatenates the shards of `ranks` tensor-parallel
    ranks along dimension 0. Replicas that differ are averaged, as Microsoft's Megatron-DeepSpeed does."""
    if spec.num_valid_rows is not None or tensor.shape[0] % ranks:
        return tensor
    shards = tensor.chunk(ranks)
    if not spec.sharding:
        same = all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0] if same else torch.stack(shards).mean(dim=0)
    if tuple(shards[0].shape) != spec.local_shape([Axis("tp", 0, ranks)]):
        return tensor
    return merge_shards(spec, shards)


# --- what the files of another framework say about the checkpoint ---


def _open_external(folder: Path) -> Checkpoint:
    """Opens a universal checkpoint without `run.json`. Raises UserError if it cannot be opened.

    Reads the first model-state file; the other files differ from it only in rank and random state. `run` of
    the result has these keys:

    args: the arguments of the source.
    gated: whether Microsoft's Megatron-DeepSpeed wrote the checkpoint and its model has a gated MLP.
    vocab_size: the size of the vocabulary without padding, or None.
    shapes: stored name of a parameter -> shape of a tensor-parallel rank's shard.
    unmerged_ranks: number of tensor-parallel ranks whose shards are concatenated along dimension 0, because
    DeepSpeed's converter had no patterns; 1 if the parameters are merged.
    """
    paths = model_files(folder) or sorted(sharded_weight_files(folder))
    if not paths:
        raise UserError(
            f"universal checkpoint {folder} has neither {RUN_FILE} nor mp_rank files, so its iteration is "
            "not known"
        )
    content = read_file(paths[0])
    names = without_wrappers(_parameter_folders(folder)).keys()
    if not isinstance(content, Mapping):
        raise UserError(f"checkpoint file {paths[0]} holds no dict: it is not of a universal checkpoint")
    _check_attention_order(content.get("checkpoint_version"), paths[0])
    args = vars(content["args"]) if isinstance(content.get("args"), Namespace) else {}
    args = plain_arguments(args)
    state = _training_state(content, args, folder, paths[0])
    shapes = _shapes(content)
    note, gated = _NOT_COMPARED, False
    if megatron_deepspeed.has_megatron_deepspeed_names(names):
        note += f". {megatron_deepspeed.describe_translation(names)}"
        if not args:
            note += f". {_NO_ARGUMENTS}"
        gated = bool(args.get("swiglu")) if args else megatron_deepspeed.has_gated_mlp(shapes)
    info = content.get(INFO_KEY)
    info = check_info(info, paths[0]) if isinstance(info, Mapping) else {}
    ranks = 1 if any(info.get(key) for key in SHARDING) else _tensor_parallel_size(content)
    run = {
        "args": args,
        "gated": gated,
        "vocab_size": info.get(VOCAB_SIZE_KEY),
        "shapes": shapes,
        "unmerged_ranks": ranks if ranks > 1 and _is_concatenated(folder, shapes, ranks) else 1,
    }
    return Checkpoint(folder, state, run, unverified_note=note)


def _parameter_folders(folder: Path) -> list[str]:
    """Returns the stored names of the parameters. Raises HostileFileError for an unsafe folder name."""
    parent = folder / PARAMETER_FOLDER
    return [check_parameter(path.name, parent) for path in parent.iterdir() if path.is_dir()]


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Returns name without the wrappers' prefixes -> name. A prefix is removed only if all names have it."""
    bare = {name: name for name in names}
    while bare and all(name.startswith(_WRAPPER) for name in bare):
        bare = {name.removeprefix(_WRAPPER): stored for name, stored in bare.items()}
    return bare


def _training_state(
    content: Mapping[str, Any], args: Mapping[str, Any], folder: Path, path: Path
) -> TrainingState:
    """Returns the run's progress. Raises UserError if `content` does not record it. path: the file that
    `content` was read from."""
    iteration = _first_int(
        content.get("iteration"), args.get("iteration"), content.get("global_steps"), step_of(folder.name)
    )
    batch = _first_int(args.get("global_batch_size"))
    samples = _first_int(args.get("consumed_train_samples"), content.get("global_samples"), iteration * batch)
    sequence = _first_int(args.get("seq_length"))
    tokens = _first_int(args.get("consumed_train_tokens"), content.get("tokens"), samples * sequence)
    if iteration < 0 or samples < 0:
        raise UserError(
            f"checkpoint file {path} has no iteration (it has {shown(content.get('iteration'))}) or no "
            "number of consumed samples, so the position in the data is not known: expected global_steps "
            "and global_samples, which DeepSpeed's engine saves"
        )
    return TrainingState(iteration, samples, max(tokens, 0))


def _shapes(content: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the shapes in `param_shapes`, which is a list of dicts. Ignores entries of any other kind."""
    groups = content.get("param_shapes")
    groups = groups if isinstance(groups, (list, tuple)) else [groups]
    found = (item for group in groups if isinstance(group, Mapping) for item in group.items())
    return {
        name: [int(size) for size in shape]
        for name, shape in found
        if isinstance(name, str)
        and isinstance(shape, Sequence)
        and all(type(size) is int and size > 0 for size in shape)
    }


def _tensor_parallel_size(content: Mapping[str, Any]) -> int:
    """Returns the number of tensor-parallel ranks. Engines before DeepSpeed 0.19 record only the number of
    model-parallel ranks, which equals it if the run had no pipeline parallelism."""
    sizes = content.get("checkpoint_parallel_dimensions")
    size = sizes.get("tp_degree") if isinstance(sizes, Mapping) else None
    return _first_int(size, content.get("mp_world_size"), 1)


def _is_concatenated(folder: Path, shapes: Mapping[str, Sequence[int]], ranks: int) -> bool:
    """Returns whether a norm, which is a replicated parameter, is stored once per tensor-parallel rank."""
    name = next((name for name in shapes if name.endswith(_INPUT_NORM)), None)
    if name is None:
        return False
    entry = read_file(folder / PARAMETER_FOLDER / check_parameter(name, folder) / "fp32.pt")
    stored = entry.get("param") if isinstance(entry, Mapping) else entry
    return isinstance(stored, Tensor) and stored.numel() == ranks * prod(shapes[name])


def _check_attention_order(version: Any, path: Path) -> None:
    """Raises UserError for a file of an old Megatron version whose query_key_value is not laid out per
    head."""
    if isinstance(version, (int, float)) and version < 2:
        raise UserError(
            f"checkpoint file {path} has checkpoint_version {version}, expected 2 or later: rows of its "
            "query_key_value are in another order. Load and save it with the program that wrote it"
        )


def _first_int(*values: Any) -> int:
    """Returns the first value that is a non-negative integer; -1 if none is."""
    numbers = (
        value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )
    return next(numbers, -1)
