"""Decides at the start which checkpoint to load, which run to continue, and whether --save may be written
to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.discovery import (
    current_path,
    find_latest,
    find_universal,
    only_universal,
    open_checkpoint,
    open_or_none,
    saved_names,
)
from megatron.checkpoint.files import MAY_BE_INTACT, RETRY_DELAYS_S, first_absent
from megatron.checkpoint.formats.deepspeed_files import FIRST_MODEL_FILES, unneeded_files
from megatron.checkpoint.formats.registry import (
    NATIVE,
    UNIVERSAL,
    format_of,
    is_run_format,
)
from megatron.checkpoint.lineage.branch import find_branch_point, was_started_from
from megatron.checkpoint.lineage.identity import (
    CHECKPOINT_NAME,
    LatestRecord,
    MissingCheckpointError,
    RunIdentity,
    read_latest,
    read_latest_record,
    read_local_entries,
)
from megatron.checkpoint.ranks import errors_of_all_ranks
from megatron.checkpoint.record import RUN_FILE, Checkpoint, step_of
from megatron.config import CheckpointConfig, Config
from megatron.errors import UserError, stop_at_access_error
from megatron.files import HostileFileError, read_json
from megatron.mpu.world import broadcast_from_rank_0
from megatron.object_store.path import ObjectPath, real_path
from megatron.object_store.store import is_url
from megatron.text_table import first_few

PathOf = Callable[[str], Path]
"""Returns the path of --save or --load; for a run whose folders may be URLs this is `Folders.at`."""


def check_save_is_outside_checkpoints(config: Config) -> None:
    """Raises UserError if --save is a checkpoint or lies inside one: deleting that checkpoint would also
    delete the run. Each rank calls it before --save is created, because this program never deletes a
    checkpoint that contains an unknown folder."""
    if config.checkpoint.save is None or is_url(config.checkpoint.save) or config.training.no_train:
        return
    save = Path(os.path.realpath(config.checkpoint.save))
    for folder in (save, *save.parents):
        if _is_checkpoint(folder):
            raise UserError(
                f"--save {config.checkpoint.save} is {'inside ' if folder != save else ''}the checkpoint "
                f"{folder}: give a folder outside it ({folder.parent} to continue the run of this checkpoint)"
            )
        if os.path.ismount(folder):
            return  # above a mount point: a lookup there may make an automounter ask its servers


def _is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint of any framework: it has DeepSpeed's file of the first rank,
    or a `run.json` that lists files."""
    if any(os.path.lexists(folder / name) for name in FIRST_MODEL_FILES):
        return True
    try:
        return isinstance(read_json(folder / RUN_FILE)["files"], dict)
    except (OSError, ValueError, KeyError, TypeError, HostileFileError):
        return False


