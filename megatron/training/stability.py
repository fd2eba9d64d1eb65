"""Handles skipped ranges, spikes, non-finite values and replica mismatches in the training loop.

Every decision depends only on the training state and on values that are equal on all ranks, see
docs/stability.md.

--check-invariants-interval compares these replicas: the tied embedding on the first and the last stage;
parameters that are not sharded, on tensor-parallel ranks; all weights, and the optimizer's state unless ZeRO
shards it, on data-parallel ranks. The ranks communicate only digests (`megatron.checkpoint.digests`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.signals import is_due
from megatron.cluster.watchdog import Phase, Watchdog
from megatron.config import StabilityConfig
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.mpu.world import broadcast_from_rank_0
from megatron.optimizer.batch_schedule import Progress
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer, NonFiniteError
from megatron.run import Run
from megatron.text_table import rank_list
from megatron.training.metrics import MetricsLogger


class StepOptions(TypedDict):
    """The arguments of `GPTEngine.train_step` that control skipped updates."""

    skips_non_finite: bool | None
    skip_update_fn: Callable[[float, float], bool] | None


@dataclass
class StabilityMonitor:
    """Handles unstable steps. The trainer calls it before, during and after each step, on every rank."""

    engine: GPTEngine
    metrics: MetricsLogger
    checkpoints: CheckpointManager
    watchdog: Watchdog
    options: StabilityConfig = field(init=False)
    spikes: SpikeDetector = field(init=False)

    def __post_init__(self) -> None:
        self.options = self.engine.run.config.stability
        self.spikes = SpikeDetector(self.options)

    def skip_range(self, state: TrainingState) -> TrainingState | None:
        """Prints the range of iterations to skip, and returns the state after the range. Returns None if the
        next iteration is not in a range."""
        skipped = range_to_skip(self.engine.run, state.iteration)
        if skipped is None:
            return None
        first, last = skipped
        self.metrics.print(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag")
        return advance_state(state, last, self.engine.run)

    def step_options(self, state: TrainingState) -> StepOptions:
        """Returns the options of the step after `state`, and prepares the spike detector for this step."""
        self.spikes.begin(state)
        limit = self.options.max_consecutive_skips
        return {
            "skips_non_finite": None if limit is None else state.skips_in_a_row + 1 < limit,
            "skip_update_fn": self.spikes.should_skip if self.options.spike_policy else None,
        }

    def diagnose(self, error: NonFiniteError, iteration: int) -> RunStopped:
        """Returns the error with which a non-finite step that must not be skipped ends the run."""
        limit = self.options.max_consecutive_skips
        in_a_row = f"; {limit} steps in a row (--max-consecutive-skips)" if limit else ""
        return RunStopped(f"iteration {iteration}: {error}{in_a_row}")

    def post_step(self, state: TrainingState) -> TrainingState:
        """Prints what was wrong with the step that led to `state`, and rolls back if needed. Returns the
        state to continue from. Raises RunStopped after too many skips or rollbacks."""
        options, optimizer = self.options, self.engine.optimizer
        state = self.spikes.update_window(state, taken=not optimizer.skipped)
        if optimizer.found_nonfinite and optimizer.diagnosis:
            self.metrics.print(f"iteration {state.iteration}: {optimizer.diagnosis}")
        if not self.spikes.diagnosis:
            return state
        what = f"iteration {state.iteration}: spike, {self.spikes.diagnosis}"
        if options.spike_policy == "rollback":
            return self._roll_back(state, what)
        limit = options.max_consecutive_skips or options.spike_window
        if state.skips_in_a_row >= limit:
            raise RunStopped(f"{what}: {limit} consecutive skipped updates: not a spike, stopping")
        self.metrics.print(what + (": update skipped" if optimizer.skipped_by_fn else ""))
        return state

    def _roll_back(self, state: TrainingState, cause: str) -> TrainingState:
        """Loads the newest checkpoint and skips the data between it and `state`. Without a checkpoint, only
        the update is skipped. cause: sentence for the log."""
        limit = self.options.max_rollbacks
        if state.rollbacks >= limit:
            raise RunStopped(f"{cause}: reached --max-rollbacks {limit}")
        with self.watchdog.phase(Phase.LOAD):  # it also waits for a save in flight
            checkpoint = self.checkpoints.rollback()
        if checkpoint is None:
            self.metrics.print(f"{cause}: update skipped; no checkpoint exists to roll back to")
            return state
        restored = checkpoint.state
        self.metrics.print(
            f"{cause}: rolled back to {checkpoint.folder}; the data of iterations "
            f"{restored.iteration + 1} to {state.iteration} are skipped"
        )
        return replace(_skipped_to(state, restored), rollbacks=state.rollbacks + 1)

    def check_invariants(self, previous: int, iteration: int) -> None:
        """Checks the replicas if a check is due at `iteration`. Must be called before an evaluation or a
        save. Raises RunStopped on a violation. previous: see `is_due`."""
        if is_due(self.options.check_invariants_interval, previous, iteration):
            violation = find_invariant_violation(self.engine.optimizer, self.engine.mesh)
            if violation:
                raise RunStopped(
                    f"iteration {iteration}: {violation}. Resume from an earlier checkpoint, and check the "
                    "devices of these ranks"
                )


class SpikeDetector:
    """Examines the loss and the gradient norm of each step before its update."""

    def __init__(self, options: StabilityConfig) -> None:
        self._options = options
        self.diagnosis = ""
        """Why the last examined step is a spike, for the log; '' if it is not."""
        self._state = TrainingState()
        self._seen: tuple[float, float] | None = None

    def begin(self, state: TrainingState) -> None:
        """Starts the step after `state`."""
        self._state, self._seen, self.diagnosis = state, None, ""

    def should_skip(self, loss: float, grad_norm: float) -> bool:
        """Returns whether to skip the step's update. loss, grad_norm: values of the global batch."""
        self._seen = (loss, grad_norm)
        options, state = self._options, self._state
        if len(state.recent_losses) < options.spike_window:
            return False
        found = []
        for name, value, before, factor in (
            ("loss", loss, state.recent_losses, options.spike_loss_factor),
            ("grad norm", grad_norm, state.recent_grad_norms, options.spike_grad_norm_factor),
        ):
            typical = median(before)
            if value > factor * typical:
                found.append(f"{name} {value:.4g} (median of {len(before)} steps: {typical:.4g})")
        self.diagnosis = " and ".join(found)
        return bool(found) and options.spike_policy != "warn"

    def update_window(self, state: TrainingState, taken: bool) -> TrainingState:
        """Returns `state` (the state after the step), with the step added to its window if the step was
        `taken`."""
        before = self._state
        losses, norms = before.recent_losses, before.recent_grad_norms
        if taken and self._seen is not None and not math.isnan(self._seen[0]):
            keep = self._options.spike_window
            losses, norms = (*losses, self._seen[0])[-keep:], (*norms, self._seen[1])[-keep:]
        return replace(state, recent_losses=losses, recent_grad_norms=norms)


