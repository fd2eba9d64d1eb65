"""Universal checkpoints of three dialects, read parameter by parameter for this rank's place.

- This repo's: DeepSpeed's files and `run.json`.
- DeepSpeed's, which its ds_to_universal.py makes for Microsoft's Megatron-DeepSpeed and others, versions 0.2
  to 0.4: no `run.json`; `mp_rank_XX_model_states.pt` tell the iteration, the arguments with the samples
  consumed, and the learning-rate schedule. 0.3 added `sub_param_shape`, and 0.4 widths per rank, for
  parameters made of unequal parts, which no model here has: the files of ours are the same in all of them.
- BLOOM's of 2022 (0.1): the same, but the word embedding keeps its padding, there is no `step.pt`, for which
  the iteration is taken, and copies on tensor ranks were averaged.

None of them runs code: see `torch_files`. Names of parameters are those of the pipeline's layer list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.rules import INFO_KEY, VOCAB_SIZE_KEY, check_info
from megatron.checkpoint.convert.to_universal import (
    LATEST_UNIVERSAL_FILE,
    LOSS_SCALE_KEY,
    MOMENT_FILES,
    OPTIMIZER_STATE_FILE,
    STEP_FILE,
)
from megatron.checkpoint.discovery import (
    PARAMETER_FOLDER,
    RUN_FILE,
    Checkpoint,
    TrainingState,
    is_universal,
    open_checkpoint,
    step_of,
)
from megatron.checkpoint.formats.native import model_files
from megatron.checkpoint.formats.pickles import Stub
from megatron.checkpoint.formats.torch_archive import load_file, read_file
from megatron.checkpoint.integrity.files import expect_layout
from megatron.checkpoint.integrity.names import check_parameter, read_name, shown
from megatron.checkpoint.reshard import LazyTensors, ParameterState, reshard
from megatron.config import Config, ConfigError
from megatron.config.sections.model import MEGATRON_MODEL_ARGS
from megatron.model.single_process import model_specs
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec

# BigScience's enumeration of positions, and Microsoft's words.
_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi", "learned_absolute": "absolute", "rope": "rotary"}
# Rows of padding that a vocabulary may have where nothing tells how it was padded: BLOOM's has 200.
_MOST_PADDING = 1024
_NOT_COMPARED = (
    "It is not of this program: its data, dropout and schedule were not compared with this run's, its model "
    "by the shapes of its tensors and the arguments that it keeps"
)


def find_universal(folder: str | Path) -> Checkpoint:
    """The universal checkpoint that `latest_universal` of the folder names, or the folder itself if it is
    one; ConfigError where there is none, and where it cannot be read."""
    folder = Path(folder)
    if not is_universal(folder):
        latest = folder / LATEST_UNIVERSAL_FILE
        name = read_name(latest)
        if not latest.is_file():
            raise ConfigError(
                f"--universal_checkpoint: {folder} has no file {LATEST_UNIVERSAL_FILE}: make one with "
                "tools/ds_to_universal.py, or drop the flag: --load opens native checkpoints on any layout"
            )
        if name is None:
            raise ConfigError(f"--universal_checkpoint: {latest} does not hold the name of a folder")
        folder = folder / name
    if not is_universal(folder):
        raise ConfigError(
            f"--universal_checkpoint: {folder} is no universal checkpoint: it has no {PARAMETER_FOLDER}/"
        )
    if (folder / RUN_FILE).is_file():
        return open_checkpoint(folder)
    return _open_external(folder)


def _open_external(folder: Path) -> Checkpoint:
    """What the first mp_rank file tells: the others differ from it in rank and random state only."""
    paths = model_files(folder)
    if not paths:
        raise ConfigError(
            f"universal checkpoint {folder} has neither {RUN_FILE} nor mp_rank files, so nothing tells its "
            "iteration"
        )
    content = read_file(paths[0])
    check_parameters(folder)
    if not isinstance(content, Mapping):
        raise ConfigError(f"checkpoint file {paths[0]} holds no dict: it is of no universal checkpoint")
    args = vars(content["args"]) if isinstance(content.get("args"), Stub) else {}
    args = {key: _json_value(value) for key, value in args.items()}
    position = args.get("position_embedding_type")
    if isinstance(position, (int, str)):
        args["position_embedding_type"] = _POSITIONS.get(position, position)
    iteration = _first_int(content.get("iteration"), args.get("iteration"), step_of(folder.name))
    batch = _first_int(args.get("global_batch_size"))
    samples = _first_int(args.get("consumed_train_samples"), content.get("global_samples"), iteration * batch)
    sequence = _first_int(args.get("seq_length"))
    tokens = _first_int(args.get("consumed_train_tokens"), content.get("tokens"), samples * sequence)
    if iteration < 0 or samples < 0:
        raise ConfigError(
            f"checkpoint file {paths[0]} tells no iteration (it says {shown(content.get('iteration'))}) or "
            "no number of consumed samples, so nothing says where the data goes on"
        )
    state = TrainingState(iteration, samples, max(tokens, 0))
    info = content.get(INFO_KEY)
    size = check_info(info, paths[0]).get(VOCAB_SIZE_KEY) if isinstance(info, Mapping) else None
    run = {"args": args, "vocab_size": size}
    remark = _NOT_COMPARED
    if not any((folder / PARAMETER_FOLDER).glob(f"*/{STEP_FILE}")):
        remark += f". It has no {STEP_FILE}: the optimizer's step is taken to be the iteration, {iteration}"
    return Checkpoint(folder, state, run, remark=remark)


def check_parameters(folder: Path) -> None:
    """Raises HostileFileError for a folder of a universal checkpoint that no parameter is called."""
    for path in (folder / PARAMETER_FOLDER).iterdir():
        if path.is_dir():
            check_parameter(path.name, folder / PARAMETER_FOLDER)


def check_external(checkpoint: Checkpoint, config: Config, vocab_size: int) -> None:
    """Refuses another program's checkpoint of another model, by the arguments that it keeps and by the names
    of its parameters. Their shapes are compared when they are read."""
    differences = [
        f"{name} was {checkpoint.run['args'][name]}, is {getattr(config.model, name)}"
        for name in MEGATRON_MODEL_ARGS
        # An argument that the other program does not know contradicts nothing.
        if checkpoint.run["args"].get(name) not in (None, getattr(config.model, name))
    ]
    specs = model_specs(config, vocab_size, None)
    differences += _vocabulary_differences(checkpoint, specs, vocab_size)
    held, wanted = _files_of_parameters(checkpoint).keys(), specs.keys()
    for names, what in ((wanted - held, "it lacks"), (held - wanted, "beside the model's it has")):
        if names:
            differences.append(f"{what} {len(names)} parameters, among them {min(names)}")
    if differences:
        raise ConfigError(f"checkpoint {checkpoint.folder} holds another model: {'; '.join(differences)}")


def _vocabulary_differences(
    checkpoint: Checkpoint, specs: Mapping[str, ParameterSpec], vocab_size: int
) -> list[str]:
    """The true size if the checkpoint tells it, else more rows than padding explains."""
    told = checkpoint.run["vocab_size"]
    if told is not None:
        same = told == vocab_size
        return [] if same else [f"the vocabulary had {told} tokens, has {vocab_size}"]
    (name,) = (name for name, spec in specs.items() if spec.num_valid_rows is not None)
    path = checkpoint.folder / PARAMETER_FOLDER / name / "fp32.pt"
    rows = read_full_tensor(path).shape[0] if path.is_file() else vocab_size
    args = checkpoint.run["args"]
    unit = _first_int(args.get("make_vocab_size_divisible_by"), 128)
    unit *= _first_int(args.get("tensor_model_parallel_size"), 1)
    if vocab_size <= rows <= vocab_size + max(unit, _MOST_PADDING):
        return []
    return [f"the vocabulary had {rows} rows with padding, and has {vocab_size} tokens"]


def _files_of_parameters(checkpoint: Checkpoint) -> dict[str, frozenset[str]]:
    """The names of each parameter's files; ConfigError where one lacks what others have, as in a folder that
    was copied in part."""
    known = {"fp32.pt", STEP_FILE, *MOMENT_FILES.values()}
    folders = [path for path in (checkpoint.folder / PARAMETER_FOLDER).iterdir() if path.is_dir()]
    files = {path.name: frozenset(known & {file.name for file in path.iterdir()}) for path in folders}
    all_names = frozenset().union(*files.values())
    for name, own in sorted(files.items()):
        if lacking := sorted(all_names - own):
            raise ConfigError(
                f"universal checkpoint {checkpoint.folder} is incomplete: {name} has no {lacking[0]}, which "
                "other parameters have: copy it again"
            )
    return files


class UniversalParameters:
    """fp32 values and moments of every parameter in a universal checkpoint, by global name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder / PARAMETER_FOLDER
        self.iteration = checkpoint.state.iteration

    @property
    def loss_scaler(self) -> dict | None:
        """The state of the loss scale; None where the checkpoint keeps none, so that it begins anew."""
        path = self.folder / OPTIMIZER_STATE_FILE
        with expect_layout(path, "the optimizer's state"):
            return read_file(path).get(LOSS_SCALE_KEY) if path.is_file() else None

    @cached_property
    def moments_kind(self) -> str:
        """The kind of optimizer whose moments these are."""
        return "adam" if any(self.folder.glob(f"*/{MOMENT_FILES['exp_avg']}")) else "sgd"

    def read(self, name: str, spec: ParameterSpec, tp_group: TPGroup) -> ParameterState:
        """As `SavedParameters.read`. ConfigError for a parameter that is missing or of another shape."""
        folder = self.folder / name
        if not folder.is_dir():
            raise ConfigError(
                f"universal checkpoint {folder.parent} holds no parameter {name}: is it of another model?"
            )
        moments = {
            key: partial(_shard, folder / file, spec, tp_group)
            for key, file in MOMENT_FILES.items()
            if (folder / file).exists()
        }
        return (
            _shard(folder / "fp32.pt", spec, tp_group),
            LazyTensors(moments),
            {"step": self._step(folder)} if moments else {},
        )

    def _step(self, folder: Path) -> Tensor:
        path = folder / STEP_FILE
        with expect_layout(path, "the optimizer's step"):
            step = torch.as_tensor(load_file(path) if path.exists() else self.iteration, dtype=torch.float32)
            if step.numel() != 1:
                raise ValueError("it is not one number")
            return step