@stop_at_access_error(MAY_BE_INTACT)
def check_load_folder(config: Config, path_of: PathOf = Path) -> None:
    """Raises UserError if --load does not exist, unless --load equals --save, which a new run creates."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or path_of(load).is_dir():
        return
    if config.training.no_train:
        raise UserError(f"--load {load} does not exist: --eval-only needs a checkpoint to evaluate")
    if save is None or not (is_same_path(load, save) or _continuation(config.checkpoint, None, path_of)):
        raise UserError(
            f"--load {load} {'is a file' if path_of(load).is_file() else 'does not exist'}: pass an "
            "existing folder, or remove --load; to "
            "start from scratch and resume later, pass one folder as both --load and --save"
        )


def choose_checkpoint(
    config: CheckpointConfig, damaged: Mapping[str, str] | None, path_of: PathOf = Path
) -> Checkpoint | None:
    """Returns the checkpoint in --load; None if there is none. If this run was started from that checkpoint
    before, returns the newest checkpoint that the run has saved to --save since then: repeating a command
    resumes its run.

    --finetune, --no-load-optim and --branch-at apply to the checkpoint in --load, not to the run's own
    checkpoints."""
    if config.load is None:
        return None
    try:
        if config.branch_at is not None:
            given: Checkpoint | None = find_branch_point(config)
        elif config.universal_checkpoint:
            given = find_universal(path_of(config.load))
        else:
            given = find_latest(path_of(config.load), damaged)
        if given is not None and (problem := (damaged or {}).get(str(given.folder))):
            raise UserError(f"checkpoint {given.folder}: {problem}; pass another checkpoint to --load")
    except UserError as error:
        # A run that has saved checkpoints of its own no longer needs --load.
        continued = _continuation(config, damaged, path_of)
        if continued is None:
            raise
        return _with_reasons(continued, str(error), continued.skip_reason)
    if given is None:
        if (continued := _continuation(config, damaged, path_of)) is not None:
            return continued
        if (given := only_universal(path_of(config.load))) is None:
            return None
    given = replace(
        given,
        weights_only=config.finetune,
        no_optimizer=config.finetune or config.no_load_optim,
        is_branch_point=config.branch_at is not None,
    )
    if config.save is None or format_of(save := path_of(config.save)) != NATIVE:
        return given
    if not config.universal_checkpoint and is_same_path(config.load, save):
        return given
    try:
        own = find_latest(save, damaged)
    except MissingCheckpointError:
        raise
    except UserError as error:  # raised if no checkpoint in --save is complete
        return _with_reasons(given, given.skip_reason, str(error))
    if own is None or (start := _start_of(own, given, config, path_of)) is None:
        return given
    reason = f"this run has saved it since it started from {start.folder}"
    return _with_reasons(own, reason, own.skip_reason)


def _with_reasons(checkpoint: Checkpoint, *reasons: str) -> Checkpoint:
    """Returns the checkpoint with the non-empty ones of `reasons` added to its `skip_reason`."""
    return replace(checkpoint, skip_reason="; ".join(filter(None, reasons)))


def _continuation(
    config: CheckpointConfig, damaged: Mapping[str, str] | None, path_of: PathOf
) -> Checkpoint | None:
    """Returns the newest checkpoint in --save if its run was started from --load, judged by the path in its
    `origin`; otherwise None. Returns None also if --load and --save are the same folder."""
    if config.load is None or config.save is None or is_same_path(config.load, config.save):
        return None
    try:
        own = find_latest(save, damaged) if (save := path_of(config.save)).is_dir() else None
    except MissingCheckpointError:
        raise
    except UserError:
        return None
    if own is None or not _has_same_load_flags(own.origin, config):
        return None
    return own if was_started_from(own, config.load) else None


def _start_of(
    own: Checkpoint, given: Checkpoint, config: CheckpointConfig, path_of: PathOf
) -> Checkpoint | None:
    """Returns the checkpoint from which the run of `own` was started with these flags; None if there is none.
    It is `given`, or without --universal_checkpoint a universal checkpoint beside `given`, if another run has
    saved `given` since."""
    if origin_matches(own.origin, given, config):
        return given
    if config.load is None or config.universal_checkpoint or config.branch_at is not None:
        return None
    try:
        universal = find_universal(path_of(config.load), with_files=False)
    except UserError:
        return None
    return universal if origin_matches(own.origin, universal, config) else None


def origin_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the record that identifies a checkpoint. A run that starts from the checkpoint stores it as
    `origin`.

    path: the checkpoint's path at the start of the run. It is compared only if there is no digest, or if the
    checkpoint no longer exists or is damaged. weights_only, no_optimizer: see `Checkpoint`. branch_at: the
    iteration at which a decay branch starts; None for any other run.
    """
    return {
        "folder": checkpoint.folder.name,
        "iteration": checkpoint.state.iteration,
        "sha256": checkpoint.run.get("sha256"),
        "path": real_path(checkpoint.folder),
        "weights_only": checkpoint.weights_only,
        "no_optimizer": checkpoint.no_optimizer,
        "branch_at": checkpoint.state.iteration if checkpoint.is_branch_point else None,
    }


def origin_matches(origin: Any, given: Checkpoint, config: CheckpointConfig) -> bool:
    """Returns whether a run with this origin was started with these flags from the given checkpoint. If
    --load is the folder of the checkpoint's run, earlier checkpoints of that run count as well."""
    if not isinstance(origin, dict) or not _has_same_load_flags(origin, config):
        return False
    digest, now = origin.get("sha256"), origin_record(given)
    if digest is None or digest == now["sha256"]:
        # Checkpoints without digests, such as other frameworks', are distinguished by name and path.
        keys = ("folder", "iteration", "sha256", *(["path"] if digest is None and "path" in origin else []))
        return all(origin.get(key) == now[key] for key in keys)
    if format_of(given.folder) == UNIVERSAL or is_same_path(given.folder, config.load):
        return False
    return any(entry.sha256 == digest and entry.run_id == given.run_id for entry in given.lineage)