def range_to_skip(run: Run, iteration: int) -> tuple[int, int] | None:
    """Returns the next iteration, and the last iteration of the --skip-train-iteration-range that contains
    the next iteration; None if no range contains it. iteration: completed iterations."""
    total = run.length.iterations
    for first, last in run.config.stability.skipped_ranges:
        if first <= iteration + 1 <= last and iteration < total:
            return iteration + 1, min(last, total)
    return None


def advance_state(state: TrainingState, last: int, run: Run) -> TrainingState:
    """Returns the state after iteration `last`, as if the iterations up to it had consumed their samples and
    tokens."""
    samples, tokens = state.consumed_samples, state.consumed_tokens
    for iteration in range(state.iteration + 1, last + 1):
        size = run.batches.global_batch_size_at(samples)
        samples += size
        tokens += size * run.config.seq_length_at(iteration)
    return _skipped_to(Progress(max(last, state.iteration), samples, tokens), state)


def _skipped_to(progress: Progress, state: TrainingState) -> TrainingState:
    """Returns `state` at the later `progress`. The iterations between them have not updated the weights."""
    return replace(
        state,
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        skipped_iterations=state.skipped_iterations + progress.iteration - state.iteration,
        pending_evaluations=0,
    )


_WORD = 1 << 64
# Maximum number of violations that the error names.
_MAX_NAMED = 3
# Number of elements for which digests are computed at a time, to limit the memory.
_CHUNK = 1 << 24

# A compared tensor: its kind ('weights' in the run's precision, 'fp32' for master weights, or the
# name of a moment), the parameter's name, and the ranks on the axes that shard the parameter.
TensorKey = tuple[str, str, tuple[int, ...]]
# See `Mesh.replica_of`.
ReplicaKey = tuple[int, ...]


