"""Finds the checkpoints in a folder, selects the one to resume from, and opens it."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.files import (
    RETRY_DELAYS_S,
    as_path,
    first_size_mismatch,
    has_valid_checksum,
    read_with_retries,
)
from megatron.checkpoint.formats.deepspeed_files import (
    missing_files,
    model_files,
    unneeded_files,
    why_unreadable,
)
from megatron.checkpoint.formats.registry import (
    LATEST_UNIVERSAL_FILE,
    NATIVE,
    PARAMETER_FOLDER,
    UNIVERSAL,
    format_of,
    is_run_format,
    reader_class,
)
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.lineage.identity import (
    CHECKPOINT_NAME,
    LATEST_FILE,
    RECORD_FILE,
    LatestRecord,
    LineageEntry,
    MissingCheckpointError,
    parse_lineage,
    parse_run_id,
    read_latest,
    read_latest_file,
    read_latest_record,
)
from megatron.checkpoint.names import PLAIN_NAME, check_run
from megatron.checkpoint.record import REPLACED, RUN_FILE, SAVING, Checkpoint, TrainingState, step_of
from megatron.errors import UserError, is_access_error
from megatron.files import read_json
from megatron.text_table import first_few

# Megatron-LM writes this file beside its checkpoints; it names the newest one.
TRACKER_FILE = "latest_checkpointed_iteration.txt"
_MEGATRON_NAME = re.compile(r"iter_[0-9]+|release")


def find_latest(folder: str | Path, damaged: Mapping[str, str] | None = None) -> Checkpoint | None:
    """Returns the checkpoint that a run resumes from; None if the folder holds none.

    `latest` names this checkpoint, unless the job was killed after it had saved a newer one and before it
    updated `latest`. If the checkpoint is damaged, the newest complete one in its lineage is returned. If
    `folder` itself is a checkpoint, it is returned.

    damaged: path of each checkpoint to skip -> the reason. Raises UserError if the folder holds checkpoints
    but no complete one, if a user set `latest` to a name that does not exist, or if it is ambiguous which of
    several runs to resume. Raises OSError if a file of a checkpoint to resume from cannot be read now.
    """
    folder, damaged = as_path(folder), damaged or {}
    check_program(folder)
    external = _named_by_megatron(folder)
    folder = external or folder
    if external is not None or (folder / RUN_FILE).is_file() or format_of(folder) != NATIVE:
        if str(folder) in damaged:
            raise UserError(f"checkpoint {folder}: {damaged[str(folder)]}; pass another checkpoint to --load")
        return open_checkpoint(folder)
    names = saved_names(folder)
    latest, record = read_latest(folder), read_latest_record(folder)
    lineage, reason = _candidates(folder, latest, record, names)
    skip_reason = [reason] if reason else []
    if latest is not None and not current_path(folder, latest).exists():
        missing = f"{folder / LATEST_FILE} names {latest}, which does not exist; the folder holds "
        missing += first_few(reversed(names), 10) if names else "none: remove it to start from scratch"
        if record is None or latest not in record.written_names:
            if names:
                missing += f": write one of these names into {LATEST_FILE}, or remove {LATEST_FILE} "
                missing += "to resume from the newest checkpoint"
            raise MissingCheckpointError(missing)
        # This program wrote that name. The checkpoint was deleted later, or the job was killed in `publish`.
        skip_reason.append(missing)
        del lineage[latest]
    for name, sha256 in lineage.items():
        path = current_path(folder, name)
        if name not in names and name != latest:
            continue  # deleted by --keep-last, or saved in another folder
        try:
            if str(path) in damaged:
                raise UserError(f"checkpoint {path}: {damaged[str(path)]}")
            checkpoint = open_checkpoint(path)
            if sha256 not in (None, checkpoint.run["sha256"]) and name != latest:
                raise UserError(f"checkpoint {path}: it is not the one that this run saved under that name")
        except UserError as error:
            skip_reason.append(str(error))
            continue
        skip_reason += _newer_checkpoints(folder, checkpoint, names, " ".join(skip_reason))
        return replace(checkpoint, skip_reason="; ".join(skip_reason))
    for path in names.values():
        check_program(path)
    if names or latest:
        raise UserError("; ".join(skip_reason) or f"no checkpoint in {folder} is complete")
    return None


def _named_by_megatron(folder: Path) -> Path | None:
    """Returns the checkpoint that Megatron-LM's `latest_checkpointed_iteration.txt` names, or the newest
    checkpoint if the file is empty. Returns None if the file is missing, or if this program has saved to the
    folder since Megatron-LM did."""
    tracker = folder / TRACKER_FILE
    if not os.path.lexists(tracker) or os.path.lexists(folder / LATEST_FILE) or saved_names(folder):
        return None
    steps = sorted(path.name for path in folder.glob("iter_*") if _MEGATRON_NAME.fullmatch(path.name))
    name = read_latest_file(tracker, ["iter_{:07d}"], _MEGATRON_NAME) or next(reversed(steps), None)
    if name is not None and not (folder / name).is_dir():
        held = f"; the folder holds {first_few(steps)}" if steps else ""
        raise MissingCheckpointError(f"{tracker} names {name}, which does not exist{held}")
    return None if name is None else folder / name


def _candidates(
    folder: Path, latest: str | None, record: LatestRecord | None, names: Mapping[str, Path]
) -> tuple[dict[str, str | None], str]:
    """Returns the run's checkpoints in the order in which they are tried, as name -> digest, and why `latest`
    names a different checkpoint than the first ("" if it names the first). A digest of None accepts any
    `run.json`."""
    # The program writes `latest` before latest.json. If `latest` is newer, a user edited it, or the job was
    # killed between the two writes. In both cases `latest` names the right checkpoint.
    is_newer = latest is not None and _is_newer(folder / LATEST_FILE, folder / RECORD_FILE)
    if record is not None and (latest is None or latest in record.written_names) and not is_newer:
        entries = [*record.lineage]
        if record.upcoming is not None:
            upcoming = open_or_none(folder / record.upcoming.name)
            if upcoming is not None and upcoming.run["sha256"] == record.upcoming.sha256:
                entries.append(record.upcoming)
        lineage = _newest_first(entries)
        reason = ""
        if lineage and latest is None and record.latest:
            reason = (
                f"{folder / LATEST_FILE} is missing or names no checkpoint; the run was identified from "
                f"{RECORD_FILE}"
            )
        elif lineage and latest is not None and latest not in lineage:
            reason = f"{LATEST_FILE} names {latest}, which does not belong to the run"
        elif lineage and latest != next(iter(lineage)):
            reason = f"the job was killed before {LATEST_FILE} could name {next(iter(lineage))}"
        return lineage if latest is None else lineage | {latest: lineage.get(latest)}, reason
    if latest is None:
        lineage = _single_lineage(folder, names)
        return lineage, f"{folder / LATEST_FILE} is missing or names no checkpoint" if lineage else ""
    reason = ""
    if record is not None:
        newest = record.entries[-1].name if record.entries else "none"
        if latest != newest:
            reason = f"{LATEST_FILE} was set by hand; the newest that was saved is {newest}"
    own = open_or_none(current_path(folder, latest))
    if own is not None:
        others = {} if "lineage" in own.run else _readable_checkpoints(folder, names)
        return {latest: None} | _newest_first(_lineage_of(own, others)), reason
    before = {name: path for name, path in names.items() if step_of(name) < step_of(latest)}
    rest = _newest_first(record.lineage) if record is not None else _single_lineage(folder, before)
    return {latest: None} | rest, reason


def _is_newer(file: Path, other: Path) -> bool:
    try:
        return file.lstat().st_mtime_ns > other.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _newest_first(entries: Iterable[LineageEntry]) -> dict[str, str | None]:
    return {entry.name: entry.sha256 for entry in reversed(list(entries))}


def _single_lineage(folder: Path, names: Mapping[str, Path]) -> dict[str, str | None]:
    """Returns the checkpoints of a folder without a usable `latest`, if all belong to one lineage. Otherwise
    raises UserError, because the checkpoint with the highest number may belong to a different run."""
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
        raise UserError(
            f"{folder / LATEST_FILE} names no checkpoint that can be read, and {which} are of different runs "
            f"or branches: write the name of the checkpoint to resume from into {LATEST_FILE}"
        )
    return _newest_first([*_lineage_of(tips[0], described), tips[0].entry]) if tips else {}


def _lineage_of(checkpoint: Checkpoint, all_described: Mapping[str, Checkpoint]) -> list[LineageEntry]:
    """Returns the lineage of a checkpoint. If it records none, the lineage consists of the earlier
    checkpoints in the folder that record none."""
    if "lineage" in checkpoint.run:
        return list(checkpoint.lineage)
    same = (other.entry for other in all_described.values() if "lineage" not in other.run)
    return sorted(
        (entry for entry in same if entry.iteration < checkpoint.entry.iteration), key=lambda e: e.iteration
    )


def _newer_checkpoints(folder: Path, checkpoint: Checkpoint, names: Iterable[str], reasons: str) -> list[str]:
    """Returns why the checkpoints with a higher number than the selected one are not used."""
    step = checkpoint.state.iteration
    saving = sorted(path.name for path in folder.glob(f"{SAVING}global_step*"))
    unfinished = [f"{name} was never finished" for name in saving if step_of(name) > step]
    newer = sorted((name for name in names if step_of(name) > step and name not in reasons), key=step_of)
    return [*unfinished, *(f"{name} is of another run or branch, or incomplete" for name in newer)]


def saved_names(folder: Path) -> dict[str, Path]:
    """Returns the checkpoints of runs in a folder, complete or not: name -> current path."""
    if not folder.is_dir():
        return {}
    names = {
        name
        for path in folder.iterdir()
        if CHECKPOINT_NAME.fullmatch(name := path.name.removesuffix(REPLACED)) and _is_of_a_run(path)
    }
    return {name: current_path(folder, name) for name in sorted(names, key=step_of)}


def _is_of_a_run(path: Path) -> bool:
    """Returns whether a folder is a checkpoint that a run saved. Returns True if it cannot be accessed
    now."""
    try:
        return path.is_dir() and is_run_format(path)
    except OSError:
        return True


def current_path(folder: Path, name: str) -> Path:
    """Returns the path of a checkpoint. Its folder has a suffix while the checkpoint is being replaced."""
    path, replaced = folder / name, folder / f"{name}{REPLACED}"
    try:
        return replaced if not path.exists() and replaced.is_dir() else path
    except OSError:  # the folder cannot be accessed now
        return path


def open_or_none(path: Path, retry_delays_s: Sequence[float] = RETRY_DELAYS_S) -> Checkpoint | None:
    """Returns the checkpoint in a folder if its `run.json` is intact, even if other files are missing; else
    None. Raises OSError if `run.json` cannot be read now."""
    try:
        return open_checkpoint(path, False, retry_delays_s)
    except UserError:
        return None


def _readable_checkpoints(folder: Path, names: Mapping[str, Path]) -> dict[str, Checkpoint]:
    found = {name: open_or_none(path) for name, path in names.items()}
    return {name: checkpoint for name, checkpoint in found.items() if checkpoint is not None}


def only_universal(folder: str | Path, with_files: bool = True) -> Checkpoint | None:
    """Returns the universal checkpoint that `latest_universal` names in a folder without native checkpoints;
    None if there is none. Raises UserError if a run has saved to the folder and its checkpoints were deleted:
    the older universal checkpoint would silently lose the run's progress."""
    folder = as_path(folder)
    if not (folder / LATEST_UNIVERSAL_FILE).is_file():
        return None
    if (folder / RECORD_FILE).exists():
        raise UserError(
            f"{folder} holds a universal checkpoint, and no native one of the run that saved to it: add "
            "--universal_checkpoint to start from the universal one"
        )
    return find_universal(folder, with_files)


