"""What is in a checkpoint folder: what it says of itself, which files there are, and what is wrong with them.

Nothing here is written, and nothing raises for a damaged file: it is named among the problems.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import LATEST_FILE, RUN_FILE, open_checkpoint
from megatron.checkpoint.reading import check_run_file
from megatron.checkpoint.weights import LayerFiles
from megatron.config import Config, ConfigError
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER
from megatron.model.single_process import model_specs
from megatron.mpu.parameters import ParameterSpec

FILE_KINDS = {
    "layers": "layer_*-model_states.pt",
    "model states": "mp_rank_*_model_states.pt",
    "optimizer": "*_optim_states.pt",
}
SHOWN_FILES = 3
"""Of a list of missing or surplus files."""
_STEP_FOLDER = re.compile(r"global_step\d+")


@dataclass(frozen=True)
class Summary:
    """One global_step folder. Numbers are None where `run.json` does not say them; `problem` says why."""

    name: str
    is_latest: bool
    is_complete: bool
    iteration: int | None
    consumed_samples: int | None
    consumed_tokens: int | None
    num_files: int
    size_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class FileGroup:
    """The files of one kind."""

    kind: str
    num_files: int
    size_bytes: int


@dataclass(frozen=True)
class ParameterRecord:
    """A whole parameter, put together over tensor ranks, with the vocabulary's padding."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Report:
    """One checkpoint. Without a readable `run.json` only folder, files and problems are known."""

    folder: str
    is_complete: bool
    files: list[FileGroup]
    problems: list[str]
    state: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    eod: int | None = None
    parameters: list[ParameterRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Overview:
    """A folder: what `latest` says, its checkpoints, and the newest complete one in full; of a folder that is
    a checkpoint itself that one alone."""

    folder: str
    latest: str | None
    checkpoints: list[Summary]
    problems: list[str]
    checkpoint: Report | None

    @property
    def is_well(self) -> bool:
        """Nothing is damaged or missing."""
        return self.checkpoint is not None and not self.problems and not self.checkpoint.problems


def inspect_folder(folder: Path) -> Overview:
    """What is in `folder`: checkpoints, of which the newest complete one is looked into, or just one."""
    paths = [path for path in folder.glob("global_step*") if _STEP_FOLDER.fullmatch(path.name)]
    if not paths:
        if not (_STEP_FOLDER.fullmatch(folder.name) or (folder / RUN_FILE).exists()):
            raise ConfigError(
                f"{folder}: there is no checkpoint, expected a folder with global_stepN folders, or one of "
                "them"
            )
        return Overview(str(folder), None, [], [], inspect_checkpoint(folder))
    latest = _latest_name(folder)
    found = [_summary(path, path.name == latest) for path in sorted(paths, key=_step_of)]
    problems = [f"{item.name}: {item.problem}" for item in found if item.problem]
    if latest is None:
        problems.append(f"there is no file `{LATEST_FILE}`")
    elif latest not in [item.name for item in found]:
        problems.append(f"`{LATEST_FILE}` names {latest}, which is not there")
    complete = [item.name for item in found if item.is_complete]
    newest = latest if latest in complete else complete[-1] if complete else None
    report = inspect_checkpoint(folder / newest) if newest else None
    return Overview(str(folder), latest, found, problems, report)


def inspect_checkpoint(folder: Path) -> Report:
    """All that can be said of the checkpoint in `folder`."""
    files = _file_groups(folder)
    problems = list(_damaged_files(folder))
    try:
        checkpoint = open_checkpoint(folder, with_files=False)  # what is wrong with them is found below
        check_run_file(checkpoint)
    except ConfigError as error:
        return Report(str(folder), False, files, [str(error), *problems])
    run, config = checkpoint.run, checkpoint.config
    problems += _surplus_and_missing(folder, config)
    specs = model_specs(config, checkpoint.vocab_size, checkpoint.eod)
    parameters, parameter_problems = _parameters(folder, specs)
    count = sum(prod(parameter.shape) for parameter in parameters)
    return Report(
        str(folder),
        True,
        files,
        problems + parameter_problems,
        run["state"],
        _model_line(config, checkpoint.vocab_size, count),
        run["layout"],
        run["stages"],
        checkpoint.vocab_size,
        checkpoint.eod,
        parameters,
    )


def _latest_name(folder: Path) -> str | None:
    path = folder / LATEST_FILE
    return path.read_text(errors="replace").strip() if path.is_file() else None


def _summary(path: Path, is_latest: bool) -> Summary:
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    state, problem = None, ""
    try:
        state = open_checkpoint(path, with_files=False).state
    except ConfigError as error:
        problem = (
            str(error) if (path / RUN_FILE).exists() else f"{RUN_FILE}, which is written last, is missing"
        )
    return Summary(
        path.name,
        is_latest,
        state is not None,
        state.iteration if state else None,
        state.consumed_samples if state else None,
        state.consumed_tokens if state else None,
        len(sizes),
        sum(sizes),
        problem,
    )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("global_step"))