def _has_same_load_flags(origin: Mapping[str, Any], config: CheckpointConfig) -> bool:
    """Returns whether a run with this origin was started with the values of --finetune, --no-load-optim and
    --branch-at in `config`."""
    was = (origin.get("weights_only", False), origin.get("no_optimizer", False), origin.get("branch_at"))
    return was == (config.finetune, config.finetune or config.no_load_optim, config.branch_at)


def start_identity(
    checkpoint: Checkpoint | None, config: CheckpointConfig, path_of: PathOf = Path
) -> RunIdentity:
    """Returns the identity of the run that continues from `checkpoint`, or of a new run.

    The run continues if the checkpoint is the newest in --save, or if a user has set `latest` to it. A start
    from a different folder, or with --finetune, begins a new run with the checkpoint as its origin. A local
    checkpoint continues its run, but is not part of the lineage.
    """
    if checkpoint is None:
        return RunIdentity()
    if checkpoint.is_local:
        old = _checkpoints_without_run_id(Path(str(config.save)), checkpoint.lineage, None)
        return RunIdentity(str(checkpoint.run_id), checkpoint.lineage, checkpoint.run.get("origin"), old)
    # A converted checkpoint has the run.json of its source, but is not part of the source's lineage, which
    # contains only names that runs give.
    converted = not (is_run_format(checkpoint.folder) and CHECKPOINT_NAME.fullmatch(checkpoint.entry.name))
    lineage = () if converted or checkpoint.weights_only else (*checkpoint.lineage, checkpoint.entry)
    origin: Any = origin_record(checkpoint)
    if config.save is None:
        return RunIdentity(lineage=lineage, origin=origin)
    save = path_of(config.save)
    record = read_latest_record(save)
    resumes = not checkpoint.weights_only and is_same_path(checkpoint.folder.parent, save)
    if resumes and (converted or _is_current(checkpoint, config, save)):
        run_id = checkpoint.run_id or RunIdentity().run_id
        if not converted:
            origin = checkpoint.run.get("origin")
        own_record = record if record and record.run_id == run_id else None
        return RunIdentity(run_id, lineage, origin, _checkpoints_without_run_id(save, lineage, own_record))
    if record is not None and origin_matches(record.origin, checkpoint, config):
        # This run has saved to this folder before, but all its checkpoints are damaged.
        return RunIdentity(record.run_id, lineage, origin, _checkpoints_without_run_id(save, lineage, record))
    return RunIdentity(lineage=lineage, origin=origin)


def _is_current(checkpoint: Checkpoint, config: CheckpointConfig, save: Path) -> bool:
    """Returns whether a resume from --save would select this checkpoint."""
    if not is_same_path(checkpoint.folder, config.load or ""):
        return True
    try:
        current = find_latest(save)
    except MissingCheckpointError:
        return False
    return current is not None and is_same_path(current.folder, checkpoint.folder)


def _checkpoints_without_run_id(
    save: Path, lineage: Sequence[Any], record: LatestRecord | None
) -> frozenset[str]:
    """Returns the checkpoints in --save that belong to the resumed run although they have no run id:
    unfinished ones, unreadable ones that `latest` or `latest.json` names, and ones in this lineage that a
    version without run ids saved."""
    recorded = {read_latest(save), *(entry.name for entry in (record.entries if record else ()))}
    old_names = {entry.name for entry in lineage if entry.run_id is None}
    found = set()
    for name, path in saved_names(save).items():
        run = _run_record(path)
        if run is None:
            belongs = name in recorded or _lacks_run_file(path)
        else:
            names = {name, *(entry if isinstance(entry, str) else "" for entry in run.get("lineage", []))}
            belongs = "run_id" not in run and bool(names & old_names)
        if belongs:
            found.add(name)
    return frozenset(found)


def may_replace(save: Path, name: str, identity: RunIdentity) -> bool:
    """Returns whether no checkpoint of this name exists in --save, or the existing one belongs to this
    run."""
    path = current_path(save, name)
    return not path.exists() or identity.owns(name, _run_record(path))


