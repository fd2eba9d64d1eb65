"""What lies in a folder of checkpoints: which are complete, and what each says of itself."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.integrity.files import read_json
from megatron.checkpoint.integrity.layout_files import missing_files
from megatron.checkpoint.integrity.manifest import first_size_mismatch, has_valid_checksum
from megatron.checkpoint.integrity.names import check_run
from megatron.checkpoint.lineage.identity import CHECKPOINT_NAME, LineageEntry, parse_lineage, parse_run_id
from megatron.checkpoint.lineage.latest import LATEST_FILE, RECORD_FILE, read_latest, read_record
from megatron.config import Config, ConfigError

RUN_FILE = "run.json"
# A checkpoint that is being written is called this and its name.
SAVING = "saving-"
# A checkpoint that another one of its name replaces is called its name and this until that one is in place.
REPLACED = ".replaced"
# In a universal checkpoint: a folder per parameter.
PARAMETER_FOLDER = "zero"


@dataclass(frozen=True)
class TrainingState:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    """Without an update, for whatever reason."""
    skips_in_a_row: int = 0
    """Of the last steps; those of --skip-train-iteration-range are no steps."""
    rollbacks: int = 0
    recent_losses: tuple[float, ...] = ()
    """Of the last steps that were taken, oldest first; kept where a spike is looked for."""
    recent_grad_norms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("recent_losses", "recent_grad_norms"):  # JSON makes lists of them
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its folder and what `run.json` says."""

    folder: Path
    state: TrainingState
    run: dict[str, Any]
    skip_reason: str = ""
    """Why a newer one was not taken, if so."""
    remark: str = ""
    """What it does not say, so that nothing could be compared with it."""

    @property
    def is_external(self) -> bool:
        """Whether another program wrote it: it tells `state` and what it kept of its arguments, no config."""
        return "config" not in self.run

    @property
    def run_id(self) -> str | None:
        """The run that wrote it; None if it is from before run ids."""
        return parse_run_id(self.run.get("run_id"))

    @property
    def lineage(self) -> tuple[LineageEntry, ...]:
        """The checkpoints that it descends from, oldest first."""
        return parse_lineage(self.run.get("lineage", []))

    @property
    def entry(self) -> LineageEntry:
        """It itself in the lineage of a later checkpoint."""
        name = self.folder.name.removesuffix(REPLACED)
        return LineageEntry(name, step_of(name), self.run_id, self.run.get("sha256"))

    @property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return Config.from_dict(self.run["config"])

    @property
    def vocab_size(self) -> int:
        """True size of the vocabulary, without padding."""
        return int(self.run["vocab_size"])

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, None if the run knew none."""
        return self.run["eod"]


def find_latest(folder: str | Path, damaged: Mapping[str, str] | None = None) -> Checkpoint | None:
    """The checkpoint that a run resumes from: the one that `latest` names, or the one that was renamed into
    place when the job was killed before `latest` could name it; if it is damaged, the newest complete one
    that it descends from. Or `folder` itself if it is a checkpoint. None if there is none.

    `damaged`: paths of checkpoints to pass over, and what was found to be wrong with them.

    Raises ConfigError when there are checkpoints but none of them is complete, and when nothing says which
    of several runs is meant.
    """
    folder, damaged = Path(folder), damaged or {}
    if (folder / RUN_FILE).is_file():
        if str(folder) in damaged:
            raise ConfigError(f"checkpoint {folder}: {damaged[str(folder)]}; give another one to --load")
        return open_checkpoint(folder)
    names = native_names(folder)
    latest = read_latest(folder)
    line, reason = _candidates(folder, latest, names)
    skip_reason = [reason] if reason else []
    for name, sha256 in line.items():
        path = current_path(folder, name)
        if name not in names and name != latest:
            continue  # deleted by --keep-last, or of the run's time in another folder
        try:
            if str(path) in damaged:
                raise ConfigError(f"checkpoint {path}: {damaged[str(path)]}")
            checkpoint = open_checkpoint(path)
            if sha256 not in (None, checkpoint.run["sha256"]) and name != latest:
                raise ConfigError(f"checkpoint {path}: it is not the one that this run saved under that name")
        except ConfigError as error:
            skip_reason.append(str(error))
            continue
        skip_reason += _newer_checkpoints(folder, checkpoint, names, " ".join(skip_reason))
        return replace(checkpoint, skip_reason="; ".join(skip_reason))
    if names or latest:
        raise ConfigError("; ".join(skip_reason) or f"no checkpoint in {folder} is complete")
    return None


def _candidates(
    folder: Path, latest: str | None, names: Mapping[str, Path]
) -> tuple[dict[str, str | None], str]:
    """Names of the run's checkpoints with their digests (None: any), in the order in which they are tried,
    and in words why the first is not simply the one that `latest` names."""
    record = read_record(folder)
    # The program writes `latest` before its record. A newer `latest` was edited, or the job was killed
    # between the two: in both cases it names the right checkpoint.
    is_newer = latest is not None and _is_newer(folder / LATEST_FILE, folder / RECORD_FILE)
    recorded = None if record is None else (None, record.latest, record.upcoming and record.upcoming.name)
    if record is not None and recorded is not None and latest in recorded and not is_newer:
        entries = [*record.lineage]
        if record.upcoming is not None and _digest_of(folder, record.upcoming) == record.upcoming.sha256:
            entries.append(record.upcoming)
        line = _newest_first(entries)
        reason = ""
        if line and latest is None and record.latest:
            reason = f"{folder / LATEST_FILE} is missing or names no checkpoint; {RECORD_FILE} says which run"
        elif line and latest is not None and latest not in line:
            reason = f"{LATEST_FILE} names {latest}, which is not of the run"
        elif line and latest != next(iter(line)):
            reason = f"the job was killed before {LATEST_FILE} could name {next(iter(line))}"
        return line if latest is None else line | {latest: line.get(latest)}, reason
    if latest is None:
        line = _single_lineage(folder, names)
        return line, f"{folder / LATEST_FILE} is missing or names no checkpoint" if line else ""
    reason = ""
    if record is not None:
        newest = (record.upcoming or record.lineage[-1]).name if record.lineage or record.upcoming else "none"
        if latest != newest:
            reason = f"{LATEST_FILE} was set by hand; the newest that was saved is {newest}"
    own = _open_or_none(current_path(folder, latest))
    if own is not None:
        return {latest: None} | _newest_first(_lineage_of(own, _readable_checkpoints(folder, names))), reason
    before = {name: path for name, path in names.items() if step_of(name) < step_of(latest)}
    rest = _newest_first(record.lineage) if record is not None else _single_lineage(folder, before)
    return {latest: None} | rest, reason


def _is_newer(file: Path, other: Path) -> bool:
    """Whether a file was written after another one of the same folder. Both times are of one file system."""
    try:
        return file.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False


def _newest_first(entries: Iterable[LineageEntry]) -> dict[str, str | None]:
    return {entry.name: entry.sha256 for entry in reversed(list(entries))}


def _single_lineage(folder: Path, names: Mapping[str, Path]) -> dict[str, str | None]:
    """The checkpoints of a folder in which nothing says which is the newest, if all of them are of one line
    of descent. ConfigError if not: the highest number may be another run's."""
    described = _readable_checkpoints(folder, names)
    parents = {
        (entry.name, entry.sha256)
        for checkpoint in described.values()
        for entry in _lineage_of(checkpoint, described)
    }
    tips = [
        checkpoint
        for name, checkpoint in described.items()
        if not parents & {(name, checkpoint.run["sha256"]), (name, None)}
    ]
    if len(tips) > 1:
        which = ", ".join(f"{tip.entry.name} (run {(tip.run_id or 'without id')[:10]})" for tip in tips)
        raise ConfigError(
            f"{folder / LATEST_FILE} names no checkpoint that can be read, and {which} are of different runs "
            "or branches: write the name of the one to resume from into it"
        )
    return _newest_first([*_lineage_of(tips[0], described), tips[0].entry]) if tips else {}


