"""Compares interleaved 1F1B with its description and formulas, and tests the messages of all schedules that
run on `engine.executor`."""

from fractions import Fraction

import pytest

from megatron.pipeline.schedule import simulate, simulate_schedule
from megatron.pipeline.schedule_actions import (
    FLOW,
    PipelineAction,
    dual_pipe_v,
    forward_only,
    interleaved,
    zero_bubble,
)
from megatron.planner.simulation.device import CollectiveCall
from tests.support.rows import for_each
from tests.support.simulation.matching import find_deadlock

# (ranks, micro-batches, chunks per rank)
LOOP_SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 3 * p, 5 * p) for v in (1, 2, 3, 5)]


def megatrons_passes(ranks, micro_batches, chunks, rank):
    """Returns the passes of Megatron-LM's `forward_backward_pipelining_with_interleaving`, from its
    description: forward pass k is through the chunk k % (p v) // p, backward pass k through the mirrored
    chunk."""

    def action(kind, k):
        group, rest = divmod(k, ranks * chunks)
        place, member = divmod(rest, ranks)
        place = place if kind == "forward" else chunks - 1 - place
        return PipelineAction(kind, group * ranks + member, place * ranks + rank)

    total = micro_batches * chunks
    warm_up = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    passes = [action("forward", k) for k in range(warm_up)]
    for k in range(total - warm_up):
        passes += [action("forward", warm_up + k), action("backward", k)]
    return passes + [action("backward", k) for k in range(total - warm_up, total)]


@for_each("ranks, micro_batches, chunks", LOOP_SIZES)
def test_interleaved_has_the_passes_of_megatron(ranks, micro_batches, chunks):
    actions = interleaved(ranks, micro_batches, chunks)
    assert actions.rank_of_chunk == [chunk % ranks for chunk in range(ranks * chunks)]
    for rank, steps in enumerate(actions.steps):
        passes = [action for step in steps for action in step.actions]
        assert passes == megatrons_passes(ranks, micro_batches, chunks, rank)


@pytest.mark.parametrize("ratio", [1, 2, Fraction(7, 3)])
@for_each("ranks, micro_batches, chunks", LOOP_SIZES)
def test_interleaving_divides_the_bubble_of_1f1b(ranks, micro_batches, chunks, ratio):
    """Section 2.2 of the paper: the bubble is (p - 1) (t_f + t_b) / v, and the passes take m (t_f + t_b)."""
    count = ranks * chunks
    forward, backward = [Fraction(1, chunks)] * count, [Fraction(ratio) / chunks] * count
    timeline = simulate_schedule("interleaved", forward, backward, [0] * (count - 1), micro_batches, chunks)
    assert timeline.makespan == (1 + ratio) * (micro_batches + Fraction(ranks - 1, chunks))


def schedules_of_several_ranks():
    for ranks, micro_batches in [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, p, 2 * p + 1, 5 * p)]:
        yield "zero-bubble", zero_bubble(ranks, micro_batches)
        yield "evaluation of one chunk each", forward_only(range(ranks), micro_batches)
    for ranks, micro_batches in [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 3 * p, 7 * p)]:
        yield "dualpipev", dual_pipe_v(ranks, micro_batches)
        for chunks in (2, 3, 4):
            yield f"interleaved x {chunks}", interleaved(ranks, micro_batches, chunks)
            loop = [chunk % ranks for chunk in range(ranks * chunks)]
            for odd in (1, 2, ranks, micro_batches, micro_batches + 1):
                yield f"evaluation x {chunks}", forward_only(loop, odd)
                yield "evaluation in a V", forward_only([*range(ranks), *reversed(range(ranks))], odd)


def messages(actions):
    """Returns, for each rank and step, the batch of messages (is sent, peer rank, the sender's action)."""
    for rank, steps in enumerate(actions.steps):
        batches = []
        for step in steps:
            assert not step.late_sends
            batch = [(True, actions.rank_of_chunk[w.chunk + FLOW[w.kind]], w) for w in step.sends]
            for action in step.receives:
                source = action._replace(chunk=action.chunk - FLOW[action.kind])
                batch.append((False, actions.rank_of_chunk[source.chunk], source))
            batches.append(batch)
        yield rank, batches


def test_messages_between_two_ranks_arrive_in_the_order_in_which_they_are_received():
    """In a different order a rank would confuse two messages, which have equal sizes and no tags."""
    for name, actions in schedules_of_several_ranks():
        sent, received = {}, {}
        for rank, batches in messages(actions):
            for is_sent, other, action in (message for batch in batches for message in batch):
                pair = (rank, other) if is_sent else (other, rank)
                (sent if is_sent else received).setdefault(pair, []).append(action)
        assert sent == received, (name, len(actions.steps))


def test_no_schedule_of_several_ranks_deadlocks_if_every_message_blocks():
    """Uses the message batches that the engine exchanges at once."""
    for name, actions in schedules_of_several_ranks():
        calls = {
            rank: [
                tuple(
                    CollectiveCall("send" if is_sent else "recv_", (other,), "x", 1, 1)
                    for is_sent, other, _ in batch
                )
                for batch in batches
                if batch
            ]
            for rank, batches in messages(actions)
        }
        assert find_deadlock(calls) is None, (name, len(actions.steps))


def test_an_evaluation_runs_every_pass_once():
    for chunks, micro_batches in ((1, 1), (2, 5), (3, 7)):
        loop = [chunk % 3 for chunk in range(3 * chunks)]
        actions = forward_only(loop, micro_batches)
        done = simulate(actions, [1] * len(loop), [1] * len(loop), [0] * (len(loop) - 1))
        found = {span.action for spans in done.spans for span in spans}
        assert found == {
            PipelineAction("forward", k, c) for k in range(micro_batches) for c in range(len(loop))
        }
