"""Simulation of pipeline schedules, with given times of the stages and of the transfers between them.

The model's layers are divided into chunks. Every rank holds one chunk ('gpipe', arXiv 1811.06965; '1f1b',
called PipeDream-flush in arXiv 2104.04473) or two ('dualpipev', arXiv 2412.19437: rank r of p holds chunks r
and 2p - 1 - r, so the first and the last chunk are on rank 0). An order of work is a list of steps per rank.
Each step exchanges messages and then computes.

'1f1b' and 'dualpipev' are, message by message, what DeepSpeed 0.19.8's `TrainSchedule` and
`DualPipeVSchedule` emit; DeepSpeed has no GPipe. In particular:

- `TrainSchedule` receives a gradient before it sends the activation that it has just computed. So in its
  steady state each micro-batch waits for one transfer in each direction, even if the activation was ready;
- `DualPipeVSchedule` neither splits the backward pass into input and weight gradients ("zero bubble") nor
  overlaps a forward with a backward pass. A pair of passes only shares its message exchanges: the forward
  pass also waits for the gradient, and its output is sent after the backward pass.

Simplifications: a send does not block, whereas in DeepSpeed it blocks until the receiver takes the message;
transfers do not share bandwidth and do not slow computation; the step ends with the last backward pass,
before the gradients are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import isfinite
from typing import Literal, NamedTuple

from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.config.registry import load_object

# Schedules that can be simulated: --pipeline-schedule's, and GPipe for comparison.
SCHEDULES = {
    **{name: schedule.implementation for name, schedule in PIPELINE_SCHEDULES.items()},
    "gpipe": "megatron.pipeline.schedule:gpipe",
}

Kind = Literal["forward", "backward"]

_FLOW: dict[Kind, int] = {"forward": 1, "backward": -1}
"""Offset from a chunk to the chunk that receives its output."""


class Work(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: Kind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"the {self.kind} pass of micro-batch {self.micro_batch} through chunk {self.chunk}"


class Step(NamedTuple):
    """One message exchange of a rank and the work after it, in the order of the fields."""

    sends: tuple[Work, ...]
    """Work whose outputs are sent first."""
    receives: tuple[Work, ...]
    """Work whose inputs are received then; the rank waits for all of them."""
    late_sends: tuple[Work, ...]
    """Work whose outputs are sent after that."""
    work: tuple[Work, ...]
    """Work that is computed last, in this order."""


@dataclass(frozen=True)
class Order:
    """An order of work: the steps of each rank, and which rank holds each chunk."""

    steps: list[list[Step]]
    rank_of_chunk: Sequence[int]


class Span(NamedTuple):
    """Start and end of a piece of work, in seconds from the start of the step."""

    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    spans: list[list[Span]]
    """Per rank, its work in chronological order."""
    peak_in_flight: list[int]
    """Per rank, the largest number of in-flight forward passes (through one chunk, backward pass not
    finished): the activations that are kept. With two chunks per rank, a chunk has half of the rank's
    layers."""

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank is finished."""
        return max(span.end for spans in self.spans for span in spans[-1:])

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of work per rank."""
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble_shares(self) -> list[float]:
        """Per rank, the fraction of the makespan in which it is idle."""
        return [1 - busy / self.makespan for busy in self.busy]


def simulate_schedule(
    name: str,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    num_micro_batches: int,
) -> Timeline:
    """Simulates the schedule `name`: '1f1b', 'gpipe' or 'dualpipev'.

    forward, backward: seconds of a micro-batch's pass per chunk; 'dualpipev' has two chunks per rank.
    transfer: seconds of a message between chunks c and c + 1, in either direction; one fewer than chunks.

    Times may be integers or Fractions; the results are then exact. ValueError for an unknown schedule, and
    for times or a number of micro-batches that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name}: expected one of {', '.join(SCHEDULES)}")
    num_chunks = len(forward)
    _check_times(forward, backward, transfer)
    if num_micro_batches < 1:
        raise ValueError(f"a pipeline needs at least 1 micro-batch, and has {num_micro_batches}")
    chunks_per_rank = PIPELINE_SCHEDULES[name].stages_per_rank if name in PIPELINE_SCHEDULES else 1
    if num_chunks % chunks_per_rank:
        raise ValueError(
            f"{name} has {chunks_per_rank} chunks per rank, and times were given for {num_chunks} chunks"
        )
    order = load_object(SCHEDULES[name])(num_chunks // chunks_per_rank, num_micro_batches)
    return simulate(order, forward, backward, transfer)


def mean_bubble(schedule: str, weights: Sequence[float], num_micro_batches: int) -> float:
    """Mean share of a step in which a rank is idle, if the passes of stage s take times proportional to
    weights[s], a backward pass twice as long as a forward pass, and messages none."""
    forward = [weight / 3 for weight in weights]
    backward = [2 * seconds for seconds in forward]
    shares = simulate_schedule(
        schedule, forward, backward, [0.0] * (len(forward) - 1), num_micro_batches
    ).bubble_shares
    return sum(shares) / len(shares)


def _check_times(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float]) -> None:
    chunks = len(forward)
    if chunks < 1 or len(backward) != chunks or len(transfer) != chunks - 1:
        raise ValueError(
            f"{chunks} forward times need as many backward times and one transfer time less, and at least "
            f"one: there are {len(backward)} backward and {len(transfer)} transfer times"
        )
    for time in chain(forward, backward, transfer):
        if not (isfinite(time) and time >= 0):
            raise ValueError(f"a time of {time} seconds was given: expected 0 or more")
    if not any(chain(forward, backward)):
        raise ValueError("all forward and backward times are 0: expected a time above 0")