def _lineage_of(checkpoint: Checkpoint, all_described: Mapping[str, Checkpoint]) -> list[LineageEntry]:
    """Its lineage. This repo's first checkpoints have none: all of these in a folder count as one run."""
    if "lineage" in checkpoint.run:
        return list(checkpoint.lineage)
    same = (other.entry for other in all_described.values() if "lineage" not in other.run)
    return sorted(
        (entry for entry in same if entry.iteration < checkpoint.entry.iteration), key=lambda e: e.iteration
    )


def _newer_checkpoints(folder: Path, checkpoint: Checkpoint, names: Iterable[str], told: str) -> list[str]:
    """What to say of those with a higher number than the one that is taken."""
    step = checkpoint.state.iteration
    saving = sorted(path.name for path in folder.glob(f"{SAVING}global_step*"))
    unfinished = [f"{name} was never finished" for name in saving if step_of(name) > step]
    ahead = sorted((name for name in names if step_of(name) > step and name not in told), key=step_of)
    return [*unfinished, *(f"{name} is of another run or branch, or incomplete" for name in ahead)]


def native_names(folder: Path) -> dict[str, Path]:
    """The native checkpoints in a folder, complete or not, by name: the path that each has now."""
    if not folder.is_dir():
        return {}
    names = {
        path.name.removesuffix(REPLACED)
        for path in folder.iterdir()
        if CHECKPOINT_NAME.fullmatch(path.name.removesuffix(REPLACED))
        and path.is_dir()
        and not is_universal(path)
    }
    return {name: current_path(folder, name) for name in sorted(names, key=step_of)}


