"""What is in a checkpoint folder: what it says of itself, which files there are, and what is wrong with them.

Nothing here is written, and nothing raises for a damaged file: it is named among the problems. A file such as
no program of the family writes raises HostileFileError.
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

from megatron.checkpoint.convert.to_universal import LATEST_UNIVERSAL_FILE, PARTIAL, SOURCE_FILE
from megatron.checkpoint.discovery import (
    LATEST_FILE,
    PARAMETER_FOLDER,
    RUN_FILE,
    SAVING,
    Checkpoint,
    is_universal,
    open_checkpoint,
    step_of,
)
from megatron.checkpoint.formats.native import VALUES
from megatron.checkpoint.formats.universal import find_universal
from megatron.checkpoint.integrity.files import HostileFileError
from megatron.checkpoint.integrity.layout_files import missing_files
from megatron.checkpoint.integrity.manifest import Files, first_size_mismatch
from megatron.checkpoint.integrity.names import one_line, read_name
from megatron.checkpoint.integrity.verify import tensor_digests, verify_digests
from megatron.checkpoint.reading import check_run_file
from megatron.checkpoint.states import UniversalStates, specs_of
from megatron.checkpoint.weights import LayerFiles
from megatron.config import ConfigError
from megatron.config.sections.model import model_summary
from megatron.mpu.parameters import ParameterSpec
from megatron.text_table import first_few

FILE_KINDS = {
    "layers": "layer_*-model_states.pt",
    "model states": "mp_rank_*_model_states.pt",
    "optimizer": "*_optim_states.pt",
    "fp32 values": f"{PARAMETER_FOLDER}/*/fp32.pt",
    "moments and steps": f"{PARAMETER_FOLDER}/*/[!f]*.pt",
}
NOT_COMPARED = "not compared: --verify reads all that has one"
_STEP_FOLDER = re.compile(r"global_step\d+")
_REPLACED = ".replaced"


@dataclass(frozen=True)
class Summary:
    """One folder. Numbers are None where it does not say them; `problem`: what is wrong, if something is.

    kind: 'native', 'universal', or what a save or a conversion has left: 'being saved', 'replaced' (by one of
    the same step), 'being converted'.
    """

    name: str
    kind: str
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
    """One checkpoint. Where it does not say what it is, only folder, files and problems are known.

    digests: how many were compared, or why none.
    """

    folder: str
    is_complete: bool
    files: list[FileGroup]
    problems: list[str]
    digests: str = ""
    kind: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    eod: int | None = None
    parameters: list[ParameterRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Overview:
    """A folder: what `latest` and `latest_universal` say, its checkpoints, and the newest complete one in
    full, a native one if there is any; of a folder that is a checkpoint itself that one alone."""

    folder: str
    latest: str | None
    latest_universal: str | None
    checkpoints: list[Summary]
    problems: list[str]
    checkpoint: Report | None

    @property
    def is_intact(self) -> bool:
        """Nothing is damaged or missing."""
        return self.checkpoint is not None and not self.problems and not self.checkpoint.problems


def inspect_folder(folder: Path, verify: bool = False) -> Overview:
    """What is in `folder`: checkpoints, of which the newest complete one is looked into, or just one.

    Sizes of files are compared in all of them. verify: the digests too, in the one that is looked into.
    """
    if _kind(folder):
        return Overview(str(folder), None, None, [], [], inspect_checkpoint(folder, verify))
    paths = [path for path in folder.iterdir() if path.is_dir() and _kind(path)]
    if not paths:
        raise ConfigError(
            f"{folder}: there is no checkpoint, expected a folder with global_stepN folders, or one of them"
        )
    latest = {kind: _named_by(folder / file) for kind, file in _LATEST_FILES.items()}
    paths.sort(key=lambda path: (step_of(path.name), path.name))
    found = [_summary(path, path.name == latest.get(_kind(path))) for path in paths]
    problems = [f"{item.name}: {item.problem}" for item in found if item.problem]
    report = None
    for kind, file in _LATEST_FILES.items():
        complete = [item.name for item in found if item.kind == kind and item.is_complete]
        if latest[kind] is None and complete:
            problems.append(f"there is no file `{file}`")
        elif latest[kind] is not None and latest[kind] not in [item.name for item in found]:
            problems.append(f"`{file}` names {latest[kind]}, which is not there")
        if complete and report is None:
            newest = latest[kind] if latest[kind] in complete else complete[-1]
            report = inspect_checkpoint(folder / newest, verify)
    return Overview(str(folder), latest["native"], latest["universal"], found, problems, report)


# In the order in which one of them is looked into.
_LATEST_FILES = {"native": LATEST_FILE, "universal": LATEST_UNIVERSAL_FILE}


def _kind(path: Path) -> str:
    """As in `Summary`; '' for a folder that is no checkpoint."""
    if path.name.startswith(SAVING):
        return "being saved"
    if path.name.endswith(PARTIAL) and (is_universal(path) or (path / SOURCE_FILE).is_file()):
        return "being converted"
    if path.name.endswith(_REPLACED) and step_of(path.name) >= 0:
        return "replaced"
    if is_universal(path):
        return "universal"
    return "native" if _STEP_FOLDER.fullmatch(path.name) or (path / RUN_FILE).is_file() else ""


def _named_by(path: Path) -> str | None:
    if not path.is_file():
        return None
    return read_name(path) or "something that is not a folder's name"


def _summary(path: Path, is_latest: bool) -> Summary:
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    kind, state, problem = _kind(path), None, ""
    try:
        state = _open(path).state
        if (path / RUN_FILE).exists():
            open_checkpoint(path)  # compares the sizes
    except HostileFileError:
        raise
    except ConfigError as error:
        # What a save or a conversion has left is not expected to be complete.
        if kind in _LATEST_FILES or state is not None:
            problem = str(error).removeprefix(f"checkpoint {path}: ")
    return Summary(
        path.name,
        kind,
        is_latest,
        state is not None,
        state.iteration if state else None,
        state.consumed_samples if state else None,
        state.consumed_tokens if state else None,
        len(sizes),
        sum(sizes),
        problem,
    )


def _open(folder: Path) -> Checkpoint:
    """What the checkpoint says of itself, whatever is wrong with its files."""
    if (folder / RUN_FILE).exists():
        return open_checkpoint(folder, with_files=False)
    if is_universal(folder):
        return find_universal(folder)
    raise ConfigError(f"{RUN_FILE}, which is written last, is missing")


def inspect_checkpoint(folder: Path, verify: bool = False) -> Report:
    """All that can be said of the checkpoint in `folder`. verify: after reading all that has a digest."""
    groups = _file_groups(folder)
    try:
        checkpoint = _open(folder)
        if not checkpoint.is_external:
            check_run_file(checkpoint)
    except HostileFileError:
        raise
    except ConfigError as error:
        return Report(str(folder), False, groups, [str(error), *_truncated_files(folder)])
    run = checkpoint.run
    problems = list(_file_problems(folder, run.get("files", {})))
    if is_universal(folder):
        parameters, more = _universal_parameters(checkpoint)
    else:
        problems += _never_written(run)
        parameters, more = _native_parameters(folder, specs_of(checkpoint))
    digests, damages = _compare_digests(checkpoint, verify)
    return Report(
        folder=str(folder),
        is_complete=True,
        files=groups,
        problems=problems + more + damages,
        digests=digests,
        kind=_kind(folder),
        state=vars(checkpoint.state),
        model=one_line(_model_line(checkpoint, sum(prod(parameter.shape) for parameter in parameters))),
        layout=printable(run.get("layout", {})),
        stages=printable(run.get("stages", {})),
        vocab_size=run.get("vocab_size"),
        eod=run.get("eod"),
        parameters=parameters,
    )


def _compare_digests(checkpoint: Checkpoint, verify: bool) -> tuple[str, list[str]]:
    """What was compared, in words, and what was found to be damaged."""
    universal = is_universal(checkpoint.folder)
    if universal and not tensor_digests(checkpoint):
        return "there are none to compare", []
    if not verify:
        return NOT_COMPARED, []
    count, damages = verify_digests(checkpoint)
    what = "tensors" if universal else "files"
    return f"{count:,} {what} compared, {count - len(damages):,} equal", damages


def _file_groups(folder: Path) -> list[FileGroup]:
    kinds = {kind: set(folder.glob(pattern)) for kind, pattern in FILE_KINDS.items()}
    all_files = {path for path in folder.rglob("*") if path.is_file()}
    kinds["other"] = all_files.difference(*kinds.values())
    return [
        FileGroup(kind, len(paths), sum(path.stat().st_size for path in paths))
        for kind, paths in kinds.items()
        if paths
    ]


def _file_problems(folder: Path, files: Files) -> Iterator[str]:
    """What is wrong with the names and sizes of files, compared with those in `run.json`."""
    if not files:
        return
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}
    if files.keys() - found:
        yield f"missing: {first_few(sorted(files.keys() - found))}"
    if found - files.keys():
        yield f"left over, not of this checkpoint: {first_few(sorted(found - files.keys()))}"
    for name in sorted(files.keys() & found):
        if problem := first_size_mismatch(folder, {name: files[name]}):
            yield problem


def _never_written(run: Mapping[str, Any]) -> Iterator[str]:
    """What the layout in `run.json` implies and its list of files lacks."""
    if not run.get("files"):
        return
    try:
        missing = missing_files(run["files"], run)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its layout cannot be read ({one_line(error)})"
        return
    if missing:
        yield f"never written: {first_few(missing)}"


def printable(value: Any) -> Any:
    """A value of a file without control characters, which could forge lines on a terminal."""
    if isinstance(value, dict):
        return {one_line(key): printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [printable(entry) for entry in value]
    return one_line(value) if isinstance(value, str) else value


def _truncated_files(folder: Path) -> Iterator[str]:
    """Of files that were cut short: torch's format is a zip archive, whose directory stands at the end."""
    for path in sorted(folder.glob("*.pt")):
        if path.is_file() and not zipfile.is_zipfile(path):
            yield f"{path.name} is damaged: {path.stat().st_size:,} bytes that are no file of torch"


