"""The branch point of --branch-at: a checkpoint in a run's stable phase, from which another run starts its
decay."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpoint.discovery import current_path, find_universal, open_checkpoint, saved_names
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, NATIVE, UNIVERSAL, format_of
from megatron.checkpoint.record import RUN_FILE, Checkpoint
from megatron.config import CheckpointConfig
from megatron.config.registries import LR_DECAY_STYLES, ConstantPhaseStyle
from megatron.errors import UserError
from megatron.object_store.path import real_path
from megatron.optimizer.schedule import schedule_of
from megatron.text_table import first_few


def find_branch_point(options: CheckpointConfig, with_files: bool = True) -> Checkpoint:
    """Returns the checkpoint of iteration --branch-at in --load, or --load itself if it is a checkpoint.
    Raises UserError if there is none, or if it is not in the stable phase of its run.

    with_files: see `open_checkpoint`.
    """
    load, iteration = Path(options.load or ""), options.branch_at or 0
    if options.universal_checkpoint:
        named = load / f"global_step{iteration}_universal"
        checkpoint = find_universal(named if format_of(named) == UNIVERSAL else load, with_files)
    else:
        checkpoint = open_checkpoint(_native_folder(load, iteration), with_files)
    if checkpoint.state.iteration != iteration:
        raise UserError(
            f"--branch-at {iteration}: checkpoint {checkpoint.folder} is of iteration "
            f"{checkpoint.state.iteration}"
        )
    check_stable_phase(checkpoint)
    return checkpoint


def _native_folder(load: Path, iteration: int) -> Path:
    if (load / RUN_FILE).is_file() or format_of(load) != NATIVE:
        return load
    names, name = saved_names(load), f"global_step{iteration}"
    if name in names:
        return current_path(load, name)
    held = f"it holds {first_few(list(names))}" if names else "it holds no checkpoint of a run"
    if not names and (load / LATEST_UNIVERSAL_FILE).is_file():
        held += "; for a universal one add --universal_checkpoint"
    raise UserError(f"--branch-at {iteration}: --load {load} holds no {name}: {held}")


def check_stable_phase(checkpoint: Checkpoint) -> None:
    """Raises UserError unless the checkpoint is in the stable phase of its learning-rate schedule: after the
    warm-up and not after the start of a decay."""
    state = checkpoint.state
    start = f"--branch-at {state.iteration}: checkpoint {checkpoint.folder}"
    if not checkpoint.records_run:
        raise UserError(
            f"{start} was written by another framework, and its schedule is not known: resume it with --load "
            "and the flags of its schedule"
        )
    schedule = schedule_of(checkpoint.config, state)
    if not isinstance(LR_DECAY_STYLES[schedule.style], ConstantPhaseStyle):
        stable = [name for name, style in LR_DECAY_STYLES.items() if isinstance(style, ConstantPhaseStyle)]
        raise UserError(
            f"{start} is of a run with --lr-decay-style {schedule.style}, which decays from the end of its "
            f"warm-up on: a branch needs a run with {' or '.join(stable)}"
        )
    if (position := state.count(schedule.warmup_unit)) < schedule.warmup:
        raise UserError(
            f"{start} is in the warm-up of its run, at {position:,} of {schedule.warmup:,.0f} "
            f"{schedule.warmup_unit}: branch from a later checkpoint"
        )
    position = state.count(schedule.decay_unit)
    if schedule.wsd_style is not None and position > schedule.decay_start:
        raise UserError(
            f"{start} is at {position:,} {schedule.decay_unit}, and the decay of its run began at "
            f"{schedule.decay_start:,.0f}: branch from an earlier checkpoint"
        )


def is_branch_of(checkpoint: Checkpoint, options: CheckpointConfig) -> bool:
    """Returns whether a checkpoint in --save belongs to the branch that --load and --branch-at describe."""
    is_branch = checkpoint.origin.get("branch_at") == options.branch_at
    return is_branch and was_started_from(checkpoint, options.load)


def was_started_from(checkpoint: Checkpoint, load: str | None) -> bool:
    """Returns whether a checkpoint's run was started from --load, or from a checkpoint in it."""
    path = checkpoint.origin.get("path")
    given = real_path(load or "")
    return isinstance(path, str) and given in (path, os.path.dirname(path))