def gpipe(num_stages: int, num_micro_batches: int) -> Order:
    """All forward passes, then all backward passes, both in the order of the micro-batches."""
    stages = range(num_stages)

    def stage_steps(stage: int) -> list[Step]:
        steps = _Steps(stage, stages)
        for work in chain(*_passes(stage, num_micro_batches)):
            steps.add(work)
        return steps.finished()

    return Order([stage_steps(stage) for stage in stages], stages)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Order:
    """1F1B (PipeDream-flush, arXiv 2104.04473): stage s of p runs p - s forward passes first (warm-up), then
    alternates one backward and one forward pass. So stage s keeps activations of at most p - s
    micro-batches."""
    stages = range(num_stages)

    def stage_steps(stage: int) -> list[Step]:
        steps = _Steps(stage, stages)
        forwards, backwards = _passes(stage, num_micro_batches)
        depth = num_stages - stage
        for work in forwards[:depth]:
            steps.add(work)
        for micro_batch, work in enumerate(backwards):
            # After a forward pass DeepSpeed receives the gradient before it sends the activation. If there
            # are fewer micro-batches than stages from this one on, the activation was already sent.
            last_forward = micro_batch + depth - 1
            steps.add(work, sends_late=last_forward < num_micro_batches)
            if last_forward + 1 < num_micro_batches:
                steps.add(forwards[last_forward + 1])
        return steps.finished()

    return Order([stage_steps(stage) for stage in stages], stages)


def dual_pipe_v(num_ranks: int, num_micro_batches: int) -> Order:
    """DualPipeV (https://github.com/deepseek-ai/DualPipe) as DeepSpeed runs it; see the module's docstring.

    Micro-batches go down through chunks 0 to p - 1 and back up through p to 2p - 1, and passes of both ways
    alternate. Raises ValueError for less than two micro-batches per rank.
    """
    if num_micro_batches < 2 * num_ranks:
        raise ValueError(
            f"dualpipev on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches, and has "
            f"{num_micro_batches}: take a larger global batch, a smaller micro-batch or fewer pipeline ranks"
        )
    rank_of_chunk = [*range(num_ranks), *reversed(range(num_ranks))]
    steps = [_dual_pipe_v_steps(rank, rank_of_chunk, num_micro_batches) for rank in range(num_ranks)]
    return Order(steps, rank_of_chunk)