def _universal_parameters(checkpoint: Checkpoint) -> tuple[list[ParameterRecord], list[str]]:
    """What the parameters' folders hold, and what is wrong with it."""
    states, specs = UniversalStates(checkpoint), specs_of(checkpoint)
    records: list[ParameterRecord] = []
    problems: list[str] = []
    for name in states.names:
        try:
            shapes = {kind: tuple(states.read(name, kind).shape) for kind in states.kinds(name)}
        except HostileFileError:
            raise
        except ConfigError as error:
            problems.append(str(error))
            continue
        records.append(ParameterRecord(name, shapes[VALUES], "float32"))
        problems += [
            f"{kind} of {name} has the shape {shape}, its values {shapes[VALUES]}"
            for kind, shape in shapes.items()
            if shape != shapes[VALUES]
        ]
    if specs and (missing := [name for name in specs if name not in states.names]):
        problems.append(f"parameters that no file holds: {first_few(sorted(missing))}")
    if specs and (surplus := [name for name in states.names if name not in specs]):
        problems.append(f"parameters that the model does not have: {first_few(sorted(surplus))}")
    return records, problems


def _native_parameters(
    folder: Path, specs: Mapping[str, ParameterSpec]
) -> tuple[list[ParameterRecord], list[str]]:
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
        except HostileFileError:
            raise
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
        problems.append(f"parameters that no file holds: {first_few(sorted(missing))}")
    return records, problems


def _all_equal(copies: list[Tensor]) -> bool:
    return all(torch.equal(copies[0], copy) for copy in copies[1:])


def _model_line(checkpoint: Checkpoint, num_parameters: int) -> str:
    if checkpoint.is_external:
        return f"of another program, {num_parameters:,} parameters, padding of the vocabulary included"
    config = checkpoint.config
    return (
        f"{model_summary(config.model)}, {config.precision.name}, "
        f"{checkpoint.vocab_size:,} tokens, {num_parameters:,} parameters"
    )