@dataclass
class _LocalDigests:
    """The digests of the replicas, or shards of replicas, on this rank, and the names of its non-finite
    tensors."""

    rank: int
    parts: dict[tuple[TensorKey, ReplicaKey], int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


def find_invariant_violation(optimizer: MixedPrecisionOptimizer, mesh: Mesh) -> str | None:
    """Returns one sentence that names the replicas that differ and the non-finite values, with their ranks;
    None if there are none. Collective: every rank gets an equal result."""
    local = _local_digests(optimizer, mesh)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(local, everywhere if dist.get_rank() == 0 else None)
    return broadcast_from_rank_0(_sentence(everywhere) if dist.get_rank() == 0 else None)


def _local_digests(optimizer: MixedPrecisionOptimizer, mesh: Mesh) -> _LocalDigests:
    held = _LocalDigests(mesh.rank)

    def add(
        kind: str, name: str, spec: ParameterSpec, is_partitioned: bool, start: int, values: Tensor
    ) -> None:
        digest, is_finite = _digest(spec, mesh.axes_of(spec), start, values)
        shard = tuple(axis.rank for axis in mesh.axes_of(spec))
        held.parts[(kind, name, shard), mesh.replica_of(spec, is_partitioned)] = digest
        if not is_finite:
            held.not_finite.append(f"{kind} of {name} on rank {mesh.rank}")

    optimizer.wait_for_params()
    for flat in optimizer.flat:
        if flat.shards_weights:
            continue  # ZeRO-3: only the shards exist between steps; they are compared below
        for parameter in flat.parameters:
            spec, weights = spec_of(parameter), parameter.detach().reshape(-1)
            add("weights", optimizer.names[parameter], spec, False, 0, weights)
    for piece in optimizer.pieces():
        for kind, values in piece.values.items():
            add(kind, piece.name, piece.spec, optimizer.is_partitioned, piece.start, values)
    if not math.isfinite(optimizer.scaler.scale):
        held.not_finite.append(f"the loss scale on rank {mesh.rank}")
    return held


def _digest(spec: ParameterSpec, axes: Sequence[Axis], start: int, values: Tensor) -> tuple[int, bool]:
    """Returns the digest of a rank's elements, and whether all are finite. values: elements of the flat shard
    from element `start` on."""
    digest, finite = 0, values.new_ones((), dtype=torch.bool)
    for first in range(0, values.numel(), _CHUNK):
        piece = values[first : first + _CHUNK].float()
        digest += fragment_digests(spec, axes, start + first, {"": piece})[""]
        finite &= piece.isfinite().all()
    return digest % _WORD, bool(finite)


def _sentence(everywhere: list[_LocalDigests]) -> str | None:
    """Returns the sentence of `find_invariant_violation` from the digests of all ranks."""
    replicas: dict[TensorKey, dict[ReplicaKey, int]] = {}
    holders: dict[tuple[TensorKey, ReplicaKey], list[int]] = {}
    for held in everywhere:
        for (tensor, replica), digest in held.parts.items():
            digests = replicas.setdefault(tensor, {})
            digests[replica] = (digests.get(replica, 0) + digest) % _WORD
            holders.setdefault((tensor, replica), []).append(held.rank)
    found = [what for held in everywhere for what in held.not_finite]
    found = [f"non-finite: {', '.join(found[:_MAX_NAMED])}{_and_more(found)}"] if found else []
    mismatches = []
    for (kind, name, shard), digests in sorted(replicas.items(), key=lambda item: str(item[0])):
        if len(set(digests.values())) == 1:
            continue
        # Without a majority the first replica is the reference.
        reference = Counter(digests[replica] for replica in sorted(digests, key=str)).most_common(1)[0][0]
        ranks: dict[bool, set[int]] = {True: set(), False: set()}
        for replica, digest in digests.items():
            ranks[digest == reference] |= set(holders[(kind, name, shard), replica])
        mismatches.append(
            f"{kind} of {name} on {rank_list(ranks[False])} differs from {rank_list(ranks[True])}"
        )
    if mismatches:
        found.append(f"replicas differ: {'; '.join(mismatches[:_MAX_NAMED])}{_and_more(mismatches)}")
    return " and ".join(found) or None


def _and_more(found: list[str]) -> str:
    return f" (and {len(found) - _MAX_NAMED} more)" if len(found) > _MAX_NAMED else ""