def _file_groups(folder: Path) -> list[FileGroup]:
    kinds = {kind: set(folder.glob(pattern)) for kind, pattern in FILE_KINDS.items()}
    all_files = {path for path in folder.rglob("*") if path.is_file()}
    kinds["other"] = all_files.difference(*kinds.values())
    return [
        FileGroup(kind, len(paths), sum(path.stat().st_size for path in paths))
        for kind, paths in kinds.items()
        if paths
    ]


def _damaged_files(folder: Path) -> Iterator[str]:
    """Of files that were cut short: torch's format is a zip archive, whose directory stands at the end."""
    for path in sorted(folder.glob("*.pt")):
        if not zipfile.is_zipfile(path):
            yield f"{path.name} is damaged: {path.stat().st_size:,} bytes that are no file of torch"


def _expected_files(config: Config) -> set[str]:
    """DeepSpeed's names of the files that a run of `config` writes."""
    parallel, last = config.parallel, FIRST_TRANSFORMER_LAYER + config.model.num_layers
    tensor = parallel.tensor_model_parallel_size
    # The embedding, the transformer layers, and after a function the final norm: the others have no weights.
    layers = [1, *range(FIRST_TRANSFORMER_LAYER, last), last + 1]
    ranks = range(tensor * parallel.pipeline_model_parallel_size)
    names = {
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in layers for rank in range(tensor)
    }
    names |= {f"mp_rank_{rank:02d}_model_states.pt" for rank in ranks}
    if parallel.zero_stage:
        names |= {
            f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
            for rank in ranks
            for replica in range(parallel.data_parallel_size)
        }
    return names


def _surplus_and_missing(folder: Path, config: Config) -> Iterator[str]:
    expected = _expected_files(config)
    found = {path.name.removeprefix("bf16_") for path in folder.glob("*.pt")}
    if expected - found:
        yield f"missing: {_some(expected - found)}"
    if found - expected:
        yield f"left over, not of this run's layout: {_some(found - expected)}"


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_FILES])
    more = len(names) - SHOWN_FILES
    return f"{shown} and {more} more" if more > 0 else shown


def _parameters(folder: Path, specs: Mapping[str, ParameterSpec]) -> tuple[list[ParameterRecord], list[str]]:
    """What the layer files hold, and what is wrong with it."""
    records: list[ParameterRecord] = []
    problems: list[str] = []
    try:
        files = LayerFiles(folder)
    except ConfigError as error:
        return [], [str(error)]
    unreadable = False
    for layer in files.layers:
        try:
            wholes, shards = files.wholes(layer, specs, meta=True), files.shards(layer)
        except ConfigError as error:
            problems.append(str(error))
            unreadable = True
            continue
        for name, whole in wholes.items():
            records.append(ParameterRecord(name, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")))
            if specs[name].shard_dim is None and not _all_equal(shards[name]):
                problems.append(f"the tensor ranks hold different values of {name}, which is not cut")
    missing = specs.keys() - {record.name for record in records}
    if missing and not unreadable:
        problems.append(f"parameters that no file holds: {_some(missing)}")
    return records, problems


def _all_equal(copies: list[Tensor]) -> bool:
    return all(torch.equal(copies[0], copy) for copy in copies[1:])


def _model_line(config: Config, vocab_size: int, num_parameters: int) -> str:
    model = config.model
    variants = [
        f"{model.position_embedding_type} positions",
        *(["embedding norm"] if model.embed_layernorm else []),
        *([model.glu_activation] if model.glu_activation else []),
        *(["residual after norm"] if model.apply_residual_connection_post_layernorm else []),
    ]
    return (
        f"{model.num_layers} layers x {model.hidden_size} hidden, {model.num_attention_heads} heads, "
        f"sequence {model.seq_length}, {', '.join(variants)}, {config.precision.name}, "
        f"{vocab_size:,} tokens, {num_parameters:,} parameters"
    )
