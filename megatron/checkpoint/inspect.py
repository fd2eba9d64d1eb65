"""Describes the checkpoints in a folder: run, files, parameters and problems.

The inspection writes nothing. It lists a file that is damaged or cannot be read now among the problems,
without an error. A malicious file raises HostileFileError.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint.conversion.pipeline import PARTIAL, SOURCE_FILE
from megatron.checkpoint.discovery import check_program, open_checkpoint, read_latest_universal
from megatron.checkpoint.files import Files, file_sizes, first_size_mismatch
from megatron.checkpoint.formats.deepspeed_files import missing_files
from megatron.checkpoint.formats.registry import (
    FORMATS,
    HUGGING_FACE,
    LATEST_UNIVERSAL_FILE,
    NATIVE,
    PARAMETER_FOLDER,
    format_of,
    open_reader,
)
from megatron.checkpoint.formats.state import ParameterRecord, StateReader
from megatron.checkpoint.lineage.identity import (
    CHECKPOINT_NAME,
    LATEST_FILE,
    MissingCheckpointError,
    read_latest,
)
from megatron.checkpoint.record import REPLACED, RUN_FILE, SAVING, Checkpoint, step_of
from megatron.checkpoint.saved_config import check_run_file
from megatron.config.model import model_summary
from megatron.errors import UserError, one_line, stop_at_access_error
from megatron.files import HostileFileError
from megatron.text_table import first_few

FILE_KINDS = {
    "layers": "layer_*-model_states.pt",
    "model states": "mp_rank_*_model_states.pt",
    "optimizer": "*_optim_states.pt",
    "fp32 values": f"{PARAMETER_FOLDER}/*/fp32.pt",
    "moments and steps": f"{PARAMETER_FOLDER}/*/[!f]*.pt",
    "chunks of tensors": "*.distcp",
}
NOT_COMPARED = "not compared: use --verify to read and compare the contents"


@dataclass(frozen=True)
class Summary:
    """One folder in an overview. Unknown numbers are None. problem: what is wrong; "" if nothing is.

    kind: a checkpoint format, or the state of an unfinished save or conversion: 'being saved', 'replaced' (a
    checkpoint of the same step is replacing it), 'being converted'.
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
class Report:
    """What is known about one checkpoint. Without a readable `run.json` this is the folder, files and
    problems.

    digests: how many digests were compared, or why none was.
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
    """A folder's `latest` and `latest_universal`, its checkpoints, and a report on its newest complete
    checkpoint (a native one if there is any). If the folder itself is a checkpoint, the overview has only
    the report."""

    folder: str
    latest: str | None
    latest_universal: str | None
    checkpoints: list[Summary]
    problems: list[str]
    checkpoint: Report | None

    @property
    def is_intact(self) -> bool:
        """Whether no file is damaged or missing."""
        return self.checkpoint is not None and not self.problems and not self.checkpoint.problems


def inspect_folder(folder: Path, verify: bool = False) -> Overview:
    """Describes a folder of checkpoints and reports on the newest complete one, or on `folder` itself.

    All checkpoints have their file sizes compared. verify: also compare the digests of the reported one.
    """
    if _kind(folder):
        return Overview(str(folder), None, None, [], [], inspect_checkpoint(folder, verify))
    paths = [path for path in folder.iterdir() if path.is_dir() and _kind(path)]
    if not paths:
        raise UserError(f"{folder} holds no checkpoint: expected global_stepN folders, or the path of one")
    latest: dict[str, str | None] = {}
    problems = []
    for file, read in _LATEST_FILES.items():
        try:
            latest[file] = read(folder)
        except MissingCheckpointError as error:
            latest[file] = ""
            problems.append(str(error))
    paths.sort(key=lambda path: (step_of(path.name), path.name))
    found = [_summary(path, path.name == latest.get(_latest_file(_kind(path)))) for path in paths]
    problems += [f"{item.name}: {item.problem}" for item in found if item.problem]
    report = None
    for file, named in latest.items():
        complete = [item.name for item in found if _latest_file(item.kind) == file and item.is_complete]
        if named is None and complete:
            problems.append(f"`{file}` does not exist, or it is empty")
        elif named and named not in [item.name for item in found]:
            problems.append(f"`{file}` names {named}, which does not exist")
        if complete and report is None:
            newest = named if named in complete else complete[-1]
            try:
                with stop_at_access_error():
                    report = inspect_checkpoint(folder / newest, verify)
            except HostileFileError:
                raise
            except UserError as error:
                problems.append(f"{newest}: {error}")
    return Overview(str(folder), latest[LATEST_FILE], latest[LATEST_UNIVERSAL_FILE], found, problems, report)


# File -> function that reads it, in the order in which the report looks for the checkpoint that it describes.
_LATEST_FILES = {LATEST_FILE: read_latest, LATEST_UNIVERSAL_FILE: read_latest_universal}


def _latest_file(kind: str) -> str:
    """Returns the name of the `latest` file for a kind of checkpoint; "" if this kind has none."""
    return FORMATS[kind].latest_file if kind in FORMATS else ""


def _kind(path: Path) -> str:
    """Returns the kind for `Summary`; "" for a folder that is not a checkpoint. If the folder cannot be read,
    its name decides."""
    try:
        return _kind_by_files(path)
    except OSError:
        return NATIVE if CHECKPOINT_NAME.fullmatch(path.name) else ""


def _kind_by_files(path: Path) -> str:
    if path.name.startswith(SAVING):
        return "being saved"
    name = format_of(path)
    if name == HUGGING_FACE:
        return ""  # an exported model beside the checkpoints
    if path.name.endswith(PARTIAL) and (name != NATIVE or (path / SOURCE_FILE).is_file()):
        return "being converted"
    if path.name.endswith(REPLACED) and step_of(path.name) >= 0:
        return "replaced"
    is_native = CHECKPOINT_NAME.fullmatch(path.name) or (path / RUN_FILE).is_file()
    return name if name != NATIVE or is_native else ""


def _summary(path: Path, is_latest: bool) -> Summary:
    kind, sizes, state, problem = _kind(path), [], None, ""
    try:
        with stop_at_access_error():
            sizes = [*file_sizes(path).values()]
            state = _open(path).state
            if (path / RUN_FILE).exists():
                open_checkpoint(path)  # compares the sizes
    except HostileFileError:
        raise
    except UserError as error:
        # An unfinished save or conversion is not expected to be complete.
        if _latest_file(kind) or state is not None:
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
    """Opens a checkpoint even if its files are missing or damaged."""
    if format_of(folder) == NATIVE and not (folder / RUN_FILE).exists():
        check_program(folder)
        raise UserError(f"{RUN_FILE}, which is written last, is missing")
    return open_checkpoint(folder, with_files=False)


def inspect_checkpoint(folder: Path, verify: bool = False) -> Report:
    """Returns the report on the checkpoint in `folder`. verify: compare all contents that have digests."""
    groups = _file_groups(folder)
    try:
        checkpoint = _open(folder)
        if not checkpoint.is_external:
            check_run_file(checkpoint)
    except HostileFileError:
        raise
    except UserError as error:
        return Report(str(folder), False, groups, [str(error), *_truncated_files(folder)])
    run = checkpoint.run
    files = run.get("files", {})
    missing = files.keys() - file_sizes(folder)
    problems = list(_file_problems(folder, files))
    if format_of(folder) == NATIVE:
        problems += _never_written(run)
    reader = open_reader(checkpoint)
    parameters, more = reader.inspect_parameters()
    digests, damages = _compare_digests(reader, verify)

    def names(problem: str) -> bool:  # so that each missing file is named only once
        return any(name in problem for name in missing)

    return Report(
        folder=str(folder),
        is_complete=True,
        files=groups,
        problems=problems + [problem for problem in dict.fromkeys(more + damages) if not names(problem)],
        digests=digests,
        kind=_kind(folder),
        state=vars(checkpoint.state),
        model=one_line(_model_line(checkpoint, sum(prod(parameter.shape) for parameter in parameters))),
        layout=printable_entries(run.get("layout", {})),
        stages=printable_entries(run.get("stages", {})),
        vocab_size=run.get("vocab_size"),
        eod=run.get("eod"),
        parameters=parameters,
    )


def _compare_digests(reader: StateReader, verify: bool) -> tuple[str, list[str]]:
    """Returns a summary of the comparison, and a list of damaged files or tensors."""
    files = reader.compared_files()
    if not (reader.tensor_digests or files):
        return "there are none to compare", []
    if not verify:
        return NOT_COMPARED, []
    count, problems = reader.verify()
    unit = "tensors" if not files else "files" if reader.files_have_digests else "tensors and files"
    compared = f"{count:,} {unit} compared, {count - len(problems):,} equal"
    if without := len(reader.files_without_checksums):
        compared += f", {without:,} not verified: they have no checksums"
    return compared, problems


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
    """Yields what is wrong with the names and sizes of files, compared with `run.json`."""
    if not files:
        return
    found = {name for name in file_sizes(folder) if name in files or name.endswith((".pt", ".distcp"))}
    if files.keys() - found:
        yield f"missing: {first_few(sorted(files.keys() - found))}"
    if found - files.keys():
        yield f"left over, not part of this checkpoint: {first_few(sorted(found - files.keys()))}"
    for name in sorted(files.keys() & found):
        if problem := first_size_mismatch(folder, {name: files[name]}):
            yield problem


def _never_written(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if `run.json` does not list all files that its layout requires."""
    if not run.get("files"):
        return
    try:
        missing = missing_files(run["files"], run)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its layout cannot be read ({one_line(error)})"
        return
    if missing:
        yield f"never written: {first_few(missing)}"


def printable_entries(value: Any) -> Any:
    """Returns a value from a file with control characters removed: they could forge lines on a terminal."""
    if isinstance(value, dict):
        return {one_line(key): printable_entries(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [printable_entries(entry) for entry in value]
    return one_line(value) if isinstance(value, str) else value


def _truncated_files(folder: Path) -> Iterator[str]:
    """Yields a problem for each file without a readable zip directory. torch.save writes the directory
    last."""
    for path in sorted(folder.glob("*.pt")):
        if path.is_file() and not zipfile.is_zipfile(path):
            yield f"{path.name} is damaged: {path.stat().st_size:,} bytes that are not a file of torch.save"


def _model_line(checkpoint: Checkpoint, num_parameters: int) -> str:
    if checkpoint.is_external:
        return f"of another framework, {num_parameters:,} parameters, including the padding of the vocabulary"
    config = checkpoint.config
    return (
        f"{model_summary(config.model)}, {config.precision.name}, "
        f"vocabulary {checkpoint.vocab_size:,}, {num_parameters:,} parameters"
    )
