"""Compares simulated pipeline schedules with DeepSpeed's instruction streams, formulas and
worked examples."""

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.pipeline.schedule import actions_of, simulate, simulate_schedule
from megatron.pipeline.schedule_actions import (
    PipelineAction,
    ScheduleActions,
    Step,
    dual_pipe_v,
    one_f_one_b,
)
from tests.support.rows import for_each

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 7, 8, 16, 17)]
DUAL_SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (2 * p, 2 * p + 1, 3 * p + 1, 6 * p)]
SENDS = (deepspeed.SendActivation, deepspeed.SendGrad)
RECEIVES = (deepspeed.RecvActivation, deepspeed.RecvGrad)
PASSES = (deepspeed.ForwardPass, deepspeed.BackwardPass)
FORWARDS = (deepspeed.SendActivation, deepspeed.RecvActivation, deepspeed.ForwardPass)


def instructions(schedule, chunk_of_phase):
    """Returns (class, action) of each instruction. The action of a message is the pass whose output or input
    the message carries."""
    seen = Counter()
    for commands in schedule:
        for command in commands:
            kind = type(command)
            if kind is deepspeed.CommitP2P:
                yield kind, None
            elif kind in SENDS + RECEIVES + PASSES:
                chunk = chunk_of_phase[command.kwargs.get("phase", 0)]
                micro_batch = seen[kind, chunk]
                seen[kind, chunk] += 1
                slot = command.buffer_id % schedule.num_micro_batches
                assert slot == micro_batch % schedule.num_pipe_buffers()
                yield kind, PipelineAction("forward" if kind in FORWARDS else "backward", micro_batch, chunk)


def train_stream(stages, micro_batches, stage):
    return list(instructions(deepspeed.TrainSchedule(micro_batches, stages, stage), [stage]))


def dual_stream(ranks, micro_batches, rank):
    schedule = deepspeed.DualPipeVSchedule(micro_batches, ranks, rank)
    return list(instructions(schedule, [rank, 2 * ranks - 1 - rank]))


def named(messages, activation, gradient):
    return [(activation if action.kind == "forward" else gradient, action) for action in messages]


def as_stream(steps):
    """Yields the steps of this program as DeepSpeed's instructions."""
    for step in steps:
        yield from named(step.sends, *SENDS)
        yield from named(step.receives, *RECEIVES)
        yield from named(step.late_sends, *SENDS)
        yield from named(step.actions, *PASSES)


@for_each("stages, micro_batches", SIZES)
def test_1f1b_emits_the_instructions_of_deepspeed(stages, micro_batches):
    actions = one_f_one_b(stages, micro_batches)
    for stage in range(stages):
        assert list(as_stream(actions.steps[stage])) == train_stream(stages, micro_batches, stage)


def committed_groups(stream):
    """Returns (sends, receives, passes) between commits. An exchange without passes is merged with the next
    one."""
    groups, queued, exchanged, passes = [], [], [], []
    for kind, item in stream:
        if kind in PASSES:
            passes.append(item)
        elif kind is deepspeed.CommitP2P:
            if passes:
                groups.append((exchanged, passes))
                exchanged, passes = [], []
            exchanged, queued = exchanged + queued, []
        else:
            queued.append((kind, item))
    groups.append((exchanged, passes))
    assert not queued
    return [
        (
            {item for kind, item in messages if kind in SENDS},
            {item for kind, item in messages if kind in RECEIVES},
            passes,
        )
        for messages, passes in groups
    ]


@for_each("ranks, micro_batches", DUAL_SIZES)
def test_dualpipev_emits_the_exchanges_of_deepspeed(ranks, micro_batches):
    actions = dual_pipe_v(ranks, micro_batches)
    for rank in range(ranks):
        own = [(set(step.sends), set(step.receives), list(step.actions)) for step in actions.steps[rank]]
        assert own == committed_groups(dual_stream(ranks, micro_batches, rank))
        assert not any(step.late_sends for step in actions.steps[rank])