def _shard(path: Path, spec: ParameterSpec, tp_group: TPGroup) -> Tensor:
    """This rank's part of a whole tensor, flat, in fp32."""
    whole = read_full_tensor(path, spec)
    if spec.shard_dim is None:
        return whole.reshape(-1)
    saved = replace(spec, global_shape=tuple(whole.shape))
    return reshard(spec, tp_group, saved, 1, lambda _rank: whole).reshape(-1)


def fits(shape: tuple[int, ...], spec: ParameterSpec) -> bool:
    """Whether a whole tensor is of the spec's shape; the vocabulary may have any padding, or none."""
    if spec.num_valid_rows is None:
        return shape == tuple(spec.global_shape)
    return shape[1:] == tuple(spec.global_shape[1:]) and shape[0] >= spec.num_valid_rows


def read_full_tensor(path: Path, spec: ParameterSpec | None = None) -> Tensor:
    """The tensor in a file of a parameter or moment, mapped into memory; ConfigError unless it fits the spec,
    if there is one."""
    entry = load_file(path)
    whole = entry.get("param") if isinstance(entry, Mapping) else None
    if not isinstance(whole, Tensor) or whole.dim() == 0 or not whole.is_floating_point():
        raise ConfigError(
            f"checkpoint file {path} holds no tensor under 'param': it is of no universal checkpoint"
        )
    if spec is not None and not fits(tuple(whole.shape), spec):
        rows = spec.global_shape[0] if spec.num_valid_rows is None else spec.num_valid_rows
        raise ConfigError(
            f"{path} holds a tensor of shape {tuple(whole.shape)}, expected "
            f"{(rows, *spec.global_shape[1:])}: it is of another model"
        )
    return whole


def _json_value(value: Any) -> Any:
    """An argument as JSON knows it: an enumeration's value, else what can be printed."""
    if isinstance(value, Stub) and len(value.constructor_args) == 1:
        value = value.constructor_args[0]
    return value if isinstance(value, (str, int, float, bool, list, tuple, type(None))) else shown(value)


def _first_int(*values: Any) -> int:
    """The first that is a number of things; -1 if none is."""
    numbers = (
        value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )
    return next(numbers, -1)
