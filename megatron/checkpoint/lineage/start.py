"""Decisions at the start of a run: which checkpoint to load, which run to continue, and whether --save may be
written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.discovery import (
    MissingCheckpointError,
    current_path,
    find_latest,
    find_universal,
    native_names,
    open_checkpoint,
)
from megatron.checkpoint.files import MAY_BE_INTACT, RETRY_DELAYS_S
from megatron.checkpoint.formats.deepspeed_files import FIRST_MODEL_FILES
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, NATIVE, UNIVERSAL, format_of
from megatron.checkpoint.lineage.branch import find_branch_point, is_started_from
from megatron.checkpoint.lineage.identity import LatestRecord, RunIdentity, read_latest, read_record
from megatron.checkpoint.ranks import first_problem_of_ranks
from megatron.checkpoint.record import RUN_FILE, Checkpoint, step_of
from megatron.config import CheckpointConfig, Config
from megatron.errors import UserError, stop_at_access_error
from megatron.files import HostileFileError, read_json
from megatron.mpu.world import broadcast_from_rank_0
from megatron.text_table import first_few


def check_save_place(config: Config) -> None:
    """Raises UserError if --save is a checkpoint or lies inside one. Whoever deletes that checkpoint would
    delete the run as well. For each rank, before it creates --save: a folder in a checkpoint prevents its
    deletion."""
    if config.checkpoint.save is None or config.training.no_train:
        return
    save = Path(os.path.realpath(config.checkpoint.save))
    for folder in (save, *save.parents):
        if _is_checkpoint(folder):
            raise UserError(
                f"--save {config.checkpoint.save} is {'inside ' if folder != save else ''}the checkpoint "
                f"{folder}: give a folder outside it ({folder.parent} to continue the run of this checkpoint)"
            )
        if os.path.ismount(folder):
            return  # looking into the folder of an automounter asks its servers


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, of this program or another one: DeepSpeed's file of the first rank is
    in it, or a `run.json` that lists files."""
    if any(os.path.lexists(folder / name) for name in FIRST_MODEL_FILES):
        return True
    try:
        return isinstance(read_json(folder / RUN_FILE)["files"], dict)
    except (OSError, ValueError, KeyError, TypeError, HostileFileError):
        return False