def polled_makespan(streams, forward, backward, transfer):
    """Returns the makespan of DeepSpeed's streams by a reference simulator: it visits the ranks in turn until
    none advances."""
    times = {"forward": forward, "backward": backward}
    towards = {"forward": 1, "backward": -1}
    position, clock, sent, queued = [0] * len(streams), [0] * len(streams), {}, [[] for _ in streams]
    commits = any(kind is deepspeed.CommitP2P for stream in streams for kind, _ in stream)

    def exchange(rank, messages):
        """Returns True after all messages are exchanged. Sends complete at the first attempt."""
        for kind, action in messages:
            if kind in SENDS:
                boundary = min(action.chunk, action.chunk + towards[action.kind])
                target = action._replace(chunk=action.chunk + towards[action.kind])
                sent.setdefault(target, clock[rank] + transfer[boundary])
        awaited = [action for kind, action in messages if kind in RECEIVES]
        if any(action not in sent for action in awaited):
            return False
        clock[rank] = max([clock[rank], *(sent[action] for action in awaited)])
        return True

    moved = True
    while moved:
        moved = False
        for rank, stream in enumerate(streams):
            while position[rank] < len(stream):
                kind, action = stream[position[rank]]
                if kind in PASSES:
                    clock[rank] += times[action.kind][action.chunk]
                elif kind is deepspeed.CommitP2P:
                    if not exchange(rank, queued[rank]):
                        break
                    queued[rank] = []
                elif commits:
                    queued[rank].append((kind, action))
                elif not exchange(rank, [(kind, action)]):
                    break
                position[rank] += 1
                moved = True
    assert position == [len(stream) for stream in streams]
    return max(clock)


@st.composite
def plans(draw, chunks_per_rank, micro_batches_multiple_of_ranks=False):
    """Draws (ranks, micro-batches, forward, backward, transfer), with times in whole seconds."""
    ranks = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(2 * ranks if chunks_per_rank == 2 else 1, 12))
    if micro_batches_multiple_of_ranks:
        micro_batches = ranks * draw(st.integers(1, 4))
    chunks = ranks * chunks_per_rank

    def times(length, least):
        return draw(st.lists(st.integers(least, 5), min_size=length, max_size=length))

    return ranks, micro_batches, times(chunks, 1), times(chunks, 0), times(chunks - 1, 0)


@pytest.mark.parametrize(("name", "stream"), [("1f1b", train_stream), ("dualpipev", dual_stream)])
@given(data=st.data())
@settings(deadline=None)
def test_a_schedule_takes_as_long_as_deepspeeds_stream(name, stream, data):
    ranks, micro_batches, *times = data.draw(plans(chunks_per_rank=1 if name == "1f1b" else 2))
    streams = [stream(ranks, micro_batches, rank) for rank in range(ranks)]
    assert simulate_schedule(name, *times, micro_batches).makespan == polled_makespan(streams, *times)


def check_that_it_could_be(timeline, seconds, transfer, micro_batches):
    """Checks that each pass runs once, alone on its rank, and after its inputs. seconds: kind of pass ->
    seconds."""
    rank_of = {span.action.chunk: rank for rank, spans in enumerate(timeline.spans) for span in spans}
    times = {span.action: span for spans in timeline.spans for span in spans}
    passes = sum(map(len, seconds.values())) * micro_batches
    assert len(times) == sum(map(len, timeline.spans)) == passes
    for spans in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(spans))
    for action, span in times.items():
        assert span.end - span.start == seconds[action.kind][action.chunk]
        if action.kind == "weight":
            assert times[action._replace(kind="backward")].end <= span.start
            continue
        if action.kind == "backward":
            assert times[action._replace(kind="forward")].end <= span.start
        source = action._replace(chunk=action.chunk + (-1 if action.kind == "forward" else 1))
        if source in times:
            message = transfer[min(action.chunk, source.chunk)]
            is_local = rank_of[action.chunk] == rank_of[source.chunk]
            assert times[source].end + (0 if is_local else message) <= span.start


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
@given(data=st.data())
@settings(deadline=None)
def test_a_timeline_breaks_no_rule_and_no_lower_bound(name, data):
    fixed = {"dualpipev": 2, "interleaved": None}.get(name, 1)
    chunks = fixed or data.draw(st.integers(1, 3))
    plan = data.draw(plans(chunks, micro_batches_multiple_of_ranks=name == "interleaved"))
    ranks, micro_batches, forward, backward, transfer = plan
    timeline = simulate_schedule(name, forward, backward, transfer, micro_batches, chunks)
    # In zero-bubble half of the backward pass computes weight gradients by default. No other rank waits for
    # this half.
    weight = [seconds / 2 for seconds in backward] if name == "zero-bubble" else [0] * len(backward)
    rest = [both - part for both, part in zip(backward, weight, strict=True)]
    seconds = {"forward": forward, "backward": rest, "weight": weight if name == "zero-bubble" else []}
    check_that_it_could_be(timeline, seconds, transfer, micro_batches)
    holders = actions_of(name, ranks, micro_batches, chunks).rank_of_chunk
    # The two chunks in the middle of a V share a rank, as do all chunks of a single rank.
    on_the_way = sum(time for time, (a, b) in zip(transfer, pairwise(holders), strict=True) if a != b)
    one_micro_batch = sum(forward) + sum(rest) + weight[0] + 2 * on_the_way
    assert timeline.makespan >= max(one_micro_batch, *timeline.busy)
    assert sum(timeline.busy) == micro_batches * (sum(forward) + sum(backward))
    faster = simulate_schedule(
        name, [Fraction(f, 3) for f in forward], [Fraction(b, 3) for b in backward],
        [Fraction(t, 3) for t in transfer], micro_batches, chunks,
    )  # fmt: skip
    assert faster.makespan == Fraction(timeline.makespan) / 3


