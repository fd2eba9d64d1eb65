"""Simulation of pipeline schedules, for given times of the stages and of the transfers between them.

The simulation makes three simplifications. A send never blocks, whereas in the engine a rank waits for a send
at its next exchange. Transfers do not share bandwidth and do not slow down computation. The step ends with
the last backward pass, before the gradients are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from math import isfinite
from typing import NamedTuple

from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.pipeline.schedule_actions import FLOW, Kind, PipelineAction, ScheduleActions, Step


class Span(NamedTuple):
    """Start and end of a pass, in seconds after the start of the step."""

    action: PipelineAction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    spans: list[list[Span]]
    """For each rank, its passes in chronological order."""
    peak_in_flight: list[int]
    """For each rank, the largest number of in-flight passes, whose activations are stored. A forward pass
    through a chunk is in flight until its backward pass (and weight-gradient pass, if there is one) has
    ended. With two chunks per rank, a chunk is about half of the rank's layers."""

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank has finished."""
        return max(span.end for spans in self.spans for span in spans[-1:])

    @cached_property
    def busy(self) -> list[float]:
        """Seconds that each rank spends in passes."""
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble_shares(self) -> list[float]:
        """For each rank, the fraction of the makespan in which it is idle."""
        return [1 - busy / self.makespan for busy in self.busy]


def simulate_schedule(
    name: str,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    num_micro_batches: int,
    chunks_per_rank: int | None = None,
    weight: Sequence[float] | None = None,
) -> Timeline:
    """Simulates the schedule `name`, a value of --pipeline-schedule.

    forward, backward: seconds of a micro-batch's pass, one number per chunk.
    transfer: seconds of a message between the chunks c and c + 1, in either direction, for each c.
    chunks_per_rank: for 'interleaved'; 'dualpipev' always has two, other schedules one.
    weight: the part of `backward` that computes weight gradients, by default half of it. Only 'zero-bubble'
        runs it as a separate pass.

    Times may be integers or Fractions; the results are then exact. Raises ValueError for an unknown schedule,
    and if the schedule does not support the times or the number of micro-batches.
    """
    if name not in PIPELINE_SCHEDULES:
        expected = ", ".join(PIPELINE_SCHEDULES)
        raise ValueError(f"unknown pipeline schedule {name}: expected one of {expected}")
    num_chunks = len(forward)
    _check_times(forward, backward, transfer)
    if num_micro_batches < 1:
        raise ValueError(f"a pipeline needs at least 1 micro-batch, and has {num_micro_batches}")
    per_rank = _chunks_per_rank(name, chunks_per_rank)
    if num_chunks % per_rank:
        raise ValueError(
            f"{name} has {per_rank} chunks per rank, and times were given for {num_chunks} chunks"
        )
    actions = actions_of(name, num_chunks // per_rank, num_micro_batches, chunks_per_rank)
    if not PIPELINE_SCHEDULES[name].splits_backward:
        return simulate(actions, forward, backward, transfer)
    weight = [seconds / 2 for seconds in backward] if weight is None else weight
    rest = [both - part for both, part in zip(backward, weight, strict=True)]
    if min(rest) < 0:
        raise ValueError("a weight-gradient pass takes longer than the backward pass that it is a part of")
    return simulate(actions, forward, rest, transfer, weight)


@lru_cache(maxsize=16)  # a plan calls it for each rank
def actions_of(
    name: str, num_ranks: int, num_micro_batches: int, chunks_per_rank: int | None = None
) -> ScheduleActions:
    """Returns the actions of the schedule `name`. Raises ValueError if the schedule does not support the
    sizes. chunks_per_rank: see `simulate_schedule`."""
    is_fixed = PIPELINE_SCHEDULES[name].stages_per_rank > 0
    of_schedule = () if is_fixed else (_chunks_per_rank(name, chunks_per_rank),)
    actions: ScheduleActions = PIPELINE_SCHEDULES.load(name)(num_ranks, num_micro_batches, *of_schedule)
    return actions


def _chunks_per_rank(name: str, given: int | None) -> int:
    if not (fixed := PIPELINE_SCHEDULES[name].stages_per_rank):
        if given is None or given < 1:
            raise ValueError(f"{name} needs a number of chunks per rank, at least 1: {given} was given")
        return given
    if given not in (None, fixed):
        raise ValueError(f"{name} has {fixed} chunks per rank, and {given} was given")
    return fixed


def mean_bubble(
    schedule: str, weights: Sequence[float], num_micro_batches: int, chunks_per_rank: int | None = None
) -> float:
    """Returns the mean share of a step in which a rank is idle, under three assumptions: the passes of stage
    s take times proportional to weights[s], a backward pass takes twice as long as a forward pass, and
    messages take no time. chunks_per_rank: see `simulate_schedule`."""
    forward = [weight / 3 for weight in weights]
    backward = [2 * seconds for seconds in forward]
    shares = simulate_schedule(
        schedule, forward, backward, [0.0] * (len(forward) - 1), num_micro_batches, chunks_per_rank
    ).bubble_shares
    return sum(shares) / len(shares)


def _check_times(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float]) -> None:
    chunks = len(forward)
    if chunks < 1 or len(backward) != chunks or len(transfer) != chunks - 1:
        raise ValueError(
            f"{chunks} forward, {len(backward)} backward and {len(transfer)} transfer times: expected at "
            "least one forward time, as many backward times, and one transfer time fewer"
        )
    for time in chain(forward, backward, transfer):
        if not (isfinite(time) and time >= 0):
            raise ValueError(f"a time of {time} seconds was given: expected 0 or more")
    if not any(chain(forward, backward)):
        raise ValueError("all forward and backward times are 0: expected a time above 0")


def simulate(
    actions: ScheduleActions,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    weight: Sequence[float] = (),
) -> Timeline:
    """Simulates the actions of a schedule. Each step starts as early as its rank and its messages allow.

    The arguments are the times of `simulate_schedule`, except that `backward` excludes `weight`, the times of
    the weight-gradient passes (empty if there are none). Raises ValueError if the actions deadlock; the error
    names a pass that gets no input.
    """
    run = _Run(actions, {"forward": forward, "backward": backward, "weight": weight}, transfer)
    ready = deque(range(len(actions.steps)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if run.waiting:
        action, rank = next(iter(run.waiting.items()))
        raise ValueError(f"the schedule cannot run: rank {rank} waits forever for the input of {action}")
    return Timeline([rank.spans for rank in run.ranks], [rank.peak_in_flight for rank in run.ranks])


@dataclass
class _Rank:
    """The state of a rank in the simulation."""

    steps: list[Step]
    position: int = 0
    resumes: bool = False
    """Whether the current step was interrupted: its first messages are sent, and the rank waits for an
    input."""
    clock: float = 0
    inputs: set[PipelineAction] = field(default_factory=set)
    """The passes whose input has arrived."""
    outputs: set[PipelineAction] = field(default_factory=set)
    """The passes whose output is not sent yet."""
    live: set[tuple[int, int]] = field(default_factory=set)
    """(micro-batch, chunk) of the in-flight forward passes."""
    weight_passes: set[tuple[int, int]] = field(default_factory=set)
    """(micro-batch, chunk) of the weight-gradient passes that can run."""
    peak_in_flight: int = 0
    spans: list[Span] = field(default_factory=list)


class _Run:
    """The state of a simulation."""

    def __init__(
        self, actions: ScheduleActions, times: dict[Kind, Sequence[float]], transfer: Sequence[float]
    ) -> None:
        self.ranks = [_Rank(steps) for steps in actions.steps]
        self.waiting: dict[PipelineAction, int] = {}
        """The pass that waits for its input -> the rank of this pass."""
        self._rank_of_chunk = actions.rank_of_chunk
        self._times = times
        self._transfer = transfer
        self._arrivals: dict[PipelineAction, float] = {}
        self._splits_backward = bool(times["weight"])

    def advance(self, number: int) -> list[int]:
        """Advances a rank until it waits for a message. Returns the ranks that its messages unblock."""
        rank, woken = self.ranks[number], []
        while rank.position < len(rank.steps):
            sends, receives, late_sends, step_actions = rank.steps[rank.position]
            if not rank.resumes:
                woken += self._send(rank, sends)
            for action in receives:
                if action not in self._arrivals:
                    self.waiting[action] = number
                    rank.resumes = True
                    return woken
            for action in receives:
                rank.clock = max(rank.clock, self._arrivals.pop(action))
                rank.inputs.add(action)
            woken += self._send(rank, late_sends)
            for action in step_actions:
                self._compute(number, rank, action)
            rank.position += 1
            rank.resumes = False
        return woken

    def _send(self, rank: _Rank, outputs: Sequence[PipelineAction]) -> list[int]:
        """Sends the outputs of passes. Returns the ranks that waited for them."""
        woken = []
        for action in outputs:
            if action not in rank.outputs:
                raise ValueError(f"the schedule cannot run: it sends the output of {action} too early")
            rank.outputs.remove(action)
            kind, micro_batch, chunk = action
            target = PipelineAction(kind, micro_batch, chunk + FLOW[kind])
            self._arrivals[target] = rank.clock + self._transfer[min(chunk, target.chunk)]
            if target in self.waiting:
                woken.append(self.waiting.pop(target))
        return woken

    def _compute(self, number: int, rank: _Rank, action: PipelineAction) -> None:
        self._check_input(rank, action)
        kind, micro_batch, chunk = action
        key = (micro_batch, chunk)
        rank.inputs.discard(action)
        if kind == "forward":
            rank.live.add(key)
            rank.peak_in_flight = max(rank.peak_in_flight, len(rank.live))
        elif kind == "backward" and self._splits_backward:
            rank.weight_passes.add(key)
        else:
            rank.weight_passes.discard(key)
            rank.live.remove(key)
        start = rank.clock
        rank.clock = start + self._times[kind][chunk]
        rank.spans.append(Span(action, start, rank.clock))
        target = chunk + FLOW.get(kind, 0)
        if kind in FLOW and 0 <= target < len(self._rank_of_chunk):
            if self._rank_of_chunk[target] == number:
                rank.inputs.add(PipelineAction(kind, micro_batch, target))
            else:
                rank.outputs.add(action)

    def _check_input(self, rank: _Rank, action: PipelineAction) -> None:
        kind, micro_batch, chunk = action
        key = (micro_batch, chunk)
        if kind == "weight":
            has_input = key in rank.weight_passes
        else:
            begins = chunk == (0 if kind == "forward" else len(self._rank_of_chunk) - 1)
            has_input = (begins or action in rank.inputs) and (kind == "forward" or key in rank.live)
        if not has_input:
            raise ValueError(f"the schedule cannot run: it runs {action} before its input has arrived")