def find_universal(folder: str | Path, with_files: bool = True) -> Checkpoint:
    """Returns the universal checkpoint that `latest_universal` in `folder` names, or `folder` itself if it is
    one. Raises UserError if there is none, or if it cannot be read. with_files: see `open_checkpoint`."""
    folder = as_path(folder)
    if format_of(folder) != UNIVERSAL:
        name = read_latest_universal(folder)
        if name is None:
            raise UserError(
                f"--universal_checkpoint: {folder} has no file {LATEST_UNIVERSAL_FILE} with a name in it: "
                "make one with tools/ds_to_universal.py, or remove the flag: --load opens native checkpoints "
                "on any layout"
            )
        folder = folder / name
    if format_of(folder) != UNIVERSAL:
        raise UserError(f"{folder} is not a universal checkpoint: it has no {PARAMETER_FOLDER}/")
    return open_checkpoint(folder, with_files)


def read_latest_universal(folder: Path) -> str | None:
    """Returns the name in `latest_universal`; see `read_latest_file`."""
    names = ["global_step{}_universal", "global_step{}"]
    return read_latest_file(folder / LATEST_UNIVERSAL_FILE, names, PLAIN_NAME)


def open_checkpoint(
    folder: str | Path, with_files: bool = True, retry_delays_s: Sequence[float] = RETRY_DELAYS_S
) -> Checkpoint:
    """Opens a checkpoint of any format. Raises UserError for a missing or damaged file, and OSError for a
    file that cannot be read now.

    with_files: compare the sizes of all files with those in `run.json`. Contents are not read.
    """
    path = as_path(folder) / RUN_FILE
    name = format_of(path.parent)
    is_native = name == NATIVE
    if not path.is_file() and not is_native:
        return reader_class(path.parent).open_external(path.parent)
    check_program(path.parent)
    try:
        run = read_with_retries(path, lambda: read_json(path), retry_delays_s)
        check_run(run, path)
        if not has_valid_checksum(run):
            raise ValueError("its checksum does not match")
        checkpoint = Checkpoint(path.parent, TrainingState(**run["state"]), run, format=name)
        parse_run_id(run.get("run_id"))
        parse_lineage(run.get("lineage", []))
        unneeded = unneeded_files(run) if is_native and with_files else frozenset()
        problem = first_size_mismatch(path.parent, run["files"], unneeded) if with_files else None
        if with_files and not problem and is_native:
            lacking = missing_files(run["files"], run)
            problem = f"{lacking[0]} was never written" if lacking else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_access_error(error):
            raise
        raise UserError(
            f"checkpoint {path.parent}: {RUN_FILE} cannot be read ({error}); pass a folder to --load whose "
            f"`{LATEST_FILE}` names a complete checkpoint"
        ) from error
    if problem:
        raise UserError(f"checkpoint {path.parent}: {problem}")
    if unneeded and (absent := sorted(unneeded - {found.name for found in path.parent.iterdir()})):
        note = f"missing, but not needed to resume: {first_few(absent)}"
        checkpoint = replace(checkpoint, unverified_note=note)
    return checkpoint


def check_program(folder: Path) -> None:
    """Raises UserError if a folder is a native checkpoint of Microsoft's Megatron-DeepSpeed. Reads the
    structure of one file, unless the folder has a `run.json`."""
    if (folder / RUN_FILE).exists() or not folder.is_dir() or format_of(folder) != NATIVE:
        return
    if reason := why_unreadable(folder):
        raise UserError(f"checkpoint {folder}: {reason}")
    for path in model_files(folder)[:1]:
        content = read_file(path)
        # mp_rank files of this program and of DeepSpeed have no `checkpoint_version`.
        if isinstance(content, dict) and "checkpoint_version" in content:
            raise UserError(
                f"checkpoint {folder} is in the native format of Microsoft's Megatron-DeepSpeed: convert it "
                f"with 'python tools/ds_to_universal.py --input_folder {folder} --output_folder "
                f"{folder}_universal', then pass --load {folder.parent} --universal_checkpoint"
            )