@pytest.mark.parametrize("ratio", [0, 1, 2, Fraction(7, 3)])
@for_each("stages, micro_batches", SIZES)
def test_equal_stages_idle_for_the_share_that_the_formula_says(ratio, stages, micro_batches):
    forward, backward = [Fraction(1)] * stages, [Fraction(ratio)] * stages
    timeline = simulate_schedule("1f1b", forward, backward, [0] * (stages - 1), micro_batches)
    assert timeline.bubble_shares == [Fraction(stages - 1, micro_batches + stages - 1)] * stages


@for_each("stages, micro_batches", SIZES)
def test_the_peak_of_in_flight_micro_batches(stages, micro_batches):
    def peak(name):
        return simulate_schedule(
            name, [1] * stages, [2] * stages, [0] * (stages - 1), micro_batches
        ).peak_in_flight

    assert peak("1f1b") == [min(micro_batches, stages - stage) for stage in range(stages)]
    buffers = [
        deepspeed.TrainSchedule(micro_batches, stages, stage).num_pipe_buffers() for stage in range(stages)
    ]
    assert buffers == [max(2, live) for live in peak("1f1b")]


@for_each("ranks, micro_batches", DUAL_SIZES)
def test_dualpipev_keeps_as_many_activations_on_every_rank(ranks, micro_batches):
    """Each activation is for half a stage. Each rank keeps half a stage more than the first rank of 1F1B."""
    chunks = 2 * ranks
    timeline = simulate_schedule("dualpipev", [1] * chunks, [2] * chunks, [0] * (chunks - 1), micro_batches)
    assert timeline.peak_in_flight == [2 * ranks + 1] * ranks


@pytest.mark.parametrize("ratio", [1, 2, 3])
@for_each("ranks, micro_batches", DUAL_SIZES)
def test_dualpipev_idles_less_than_1f1b_with_the_same_layers(ranks, micro_batches, ratio):
    chunks = 2 * ranks
    dual = simulate_schedule(
        "dualpipev", [1] * chunks, [ratio] * chunks, [0] * (chunks - 1), micro_batches
    ).makespan
    single = simulate_schedule(
        "1f1b", [2] * ranks, [2 * ratio] * ranks, [0] * (ranks - 1), micro_batches
    ).makespan
    assert dual < single if ranks > 1 else dual == single


def passes(timeline, rank):
    return [
        (f"{span.action.kind[0].upper()}{span.action.micro_batch}", span.start, span.end)
        for span in timeline.spans[rank]
    ]


def test_unequal_stages_worked_by_hand():
    timeline = simulate_schedule("1f1b", [1, 2], [2, 3], [0], 2)
    assert passes(timeline, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 6, 8), ("B1", 11, 13)]
    assert passes(timeline, 1) == [("F0", 1, 3), ("B0", 3, 6), ("F1", 6, 8), ("B1", 8, 11)]
    assert (timeline.makespan, timeline.busy) == (13, [6, 10])


