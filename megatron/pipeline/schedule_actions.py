"""The actions of pipeline schedules: when each rank runs which pass, and which messages it exchanges.

The model's layers are divided into model chunks. Chunk c is stage c of the flags, the docs and
`megatron.engine`. The index of a chunk among the chunks of its rank is called model_chunk_id, as in
Megatron-LM. The actions of a rank are a list of steps. In each step the rank exchanges messages and then
computes. The schedules and their chunks:

    '1f1b' (arXiv 2104.04473, PipeDream-flush)                 one per rank
    'zero-bubble' (arXiv 2401.10241)                           one per rank
    'dualpipev' (https://github.com/deepseek-ai/DualPipe)      rank r of p holds chunks r and 2p - 1 - r
    'interleaved' (arXiv 2104.04473, section 2.2)              rank r holds chunks r, p + r, 2p + r, ...

'1f1b' and 'dualpipev' exchange exactly the messages of `TrainSchedule` and `DualPipeVSchedule` in DeepSpeed
0.19.8. In particular:

- `TrainSchedule` receives a gradient before it sends the activation that it has just computed. Therefore, in
  its steady state each micro-batch waits for one transfer in each direction, even if the activation is ready;
- `DualPipeVSchedule` neither splits the backward pass into input and weight gradients ("zero bubble") nor
  overlaps a forward with a backward pass. A pair of passes shares only its message exchanges: the forward
  pass also waits for the gradient, and its output is sent after the backward pass.

'interleaved' runs its passes in the order of Megatron-LM's `forward_backward_pipelining_with_interleaving`.
In every schedule, messages between two ranks are received in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from megatron.mpu.mesh import chunks_of_rank

Kind = Literal["forward", "backward", "weight"]
"""Kind of a pass. "weight" (W) computes the weight gradients if "backward" (B) computes only input
gradients."""

FLOW: dict[Kind, int] = {"forward": 1, "backward": -1}
"""The offset from a chunk to the chunk that receives its output. A weight-gradient pass has no receiver."""


class PipelineAction(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: Kind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"the {self.kind} pass of micro-batch {self.micro_batch} through chunk {self.chunk}"


class Step(NamedTuple):
    """A message exchange of a rank, and the passes after it. The parts run in the order of the fields."""

    sends: tuple[PipelineAction, ...]
    """The passes whose outputs are sent first."""
    receives: tuple[PipelineAction, ...]
    """The passes whose inputs are received next. The rank waits for all of them."""
    late_sends: tuple[PipelineAction, ...]
    """The passes whose outputs are sent after these inputs have arrived."""
    actions: tuple[PipelineAction, ...]
    """The passes that are computed last, in this order."""


@dataclass(frozen=True)
class ScheduleActions:
    """The steps of each rank, and the rank that holds each chunk."""

    steps: list[list[Step]]
    rank_of_chunk: Sequence[int]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> ScheduleActions:
    """Returns 1F1B (PipeDream-flush, arXiv 2104.04473). Stage s of p first runs p - s forward passes
    (warm-up), and then alternates between one backward and one forward pass. So it stores the activations of
    at most p - s micro-batches."""

    def add_steps(stage: int, steps: _Steps) -> None:
        forwards, backwards = _passes(stage, num_micro_batches)
        depth = num_stages - stage
        steps.add_each(forwards[:depth])
        for micro_batch, action in enumerate(backwards):
            # After a forward pass DeepSpeed receives the gradient before it sends the activation. If the
            # number of remaining micro-batches is smaller than the number of stages from this one on, the
            # activation was already sent.
            steps.add(action, sends_late=micro_batch + depth - 1 < num_micro_batches)
            steps.add_each(forwards[micro_batch + depth :][:1])

    return _schedule(range(num_stages), add_steps)


def zero_bubble(num_stages: int, num_micro_batches: int) -> ScheduleActions:
    """Returns ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B with a backward pass that is split into B and W.

    B computes the gradient of the stage's input, which the previous stage waits for. W computes the weight
    gradients. Nothing waits for them, so W can run when the stage would be idle. Forward passes and Bs run in
    the order of 1F1B. On stage s, the W of micro-batch i runs after the B of micro-batch i + s. So all p
    stages keep equally many micro-batches: on stage s, p - s of them wait for B and s wait for W. If forward
    pass, B and W take equally long, the bubble is a third of 1F1B's bubble.
    """

    def add_steps(stage: int, steps: _Steps) -> None:
        forwards, backwards = _passes(stage, num_micro_batches)
        weights = [PipelineAction("weight", k, stage) for k in range(num_micro_batches)]
        depth = num_stages - stage
        steps.add_each(forwards[:depth])
        for micro_batch, action in enumerate(backwards):
            steps.add(action)
            # W is a separate step, so that the output of B is sent before W.
            if micro_batch >= stage:
                steps.add(weights[micro_batch - stage])
            steps.add_each(forwards[micro_batch + depth :][:1])
        steps.add_each(weights[max(num_micro_batches - stage, 0) :])

    return _schedule(range(num_stages), add_steps)


def dual_pipe_v(num_ranks: int, num_micro_batches: int) -> ScheduleActions:
    """Returns DualPipeV (https://github.com/deepseek-ai/DualPipe) as DeepSpeed runs it: see the module's
    docstring.

    Micro-batches go down through the chunks 0 to p - 1 and back up through the chunks p to 2p - 1, and passes
    of the two directions alternate. Raises ValueError if there are fewer than two micro-batches per rank.
    """
    if num_micro_batches < 2 * num_ranks:
        raise ValueError(
            f"dualpipev on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches, and has "
            f"{num_micro_batches}: take a larger global batch, a smaller micro-batch or fewer pipeline ranks"
        )
    rank_of_chunk = [*range(num_ranks), *reversed(range(num_ranks))]
    return _schedule(rank_of_chunk, partial(_add_dual_pipe_v_steps, num_ranks, num_micro_batches))


def _add_dual_pipe_v_steps(num_ranks: int, num_micro_batches: int, rank: int, steps: _Steps) -> None:
    """Adds the steps of one rank. The numbered comments are the parts of DeepSpeed's
    `DualPipeVSchedule.steps`."""
    last_chunk = 2 * num_ranks - 1
    down, up = _passes(rank, num_micro_batches), _passes(last_chunk - rank, num_micro_batches)
    forward_down, backward_down, forward_up, backward_up = map(iter, (*down, *up))
    below = num_ranks - 1 - rank

    for _ in range(2 * below):  # 1
        steps.add(next(forward_down))
    action = next(forward_down)
    for turn in range(rank + 1):  # 2
        # The outputs of both directions are sent together, and the next inputs of both are received together.
        steps.add(action, hold=True)
        action = next(forward_down)
        steps.add(next(forward_up), receive_too=(action,), hold=below == 0 and turn == rank)
    for _ in range(below):  # 3
        steps.add(next(backward_up))
        steps.add(next(forward_up))
    for turn in range(num_micro_batches - last_chunk + rank):  # 4
        if turn > 0:
            steps.add(next(forward_down), next(backward_up))
        elif below > 0:
            steps.add(action, next(backward_up))
        else:
            steps.add(action)
            steps.add(next(backward_up))
        steps.add(next(forward_up), next(backward_down))
    for _ in range(below):  # 5
        steps.add(next(backward_up))
        steps.add(next(forward_up), next(backward_down))
    for _ in range(rank + 1):  # 6
        steps.add(next(backward_up))
        steps.add(next(backward_down))
    steps.add_each(backward_down)  # 7


def interleaved(num_ranks: int, num_micro_batches: int, chunks_per_rank: int) -> ScheduleActions:
    """Returns interleaved 1F1B (arXiv 2104.04473, section 2.2): rank r of p holds the chunks r, p + r, 2p +
    r, ...

    Groups of p micro-batches go through the first chunk of a rank, then through its second chunk, and so on.
    In the backward direction they first go through its last chunk. With v chunks, rank r first runs 2 (p - 1
    - r) + (v - 1) p forward passes (warm-up), and then alternates between one forward and one backward pass.
    The two passes share their message exchange: if all passes take equally long, every message is needed one
    step after its pass.

    Raises ValueError if the number of micro-batches is not a multiple of the number of ranks.
    """
    if num_micro_batches % num_ranks:
        raise ValueError(
            f"interleaved on {num_ranks} ranks needs a multiple of {num_ranks} micro-batches, and has "
            f"{num_micro_batches}: change the global batch size, the micro-batch size or the number of ranks"
        )
    rank_of_chunk = [chunk % num_ranks for chunk in range(num_ranks * chunks_per_rank)]
    groups = [range(first, first + num_ranks) for first in range(0, num_micro_batches, num_ranks)]

    def passes(kind: Kind, chunks: Sequence[int]) -> list[PipelineAction]:
        return [PipelineAction(kind, k, chunk) for group in groups for chunk in chunks for k in group]

    def add_steps(rank: int, steps: _Steps) -> None:
        chunks = chunks_of_rank(rank_of_chunk, rank)
        forwards, backwards = passes("forward", chunks), passes("backward", chunks[::-1])
        warm_up = min(2 * (num_ranks - 1 - rank) + (len(chunks) - 1) * num_ranks, len(forwards))
        pairs = len(forwards) - warm_up
        steps.add_each(forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
            steps.add(forward, backward)
        steps.add_each(backwards[pairs:])

    return _schedule(rank_of_chunk, add_steps)


def forward_only(rank_of_chunk: Sequence[int], num_micro_batches: int) -> ScheduleActions:
    """Returns a schedule of forward passes only, as an evaluation needs, for any chunks and number of
    micro-batches.

    Micro-batch k is in chunk c in step k + c, so every message is needed one step after its pass.
    """

    def add_steps(rank: int, steps: _Steps) -> None:
        for number in range(num_micro_batches + len(rank_of_chunk) - 1):
            chunks = [c for c in chunks_of_rank(rank_of_chunk, rank) if 0 <= number - c < num_micro_batches]
            steps.add(*(PipelineAction("forward", number - chunk, chunk) for chunk in chunks))

    return _schedule(rank_of_chunk, add_steps)


def _schedule(rank_of_chunk: Sequence[int], add_steps: Callable[[int, _Steps], None]) -> ScheduleActions:
    """Returns the steps of all ranks. add_steps: a function that adds the steps of one rank."""
    of_ranks = [_Steps(rank, rank_of_chunk) for rank in range(max(rank_of_chunk) + 1)]
    for rank, steps in enumerate(of_ranks):
        add_steps(rank, steps)
    return ScheduleActions([steps.finished() for steps in of_ranks], rank_of_chunk)


def _passes(chunk: int, num_micro_batches: int) -> tuple[list[PipelineAction], list[PipelineAction]]:
    """Returns the forward passes and the backward passes through a chunk."""
    kinds: tuple[Kind, Kind] = "forward", "backward"
    forwards, backwards = (
        [PipelineAction(kind, k, chunk) for k in range(num_micro_batches)] for kind in kinds
    )
    return forwards, backwards


class _Steps:
    """Builds the steps of a rank from its passes. It adds the messages from and to other ranks."""

    def __init__(self, rank: int, rank_of_chunk: Sequence[int]) -> None:
        def elsewhere(chunk: int) -> bool:
            return 0 <= chunk < len(rank_of_chunk) and rank_of_chunk[chunk] != rank

        own = [(kind, chunk) for kind in FLOW for chunk in chunks_of_rank(rank_of_chunk, rank)]
        self._incoming = {(kind, chunk) for kind, chunk in own if elsewhere(chunk - FLOW[kind])}
        self._outgoing = {(kind, chunk) for kind, chunk in own if elsewhere(chunk + FLOW[kind])}
        self._steps: list[Step] = []
        self._unsent: tuple[PipelineAction, ...] = ()
        self._held: tuple[PipelineAction, ...] = ()
        self._received: set[PipelineAction] = set()

    def add(
        self,
        *actions: PipelineAction,
        sends_late: bool = False,
        hold: bool = False,
        receive_too: tuple[PipelineAction, ...] = (),
    ) -> None:
        """Adds a step that computes `actions`.

        sends_late: whether pending outputs are sent after this step's inputs have arrived, instead of before.
        hold: whether this step's outputs are sent together with the outputs of the next step. receive_too:
        passes of later steps whose inputs are received in this step.
        """
        receives = _select(actions + receive_too, self._incoming)
        if self._received:
            receives = tuple([action for action in receives if action not in self._received])
            self._received.difference_update(actions)
        self._received.update(receive_too)
        outputs = _select(actions, self._outgoing)
        sends, late_sends = ((), self._unsent) if sends_late else (self._unsent, ())
        self._steps.append(Step(sends, receives, late_sends, actions))
        self._unsent, self._held = (self._held, outputs) if hold else (self._held + outputs, ())

    def add_each(self, actions: Iterable[PipelineAction]) -> None:
        """Adds a step for each pass."""
        for action in actions:
            self.add(action)

    def finished(self) -> list[Step]:
        """Returns all steps, with a last step without passes that sends the remaining outputs."""
        return [*self._steps, Step(self._unsent + self._held, (), (), ())]


def _select(actions: tuple[PipelineAction, ...], places: set[tuple[Kind, int]]) -> tuple[PipelineAction, ...]:
    """Returns the passes whose kind and chunk are among `places`."""
    selected = [action for action in actions if (action.kind, action.chunk) in places]
    # Large plans have millions of tuples, so this tuple is reused if nothing is removed.
    return actions if len(selected) == len(actions) else tuple(selected)
