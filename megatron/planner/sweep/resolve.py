"""Checks and plans the configuration of each combination before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.arguments import read_command_line
from megatron.config import Config
from megatron.data.vocabulary import find_vocabulary
from megatron.errors import UserError
from megatron.pipeline.layer_times import needs_profiling, read_layer_times
from megatron.pipeline.schedule import mean_bubble
from megatron.pipeline.stages import stage_flops
from megatron.planner.layer_memory import planned_run
from megatron.planner.plan import plan_of
from megatron.planner.sweep.axes import Row, num_processes, run_words

# Largest schedule (stages x micro-batches) that is simulated. Its simulation takes a second.
_MAX_SIMULATED = 50_000
# Section -> settings that do not change the losses: they decide how the work is distributed and logged
# (docs/equal_losses.md). The losses of rows that differ in any other setting are not compared.
_SAME_LOSSES: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("parallel", "logging", "training")),  # None: all settings of the section
    "batch": ("micro_batch_size",),
    "data": ("num_workers", "valid_num_workers", "data_cache_path"),
    "optimizer": ("use_apex",),
    "stability": ("check_invariants_interval", "sync_tp_duplicated_parameters"),
}
# The only settings of the section 'training' that change the losses: the length of the run and the kind of
# loss.
_LENGTHS_AND_LOSSES = (
    *("train_iters", "train_samples", "train_tokens", "no_train", "seed", "z_loss_weight"),
    *("require_kernels", "deterministic_mode"),
)


# The fields of a prediction. A value that the planner cannot predict is None. layers: layer indices of each
# stage. memory_bytes: bytes of each pipeline rank. bubble: mean fraction of a step in which a rank is idle.
# max_over_mean: FLOPs of the heaviest pipeline rank relative to the mean. step_s: seconds per step. note: why
# values are missing.
_PREDICTION = dict.fromkeys(("layers", "memory_bytes", "bubble", "max_over_mean", "step_s", "note"))


def resolve_rows(
    base: Sequence[str],
    rows: Sequence[Row],
    steps: int,
    *,
    processes: int | None = None,
    dry_run: bool = False,
) -> list[Row]:
    """Returns the rows, checked and planned. steps: steps per run. processes: number of processes; None reads
    --world-size, or else takes TP x PP. dry_run: whether files of the run, such as the data, may be missing.
    Raises UserError if all rows are invalid, because the cause is then in the base command."""
    resolved = [_resolve_row(base, row, steps, processes, dry_run) for row in rows]
    if all(row.refused for row in resolved):
        raise UserError(
            f"all {len(rows)} combination(s) are invalid. The reason for the first: {resolved[0].refused}"
        )
    return resolved


def _resolve_row(base: Sequence[str], row: Row, steps: int, processes: int | None, dry_run: bool) -> Row:
    try:
        words = run_words(base, row.words, steps)
        processes = processes or num_processes(words)
        more = ["--dry-run", "--world-size", str(processes)] if dry_run else []
        env = {"WORLD_SIZE": str(processes)}
        config = read_command_line([*words, *more], env).config
        _check_full_batch(config)
        predicted = predict(config)
    except UserError as error:
        return replace(row, refused=" ".join(str(error).split()))
    return replace(
        row,
        processes=processes,
        numbers=loss_settings_digest(config),
        tolerance=_tolerance(config),
        tokens_per_step=config.batch.global_batch_size * config.model.seq_length,
        predicted=predicted,
    )


def _check_full_batch(config: Config) -> None:
    if config.batch.rampup_batch_size is not None:
        raise UserError(
            "--rampup-batch-size: a sweep would measure only the first, small batches. Remove the flag (in "
            "the scripts of examples/slurm: RAMPUP_BATCH_SIZE=)."
        )
    if config.curriculum is not None:
        raise UserError(
            "curriculum_learning in --deepspeed_config: a sweep would measure only the first, short "
            "sequences. Remove it from the file."
        )


def _tolerance(config: Config) -> float:
    """Returns the allowed relative difference of losses between layouts: 1e-5 in fp32, as
    docs/equal_losses.md states, and otherwise the rounding error of the precision."""
    return {"fp32": 1e-5, "fp16": 2.0**-10, "bf16": 2.0**-7}[config.precision.name]


def loss_settings_digest(config: Config) -> str:
    """Returns a digest of the settings on which the losses depend: equal digests mean equal losses."""
    settings = {
        section: {
            name: value
            for name, value in fields.items()
            if section not in _SAME_LOSSES
            or name not in (_SAME_LOSSES[section] or fields)
            or (section == "training" and name in _LENGTHS_AND_LOSSES)
        }
        for section, fields in config.to_dict().items()
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def predict(config: Config) -> dict[str, Any]:
    """Returns the fields of `_PREDICTION` for a run. Without --gpu the time of a step is None, and the bubble
    assumes that times are proportional to FLOPs. Raises UserError for a partition that is not possible."""
    if needs_profiling(config) and read_layer_times(config, find_vocabulary(config).size) is None:
        note = "--partition-method profile measures the layers at the start of the run"
        return {**_PREDICTION, "note": note}
    plan = plan_of(planned_run(config))
    work, step = stage_flops(config, plan.run.stages, plan.run.vocab.size), plan.step
    ranks = plan.run.stages.sum_by_rank(work)
    return {
        **_PREDICTION,
        "layers": [plan.run.stages.layer_range(stage) for stage in range(len(work))],
        "memory_bytes": plan.bytes_by_rank,
        "bubble": _predicted_bubble(config, work) if step is None else step.bubble,
        "max_over_mean": max(ranks) * len(ranks) / sum(ranks),
        "step_s": None if step is None else step.total,
    }


def _predicted_bubble(config: Config, work: Sequence[float]) -> float | None:
    """Returns the mean fraction of a step in which a rank is idle, if times are proportional to FLOPs.
    Returns None for a schedule that is too long to simulate."""
    micro_batches = config.micro_batches_per_step
    if len(work) * micro_batches > _MAX_SIMULATED:
        return None
    parallel = config.parallel
    return mean_bubble(parallel.pipeline_schedule, work, micro_batches, parallel.stages_per_rank)