@stop_at_access_error(MAY_BE_INTACT)
def check_load_folder(config: Config) -> None:
    """Raises UserError if --load does not exist, unless it equals --save, which a new run creates."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or Path(load).is_dir():
        return
    if config.training.no_train:
        raise UserError(f"--load {load} does not exist: --eval-only needs a checkpoint to evaluate")
    if save is None or not (_is_same(load, save) or _continuation(config.checkpoint, None)):
        raise UserError(
            f"--load {load} does not exist: pass an existing folder, or omit --load; to start "
            "from scratch and resume later, pass the same folder as --load and --save"
        )


def choose_checkpoint(config: CheckpointConfig, damaged: Mapping[str, str] | None) -> Checkpoint | None:
    """The checkpoint in --load; or, if this run was started from it before, the newest one that the run has
    saved to --save since. So the same command, given again, resumes. None if --load holds no checkpoint.

    --finetune, --no-load-optim and --branch-at apply to the checkpoint in --load, not to those that this run
    has saved."""
    if config.load is None:
        return None
    load = Path(config.load)
    try:
        given = _find_given(config, damaged)
        if given is not None and (problem := (damaged or {}).get(str(given.folder))):
            raise UserError(f"checkpoint {given.folder}: {problem}; give another one to --load")
    except UserError as error:
        # The run may have saved its own checkpoints since, and not need --load any more.
        continued = _continuation(config, damaged)
        if continued is None:
            raise
        return _with_reasons(continued, str(error), continued.skip_reason)
    if given is None:
        return _continuation(config, damaged)
    given = replace(
        given,
        weights_only=config.finetune,
        no_optimizer=config.finetune or config.no_load_optim,
        is_branch_point=config.branch_at is not None,
    )
    if config.save is None or format_of(Path(config.save)) != NATIVE:
        return given
    if not config.universal_checkpoint and _is_same(load, config.save):
        return given
    try:
        own = find_latest(config.save, damaged)
    except MissingCheckpointError:
        raise
    except UserError as error:  # no checkpoint in --save is complete
        return _with_reasons(given, given.skip_reason, str(error))
    if own is None or not started_from(own.origin, given, config):
        return given
    reason = f"this run has saved it since it started from {given.folder}"
    return _with_reasons(own, reason, own.skip_reason)


def _with_reasons(checkpoint: Checkpoint, *reasons: str) -> Checkpoint:
    """The checkpoint, with the non-empty reasons why it was selected."""
    return replace(checkpoint, skip_reason="; ".join(filter(None, reasons)))


def _continuation(config: CheckpointConfig, damaged: Mapping[str, str] | None) -> Checkpoint | None:
    """The newest checkpoint in --save of a run that was started from --load, which is another folder. The
    path in its origin decides. None if there is none."""
    if config.load is None or config.save is None or _is_same(config.load, config.save):
        return None
    try:
        own = find_latest(config.save, damaged) if Path(config.save).is_dir() else None
    except MissingCheckpointError:
        raise
    except UserError:
        return None
    if own is None or not _is_loaded_alike(own.origin, config):
        return None
    return own if is_started_from(own, config.load) else None


def _find_given(config: CheckpointConfig, damaged: Mapping[str, str] | None) -> Checkpoint | None:
    """The checkpoint that --load and its flags name."""
    load = Path(config.load or "")
    if config.branch_at is not None:
        return find_branch_point(config)
    return find_universal(load) if config.universal_checkpoint else _find_native(load, damaged)


def _find_native(load: Path, damaged: Mapping[str, str] | None) -> Checkpoint | None:
    universal = format_of(load) == UNIVERSAL
    checkpoint = None if universal else find_latest(load, damaged)
    if checkpoint is None and (universal or (load / LATEST_UNIVERSAL_FILE).is_file()):
        raise UserError(
            f"--load {load} holds a universal checkpoint and no native one: add --universal_checkpoint"
        )
    return checkpoint


def origin_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Identifies a checkpoint. Stored as `origin` of a run that starts from it.

    path: its path at that time. It is compared only if there is no digest, or if the checkpoint no longer
    exists or is damaged. weights_only, no_optimizer: what was not loaded. branch_at: the iteration of a decay
    branch; None for any other run.
    """
    return {
        "folder": checkpoint.folder.name,
        "iteration": checkpoint.state.iteration,
        "sha256": checkpoint.run.get("sha256"),
        "path": os.path.realpath(checkpoint.folder),
        "weights_only": checkpoint.weights_only,
        "no_optimizer": checkpoint.no_optimizer,
        "branch_at": checkpoint.state.iteration if checkpoint.is_branch_point else None,
    }


def started_from(origin: Any, given: Checkpoint, config: CheckpointConfig) -> bool:
    """Whether `origin` is the given checkpoint, or an earlier one of its run if --load is that run's
    folder; loaded with the same --finetune, --no-load-optim and --branch-at."""
    if not isinstance(origin, dict) or not _is_loaded_alike(origin, config):
        return False
    digest, now = origin.get("sha256"), origin_record(given)
    if digest is None or digest == now["sha256"]:
        # Without a digest, as in other programs' checkpoints, the path distinguishes two of the same name.
        keys = ("folder", "iteration", "sha256", *(["path"] if digest is None and "path" in origin else []))
        return all(origin.get(key) == now[key] for key in keys)
    if config.universal_checkpoint or _is_same(given.folder, config.load):
        return False
    return any(entry.sha256 == digest and entry.run_id == given.run_id for entry in given.lineage)


