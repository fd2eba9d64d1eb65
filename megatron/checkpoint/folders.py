"""What lies in a folder of checkpoints: which are complete, and what each says of itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import read_json
from megatron.checkpoint.manifest import first_misfit, is_sealed
from megatron.checkpoint.names import check_run, read_name
from megatron.config import Config, ConfigError

RUN_FILE = "run.json"
LATEST_FILE = "latest"
# A checkpoint that is being written is called this and its name.
SAVING = "saving-"
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
    passed_over: str = ""
    """Why a newer one was not taken, if so."""
    remark: str = ""
    """What it does not say, so that nothing could be compared with it."""

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote it: it tells `state` and what it kept of its arguments, no config."""
        return "config" not in self.run

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
    """The newest complete checkpoint of `folder`: the one that `latest` names, or a newer one of the same
    run; if that is incomplete or missing the newest `global_step<N>` that is not. Or `folder` itself if it is
    a checkpoint. None if there is none.

    `damaged`: folders to pass over, and what was found to be wrong with them.

    Raises ConfigError when there are checkpoints but none of them is complete.
    """
    folder, damaged = Path(folder), damaged or {}
    if (folder / RUN_FILE).is_file():
        if folder.name in damaged:
            raise ConfigError(f"checkpoint {folder}: {damaged[folder.name]}; give another one to --load")
        return open_checkpoint(folder)
    latest = folder / LATEST_FILE
    named = read_name(latest)
    native = (path for path in folder.glob("global_step*") if path.is_dir() and not is_universal(path))
    others = {path.name for path in native} - {named}
    newest_first = sorted(others, key=lambda name: (step_of(name), name), reverse=True)
    successors = [name for name in newest_first if named and _continues(folder / name, named)]
    passed_over = []
    for name in dict.fromkeys([*successors, named, *newest_first] if named else newest_first):
        try:
            if name in damaged:
                raise ConfigError(f"checkpoint {folder / name}: {damaged[name]}")
            checkpoint = open_checkpoint(folder / name)
        except ConfigError as error:
            passed_over.append(str(error))
            continue
        unfinished = [path.name for path in folder.glob(f"{SAVING}global_step*")]
        newer = sorted(name for name in unfinished if step_of(name) > checkpoint.state.iteration)
        passed_over += [f"{name} was never finished" for name in newer]
        if name == named:
            ahead = [other for other in others if step_of(other) > checkpoint.state.iteration]
            passed_over += [f"{other} is incomplete or of another run" for other in sorted(ahead)]
        return replace(checkpoint, passed_over="; ".join(passed_over))
    if passed_over:
        raise ConfigError("; ".join(passed_over))
    return None


def _continues(folder: Path, name: str) -> bool:
    """Whether a checkpoint is of a run that came by the one called `name`, and is newer: the job was killed
    before `latest` could name it."""
    try:
        return step_of(folder.name) > step_of(name) and name in open_checkpoint(folder).run.get("lineage", [])
    except ConfigError:
        return False


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
        return "starting from new weights" + (f" (--load {load} holds no checkpoint)" if load else "")
    why = f" ({checkpoint.passed_over})" if checkpoint.passed_over else ""
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
        if not is_sealed(run):
            raise ValueError("it is not as it was written")
        checkpoint = Checkpoint(path.parent, TrainingState(**run["state"]), run)
        misfit = first_misfit(path.parent, run["files"]) if with_files else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {RUN_FILE} cannot be read ({error}); point --load at a folder whose "
            f"`{LATEST_FILE}` names a complete checkpoint"
        ) from error
    if misfit:
        raise ConfigError(f"checkpoint {path.parent}: {misfit}")
    return checkpoint