def _dual_pipe_v_steps(rank: int, rank_of_chunk: Sequence[int], num_micro_batches: int) -> list[Step]:
    """One rank's steps. The numbers are those of the parts of DeepSpeed's `DualPipeVSchedule.steps`."""
    last_chunk = len(rank_of_chunk) - 1
    down, up = _passes(rank, num_micro_batches), _passes(last_chunk - rank, num_micro_batches)
    forward_down, backward_down, forward_up, backward_up = map(iter, (*down, *up))
    below = len(rank_of_chunk) // 2 - 1 - rank
    steps = _Steps(rank, rank_of_chunk)

    for _ in range(2 * below):  # 1
        steps.add(next(forward_down))
    work = next(forward_down)
    for turn in range(rank + 1):  # 2
        # The outputs of both directions are sent together; so are the next inputs received.
        steps.add(work, hold=True)
        work = next(forward_down)
        steps.add(next(forward_up), receive_too=(work,), hold=below == 0 and turn == rank)
    for _ in range(below):  # 3
        steps.add(next(backward_up))
        steps.add(next(forward_up))
    for turn in range(num_micro_batches - last_chunk + rank):  # 4
        if turn > 0:
            steps.add(next(forward_down), next(backward_up))
        elif below > 0:
            steps.add(work, next(backward_up))
        else:
            steps.add(work)
            steps.add(next(backward_up))
        steps.add(next(forward_up), next(backward_down))
    for _ in range(below):  # 5
        steps.add(next(backward_up))
        steps.add(next(forward_up), next(backward_down))
    for _ in range(rank + 1):  # 6
        steps.add(next(backward_up))
        steps.add(next(backward_down))
    for _ in range(below):  # 7
        steps.add(next(backward_down))
    return steps.finished()


def _passes(chunk: int, num_micro_batches: int) -> tuple[list[Work], list[Work]]:
    """The forward and the backward passes through a chunk."""
    numbers = range(num_micro_batches)
    return [Work("forward", k, chunk) for k in numbers], [Work("backward", k, chunk) for k in numbers]


class _Steps:
    """Builds the steps of a rank from its work, with the messages from and to other ranks."""

    def __init__(self, rank: int, rank_of_chunk: Sequence[int]) -> None:
        def elsewhere(chunk: int) -> bool:
            return 0 <= chunk < len(rank_of_chunk) and rank_of_chunk[chunk] != rank

        own = [(kind, chunk) for kind in _FLOW for chunk, owner in enumerate(rank_of_chunk) if owner == rank]
        self._incoming = {(kind, chunk) for kind, chunk in own if elsewhere(chunk - _FLOW[kind])}
        self._outgoing = {(kind, chunk) for kind, chunk in own if elsewhere(chunk + _FLOW[kind])}
        self._steps: list[Step] = []
        self._unsent: tuple[Work, ...] = ()
        self._held: tuple[Work, ...] = ()
        self._received: set[Work] = set()

    def add(
        self, *work: Work, sends_late: bool = False, hold: bool = False, receive_too: tuple[Work, ...] = ()
    ) -> None:
        """Adds a step.

        sends_late: pending outputs are sent after this step's inputs have arrived, not before.
        hold: this step's outputs are sent together with those of the next step.
        receive_too: work of later steps whose inputs are received in this step.
        """
        receives = _select(work + receive_too, self._incoming)
        if self._received:
            receives = tuple([w for w in receives if w not in self._received])
            self._received.difference_update(work)
        self._received.update(receive_too)
        outputs = _select(work, self._outgoing)
        sends, late_sends = ((), self._unsent) if sends_late else (self._unsent, ())
        self._steps.append(Step(sends, receives, late_sends, work))
        self._unsent, self._held = (self._held, outputs) if hold else (self._held + outputs, ())

    def finished(self) -> list[Step]:
        """All steps; a last step without work sends the remaining outputs."""
        return [*self._steps, Step(self._unsent + self._held, (), (), ())]


def _select(work: tuple[Work, ...], places: set[tuple[Kind, int]]) -> tuple[Work, ...]:
    """The work whose kind and chunk are among `places`."""
    selected = [w for w in work if (w.kind, w.chunk) in places]
    # Large plans have millions of these: reuse the tuple if nothing is removed.
    return work if len(selected) == len(work) else tuple(selected)