def _is_loaded_alike(origin: Mapping[str, Any], config: CheckpointConfig) -> bool:
    """Whether a run with this origin did not load what the flags exclude, and nothing else, and is the same
    branch."""
    was = (origin.get("weights_only", False), origin.get("no_optimizer", False), origin.get("branch_at"))
    return was == (config.finetune, config.finetune or config.no_load_optim, config.branch_at)


def start_identity(checkpoint: Checkpoint | None, config: CheckpointConfig) -> RunIdentity:
    """The identity of the run that a start from `checkpoint` continues, or of a new run.

    The run is continued if the checkpoint is in --save and is the newest there, or if a user has set `latest`
    to it. A start from a checkpoint in another folder, or with --finetune, begins a new run with that
    checkpoint as its origin.
    """
    if checkpoint is None:
        return RunIdentity()
    # A converted checkpoint has the run.json of its source, and is not in its lineage.
    converted = format_of(checkpoint.folder) != NATIVE
    lineage = () if converted or checkpoint.weights_only else (*checkpoint.lineage, checkpoint.entry)
    origin: Any = origin_record(checkpoint)
    if config.save is None:
        return RunIdentity(lineage=lineage, origin=origin)
    save = Path(config.save)
    record = read_record(save)
    resumes = not checkpoint.weights_only and _is_same(checkpoint.folder.parent, save)
    if resumes and (converted or _is_current(checkpoint, config)):
        run_id = checkpoint.run_id or RunIdentity().run_id
        if not converted:
            origin = checkpoint.run.get("origin")
        claimed = _claimed(save, lineage, record if record and record.run_id == run_id else None)
        return RunIdentity(run_id, lineage, origin, claimed)
    if record is not None and started_from(record.origin, checkpoint, config):
        # This run has saved to this folder before, but all its checkpoints are damaged.
        return RunIdentity(record.run_id, lineage, origin, _claimed(save, lineage, record))
    return RunIdentity(lineage=lineage, origin=origin)


def _is_current(checkpoint: Checkpoint, config: CheckpointConfig) -> bool:
    """Whether a checkpoint in --save is the one that a resume would select; False if --load names an older
    one."""
    if not _is_same(checkpoint.folder, config.load or ""):
        return True
    try:
        current = find_latest(str(config.save))
    except MissingCheckpointError:
        return False
    return current is not None and _is_same(current.folder, checkpoint.folder)


def _claimed(save: Path, lineage: Sequence[Any], record: LatestRecord | None) -> frozenset[str]:
    """Names in --save that belong to the resumed run although they have no run id: unfinished ones,
    unreadable ones that the run's own files name, and those from before run ids with the same lineage."""
    recorded = {read_latest(save), *(entry.name for entry in (record.entries if record else ()))}
    old_names = {entry.name for entry in lineage if entry.run_id is None}
    claimed = set()
    for name, path in native_names(save).items():
        run = _run_of(path)
        if run is None:
            belongs = name in recorded or _lacks_run_file(path)
        else:
            names = {name, *(entry if isinstance(entry, str) else "" for entry in run.get("lineage", []))}
            belongs = "run_id" not in run and bool(names & old_names)
        if belongs:
            claimed.add(name)
    return frozenset(claimed)


def checkpoints_of_other_runs(save: Path, identity: RunIdentity) -> list[str]:
    """The native checkpoints in --save that belong to other runs, by iteration."""
    return [name for name, path in native_names(save).items() if not identity.owns(name, _run_of(path))]


def may_replace(save: Path, name: str, identity: RunIdentity) -> bool:
    """Whether no checkpoint of this name exists, or it belongs to this run."""
    path = current_path(save, name)
    return not path.exists() or identity.owns(name, _run_of(path))


def _run_of(path: Path) -> Mapping[str, Any] | None:
    """The `run.json` of a checkpoint that need not be the one to resume from; None if it cannot be read."""
    try:
        return open_checkpoint(path, with_files=False, retry_delays_s=()).run
    except (UserError, OSError):
        return None