def current_path(folder: Path, name: str) -> Path:
    """The path of a checkpoint; while another one is about to take its place, it has a suffix."""
    path, replaced = folder / name, folder / f"{name}{REPLACED}"
    return replaced if not path.exists() and replaced.is_dir() else path


def _open_or_none(path: Path) -> Checkpoint | None:
    """The checkpoint of a folder if its `run.json` can be read, whether or not its files are complete."""
    try:
        return open_checkpoint(path, with_files=False)
    except ConfigError:
        return None


def _readable_checkpoints(folder: Path, names: Mapping[str, Path]) -> dict[str, Checkpoint]:
    found = {name: _open_or_none(path) for name, path in names.items()}
    return {name: checkpoint for name, checkpoint in found.items() if checkpoint is not None}


def _digest_of(folder: Path, entry: LineageEntry) -> str | None:
    checkpoint = _open_or_none(folder / entry.name)
    return None if checkpoint is None else checkpoint.run["sha256"]


def is_universal(folder: Path) -> bool:
    """Whether a checkpoint's folder, finished or not, is of the universal format."""
    return (folder / PARAMETER_FOLDER).is_dir()


def step_of(name: str) -> int:
    """The step that a checkpoint's folder name tells, -1 if none."""
    match = re.search(r"global_step(\d+)", name)
    return int(match[1]) if match else -1


def describe_start(checkpoint: Checkpoint | None, load: str | None) -> str:
    """The line that says what a run starts from, and why."""
    if checkpoint is None:
        return "initializing from scratch" + (f" (--load {load} holds no checkpoint)" if load else "")
    why = f" ({checkpoint.skip_reason})" if checkpoint.skip_reason else ""
    remark = f". {checkpoint.remark}" if checkpoint.remark else ""
    return f"starting from {checkpoint.folder}, iteration {checkpoint.state.iteration}{why}{remark}"


def open_checkpoint(folder: str | Path, with_files: bool = True) -> Checkpoint:
    """Reads what a `global_step<N>` folder says of itself; ConfigError names a missing or damaged file.

    with_files: compare the sizes of all files with those in `run.json`. Digests: `first_damaged`.
    """
    path = Path(folder) / RUN_FILE
    try:
        run = read_json(path)
        check_run(run, path)
        if not has_valid_checksum(run):
            raise ValueError("it is not as it was written")
        checkpoint = Checkpoint(path.parent, TrainingState(**run["state"]), run)
        parse_run_id(run.get("run_id"))
        parse_lineage(run.get("lineage", []))
        problem = first_size_mismatch(path.parent, run["files"]) if with_files else None
        if with_files and not problem and not is_universal(path.parent):
            lacking = missing_files(run["files"], run)
            problem = f"{lacking[0]} was never written" if lacking else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {RUN_FILE} cannot be read ({error}); point --load at a folder whose "
            f"`{LATEST_FILE}` names a complete checkpoint"
        ) from error
    if problem:
        raise ConfigError(f"checkpoint {path.parent}: {problem}")
    return checkpoint