def test_1f1b_pays_a_transfer_there_and_back_for_each_micro_batch():
    """The first stage sends F1 and F2 after it has the gradients of B0 and B1, as in DeepSpeed's stream."""
    timeline = simulate_schedule("1f1b", [1, 1], [1, 1], [1], 3)
    assert passes(timeline, 0) == [
        ("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 6), ("F2", 6, 7), ("B1", 9, 10), ("B2", 13, 14)
    ]  # fmt: skip
    assert passes(timeline, 1) == [
        ("F0", 2, 3), ("B0", 3, 4), ("F1", 6, 7), ("B1", 7, 8), ("F2", 10, 11), ("B2", 11, 12)
    ]  # fmt: skip


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 3, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_zero_bubble_takes_as_long_as_the_formula_says(times, stages):
    """arXiv 2401.10241, section 2.3: the bubble is (p - 1) (F + B - W), and the largest peak equals
    1F1B's."""
    forward, backward, weight = times
    for micro_batches in (stages, stages + 1, 2 * stages, 5 * stages + 3):
        timeline = simulate_schedule(
            "zero-bubble", [forward] * stages, [backward + weight] * stages, [0] * (stages - 1),
            micro_batches, weight=[weight] * stages,
        )  # fmt: skip
        bubble = (stages - 1) * (forward + backward - weight)
        assert timeline.makespan == micro_batches * sum(times) + bubble
        assert timeline.peak_in_flight == [stages] * stages


@for_each("stages, micro_batches", SIZES)
def test_zero_bubble_does_all_work_and_is_never_longer_than_1f1b(stages, micro_batches):
    arguments = [[2] * stages, [4] * stages, [1] * (stages - 1), micro_batches]
    timeline = simulate_schedule("zero-bubble", *arguments)
    assert timeline.makespan <= simulate_schedule("1f1b", *arguments).makespan
    for stage, spans in enumerate(timeline.spans):
        for kind in ("forward", "backward", "weight"):
            done = [span.action for span in spans if span.action.kind == kind]
            assert done == [PipelineAction(kind, k, stage) for k in range(micro_batches)]


def test_dualpipev_sends_no_message_between_the_two_chunks_of_the_last_rank():
    without = simulate_schedule("dualpipev", [1] * 4, [1] * 4, [1, 0, 1], 6)
    assert simulate_schedule("dualpipev", [1] * 4, [1] * 4, [1, 9, 1], 6) == without


FORWARD, BACKWARD = [[PipelineAction(kind, 0, chunk) for chunk in (0, 1)] for kind in ("forward", "backward")]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param(
            [Step((), (BACKWARD[0],), (), ()), Step((), (), (), (FORWARD[0],))],
            [Step((), (FORWARD[1],), (), (FORWARD[1], BACKWARD[1]))],
            "rank 0 waits forever for the input of the backward pass of micro-batch 0 through chunk 0",
            id="each waits for the other",
        ),
        pytest.param(
            [Step((), (), (), (FORWARD[0],))],
            [Step((), (), (), (FORWARD[1],))],
            "runs the forward pass of micro-batch 0 through chunk 1 before",
            id="nothing received",
        ),
        pytest.param(
            [Step((), (), (), (FORWARD[0],))],
            [Step((), (), (), (BACKWARD[1],))],
            "runs the backward pass of micro-batch 0 through chunk 1 before",
            id="backward first",
        ),
        pytest.param(
            [Step((FORWARD[0],), (), (), (FORWARD[0],))],
            [Step((), (), (), ())],
            "sends the output of the forward pass of micro-batch 0 through chunk 0 too early",
            id="sent first",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_rejected_with_the_pass_at_fault(first, second, words):
    with pytest.raises(ValueError, match=words):
        simulate(ScheduleActions([first, second], [0, 1]), [1, 1], [1, 1], [0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", [1], [1], [], 1), ["2f2b", "1f1b, interleaved, dualpipev, zero-bubble"]),
        (("1f1b", [1, 1], [1], [0], 1), ["2 forward", "1 backward", "1 transfer"]),
        (("1f1b", [1, 1], [1, 1], [], 1), ["2 forward", "0 transfer"]),
        (("1f1b", [], [], [], 1), ["0 forward"]),
        (("1f1b", [1, -1], [1, 1], [0], 1), ["-1 seconds"]),
        (("1f1b", [1, float("nan")], [1, 1], [0], 1), ["nan seconds"]),
        (("1f1b", [0], [0], [], 1), ["all forward and backward times are 0"]),
        (("1f1b", [1], [1], [], 0), ["at least 1 micro-batch", "has 0"]),
        (("dualpipev", [1] * 3, [1] * 3, [0] * 2, 9), ["2 chunks per rank", "3 chunks"]),
        (("dualpipev", [1] * 8, [1] * 8, [0] * 7, 7), ["4 ranks", "8 micro-batches", "has 7", "batch"]),
        (("dualpipev", [1] * 8, [1] * 8, [0] * 7, 9, 4), ["2 chunks per rank", "4 was given"]),
        (("interleaved", [1] * 8, [1] * 8, [0] * 7, 7, 2), ["4 ranks", "multiple of 4", "has 7", "batch"]),
        (("interleaved", [1] * 8, [1] * 8, [0] * 7, 8, 3), ["3 chunks per rank", "8 chunks"]),
        (("interleaved", [1] * 8, [1] * 8, [0] * 7, 8), ["at least 1", "None was given"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_numbers(arguments, words):
    with pytest.raises(ValueError) as error:
        simulate_schedule(*arguments)
    assert all(word in str(error.value) for word in words)


def test_planning_needs_neither_torch_nor_deepspeed():
    code = "import sys, megatron.pipeline.schedule; print({'torch', 'deepspeed'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_weight_pass_comes_after_its_backward_pass():
    passes = [PipelineAction(kind, 0, 0) for kind in ("forward", "weight", "backward")]
    actions = ScheduleActions([[Step((), (), (), (action,)) for action in passes]], [0])
    with pytest.raises(ValueError, match="runs the weight pass of micro-batch 0 through chunk 0 before"):
        simulate(actions, [1], [1], [], [1])


def test_a_weight_pass_is_a_part_of_the_backward_pass():
    with pytest.raises(ValueError, match="longer than the backward pass"):
        simulate_schedule("zero-bubble", [1, 1], [2, 2], [0], 2, weight=[1, 3])