def _run_record(path: Path) -> Mapping[str, Any] | None:
    """Returns the `run.json` of a checkpoint; None if it cannot be read. Does not repeat failed reads."""
    with suppress(OSError):
        if (found := open_or_none(path, ())) is not None:
            return found.run
    return None


def _lacks_run_file(path: Path) -> bool:
    try:
        return not (path / RUN_FILE).exists()
    except OSError:
        return False


def check_save_folder(checkpoint: Checkpoint | None, config: Config, path_of: PathOf = Path) -> None:
    """Raises UserError if a new run would start in a --save folder with checkpoints of another run, or if
    a resumed run would reach iterations for which another run has checkpoints in --save. Raises nothing
    with --overwrite-checkpoints."""
    options = config.checkpoint
    if options.save is None or config.training.no_train or options.overwrite_checkpoints:
        return
    save = path_of(options.save)
    identity = start_identity(checkpoint, options, path_of)
    found = [name for name, path in saved_names(save).items() if not identity.owns(name, _run_record(path))]
    if options.load is None:  # the first local save of a new run would delete the local checkpoints
        found += [f"local {entry.name}" for entry in read_local_entries(save)]
    remedy = (
        "give another --save, or pass --overwrite-checkpoints, which replaces a checkpoint once a new one of "
        "its name is complete"
    )
    if checkpoint is None and options.load is not None and not is_same_path(options.load, options.save):
        raise UserError(
            f"--load {options.load} holds no checkpoint, and --save is {save}: pass a folder with "
            "a checkpoint, or remove --load to start from scratch"
        )
    if checkpoint is None or checkpoint.weights_only or not is_same_path(checkpoint.folder.parent, save):
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
        is_named = is_same_path(checkpoint.folder, options.load)
        first = f"to resume that run write {name} into {save / 'latest'}" if is_named else "move them away"
        raise UserError(
            f"--save {save} holds checkpoints of another run ({first_few(newer)}) ahead of {name}, "
            f"from which this run resumes: {first}, {remedy}"
        )


def is_same_path(one: str | Path, other: str | Path | None) -> bool:
    """Returns whether two paths name the same folder. The folder need not exist."""
    return other is not None and real_path(one) == real_path(other)


def share_checkpoint(
    checkpoint: Checkpoint | None,
    leads_node: bool,
    share: Callable[[Checkpoint | None], Checkpoint | None] = broadcast_from_rank_0,
) -> Checkpoint | None:
    """Returns the checkpoint that rank 0 passes, on every rank. leads_node: true on the first rank of each
    node. share: sends the checkpoint to the other ranks. Collective.

    Rank 0 has already compared the sizes of all files. The first rank of every other node only reads
    `run.json` and lists the folder: for a checkpoint of thousands of files, one request per file and rank
    would overload the metadata server. Raises UserError on every rank if one node cannot see the checkpoint
    after some retries.
    """
    checkpoint = share(checkpoint)
    if checkpoint is None or isinstance(checkpoint.folder, ObjectPath):
        return checkpoint
    with errors_of_all_ranks():
        if dist.get_rank() != 0 and leads_node:
            try:
                _open_with_retries(checkpoint.folder, checkpoint.run.get("sha256"))
            except (UserError, OSError) as error:
                raise UserError(
                    f"rank {dist.get_rank()} cannot open the checkpoint that rank 0 resumes from ({error}): "
                    "--load must be a folder that all nodes share"
                ) from error
    return checkpoint


def _open_with_retries(folder: Path, sha256: str | None) -> None:
    """Raises UserError unless the folder contains all files of the checkpoint whose `run.json` has this
    digest."""
    for delay_s in (*RETRY_DELAYS_S, None):
        try:
            run = open_checkpoint(folder, with_files=False).run
            if run.get("sha256") != sha256:
                raise UserError(f"checkpoint {folder}: it differs from the one that rank 0 sees")
            needed = run["files"].keys() - unneeded_files(run) if "files" in run else ()
            if (absent := first_absent(folder, needed)) is not None:
                raise UserError(f"checkpoint {folder}: {absent} is missing")
            return
        except UserError:
            if delay_s is None:
                raise
        time.sleep(delay_s)