def _lacks_run_file(path: Path) -> bool:
    try:
        return not (path / RUN_FILE).exists()
    except OSError:
        return False


def check_save_folder(checkpoint: Checkpoint | None, config: Config) -> None:
    """Raises UserError, unless --overwrite-checkpoints is given, if a new run would start in a --save
    folder with checkpoints of another run, or if a resumed run would reach iterations for which another run
    has checkpoints."""
    options = config.checkpoint
    if options.save is None or config.training.no_train or options.overwrite_checkpoints:
        return
    save = Path(options.save)
    found = checkpoints_of_other_runs(save, start_identity(checkpoint, options))
    remedy = (
        "give another --save, or --overwrite-checkpoints: then a checkpoint is replaced once a new one of "
        "its name is complete"
    )
    if checkpoint is None and options.load is not None and not _is_same(options.load, options.save):
        raise UserError(
            f"--load {options.load} holds no checkpoint, and --save is {save}: pass a folder with "
            "one, or omit --load to start from scratch"
        )
    if checkpoint is None or checkpoint.weights_only or not _is_same(checkpoint.folder.parent, save):
        start = "a new run" if checkpoint is None else f"a start from {checkpoint.folder}"
        if checkpoint is not None and checkpoint.weights_only:
            start += " with --finetune"
        if checkpoint is not None and checkpoint.is_branch_point:
            start += f" with --branch-at {options.branch_at}"
        if found:
            raise UserError(
                f"--save {save} holds checkpoints of another run ({first_few(found)}), and this is {start}: "
                f"resume that run with --load {save}, {remedy}"
            )
        return
    newer = [name for name in found if step_of(name) > checkpoint.state.iteration]
    if newer:
        name = checkpoint.folder.name
        is_named = _is_same(checkpoint.folder, options.load)
        first = f"to resume that run write {name} into {save / 'latest'}" if is_named else "move them away"
        raise UserError(
            f"--save {save} holds checkpoints of another run ({first_few(newer)}) ahead of {name}, "
            f"from which this one resumes: {first}, {remedy}"
        )


def _is_same(one: str | Path, other: str | Path | None) -> bool:
    """Whether two paths name the same folder, which need not exist."""
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def share_checkpoint(
    checkpoint: Checkpoint | None,
    delays_s: Sequence[float] = RETRY_DELAYS_S,
    sleep: Callable[[float], object] = time.sleep,
    *,
    leads_node: bool,
) -> Checkpoint | None:
    """Returns rank 0's checkpoint on every rank. leads_node: whether this is the first rank of its node.
    Collective.

    The first rank of every node compares the sizes of its files, so that a checkpoint with thousands of files
    does not load the metadata server with a request per file and rank. Raises UserError on every rank if
    one node cannot open the checkpoint after some retries.
    """
    checkpoint, problem = broadcast_from_rank_0(checkpoint), None
    if checkpoint is not None and dist.get_rank() != 0 and leads_node:
        try:
            _open_with_retries(checkpoint.folder, checkpoint.run.get("sha256"), delays_s, sleep)
        except (UserError, OSError) as error:
            problem = str(error)
    if (found := first_problem_of_ranks(problem)) is not None:
        rank, text = found
        raise UserError(
            f"rank {rank} cannot open the checkpoint that rank 0 resumes from ({text}): --load must be a "
            "folder that all nodes share"
        )
    return checkpoint


def _open_with_retries(
    folder: Path, sha256: str | None, delays_s: Sequence[float], sleep: Callable[[float], object]
) -> None:
    """Raises UserError unless the folder holds the checkpoint with this digest."""
    delays = iter(delays_s)
    while True:
        try:
            checkpoint = open_checkpoint(folder)
            if checkpoint.run.get("sha256") != sha256:
                raise UserError(f"checkpoint {folder}: it differs from the one that rank 0 sees")
            return
        except UserError:
            delay_s = next(delays, None)
            if delay_s is None:
                raise
        sleep(delay_s)