def simulate(
    order: Order, forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float]
) -> Timeline:
    """Simulates an order of work; each step starts as early as its rank and its messages allow.

    The times are those of `simulate_schedule`. ValueError if the order deadlocks; it names a piece of work
    that never gets its input.
    """
    run = _Run(order, {"forward": forward, "backward": backward}, transfer)
    ready = deque(range(len(order.steps)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    if run.waiting:
        work, rank = next(iter(run.waiting.items()))
        raise ValueError(
            f"the order of work cannot be run: rank {rank} waits forever for the input of {work}"
        )
    return Timeline([rank.spans for rank in run.ranks], [rank.peak_in_flight for rank in run.ranks])


@dataclass
class _Rank:
    """The state of a rank in the simulation."""

    steps: list[Step]
    position: int = 0
    resumes: bool = False
    """Whether the current step was interrupted: its first messages are sent, and it waits for an input."""
    clock: float = 0
    inputs: set[Work] = field(default_factory=set)
    """Work whose input has arrived."""
    outputs: set[Work] = field(default_factory=set)
    """Work whose output is not sent yet."""
    live: set[tuple[int, int]] = field(default_factory=set)
    """(micro-batch, chunk) of the in-flight forward passes."""
    peak_in_flight: int = 0
    spans: list[Span] = field(default_factory=list)


class _Run:
    """The state of a simulation."""

    def __init__(self, order: Order, times: dict[Kind, Sequence[float]], transfer: Sequence[float]) -> None:
        self.ranks = [_Rank(steps) for steps in order.steps]
        self.waiting: dict[Work, int] = {}
        """Work that waits for its input -> its rank."""
        self._rank_of_chunk = order.rank_of_chunk
        self._times = times
        self._transfer = transfer
        self._arrivals: dict[Work, float] = {}

    def advance(self, number: int) -> list[int]:
        """Advances a rank until it waits for a message; returns the ranks that its messages unblock."""
        rank, woken = self.ranks[number], []
        while rank.position < len(rank.steps):
            sends, receives, late_sends, step_work = rank.steps[rank.position]
            if not rank.resumes:
                woken += self._send(rank, sends)
            for work in receives:
                if work not in self._arrivals:
                    self.waiting[work] = number
                    rank.resumes = True
                    return woken
            for work in receives:
                rank.clock = max(rank.clock, self._arrivals.pop(work))
                rank.inputs.add(work)
            woken += self._send(rank, late_sends)
            for work in step_work:
                self._compute(number, rank, work)
            rank.position += 1
            rank.resumes = False
        return woken

    def _send(self, rank: _Rank, outputs: Sequence[Work]) -> list[int]:
        """Sends outputs; returns the ranks that waited for them."""
        woken = []
        for work in outputs:
            if work not in rank.outputs:
                raise ValueError(f"the order of work cannot be run: it sends the output of {work} too early")
            rank.outputs.remove(work)
            kind, micro_batch, chunk = work
            target = Work(kind, micro_batch, chunk + _FLOW[kind])
            self._arrivals[target] = rank.clock + self._transfer[min(chunk, target.chunk)]
            if target in self.waiting:
                woken.append(self.waiting.pop(target))
        return woken

    def _compute(self, number: int, rank: _Rank, work: Work) -> None:
        kind, micro_batch, chunk = work
        last_chunk = len(self._rank_of_chunk) - 1
        has_input = chunk != (0 if kind == "forward" else last_chunk)
        key = (micro_batch, chunk)
        if (has_input and work not in rank.inputs) or (kind == "backward" and key not in rank.live):
            raise ValueError(f"the order of work cannot be run: it does {work} before its input has arrived")
        rank.inputs.discard(work)
        if kind == "forward":
            rank.live.add(key)
            rank.peak_in_flight = max(rank.peak_in_flight, len(rank.live))
        else:
            rank.live.remove(key)
        start = rank.clock
        rank.clock = start + self._times[kind][chunk]
        rank.spans.append(Span(work, start, rank.clock))
        target = chunk + _FLOW[kind]
        if 0 <= target <= last_chunk:
            if self._rank_of_chunk[target] == number:
                rank.inputs.add(Work(kind, micro_batch, target))
            else:
                rank.outputs.add(work)
