"""Bad data, spikes and non-finite values: every rank and every layout takes equal decisions."""

import math

import pytest
import torch

from megatron.checkpoint.record import TrainingState
from tests.support.layouts import FP32_BOUND, GLOBAL_BATCH, SEQ, Row
from tests.support.layouts import config_of as config_of_row
from tests.support.pool import run_world
from tests.support.trainers import STEPS, make_trainer, outcome

TWO_LAYERS = {"num_layers": 2}
LAYOUTS = [Row(micro_batch=4), Row(tp=2, pp=2, micro_batch=4), Row(dp=2, zero=1, micro_batch=4)]
DUALPIPEV = {"pipeline_schedule": "dualpipev", "partition_method": "stages:E,1,1,0"}
SPIKE = {"spike_window": 4, "spike_grad_norm_factor": 2.0}
BAD = 7


def config_of(row, stability, folder=None, **changes):
    checkpoint = {"save": str(folder), "save_interval": 3} if folder else {}
    return config_of_row(row, model=TWO_LAYERS, stability=stability, checkpoint=checkpoint, **changes)


def train(row, stability, bad=(), folder=None, parallel=None):
    return outcome(make_trainer(config_of(row, stability, folder, parallel=parallel or {}), bad))


def on(row, stability, bad=(), folder=None, parallel=None):
    """Trains on all ranks, and asserts that their outcomes are equal. Returns the outcome."""
    first, *others = run_world(row.world_size, train, row, stability, bad, folder, parallel)
    for other in others:
        assert other == first
    return first


def assert_same_steps(steps, expected, bound=FP32_BOUND):
    assert steps.keys() == expected.keys()
    for iteration, (loss, norm, skipped) in steps.items():
        assert skipped == expected[iteration][2], iteration
        assert loss == pytest.approx(expected[iteration][0], rel=bound), iteration
        assert norm == pytest.approx(expected[iteration][1], rel=bound), iteration


def skip(*ranges):
    return {"skip_train_iteration_range": ranges}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_ranges_are_skipped_with_their_data(row):
    steps, lines, end = on(row, skip("3-4", "6-6", "9-99"))
    assert sorted(steps) == [1, 2, 5, 7, 8]
    assert lines == [
        f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag"
        for first, last in ((3, 4), (6, 6), (9, STEPS))
    ]
    assert end == TrainingState(STEPS, STEPS * GLOBAL_BATCH, STEPS * GLOBAL_BATCH * SEQ, skipped_iterations=5)
    assert_same_steps(steps, run_world(1, left_out, (3, 4, 6, 9, 10))[0])


def left_out(iterations):
    """Returns the steps of an engine that never gets the data of some iterations."""
    from tests.support.layouts import build_engine
    from tests.support.layouts import train as train_engine

    engine = build_engine(config_of(LAYOUTS[0], {}))
    numbers = [i for i in range(1, STEPS + 1) if i not in iterations]
    return {i: (*train_engine(engine, [i - 1])[0], False) for i in numbers}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_a_spikes_update_is_dropped_as_if_its_data_had_been_left_out(row):
    steps, lines, end = on(row, {"spike_policy": "skip", **SPIKE}, (BAD,))
    assert [iteration for iteration, (_, _, skipped) in steps.items() if skipped] == [BAD]
    (line,) = lines
    assert line.startswith(f"iteration {BAD}: spike, ") and "grad norm" in line
    assert line.endswith(": update skipped")
    assert (end.skipped_iterations, end.skips_in_a_row) == (1, 0)
    del steps[BAD]
    assert_same_steps(steps, on(LAYOUTS[0], skip(f"{BAD}-{BAD}"))[0])


@pytest.mark.full
def test_a_warning_changes_nothing():
    row, parallel = Row(pp=2, micro_batch=2), DUALPIPEV
    steps, lines, _ = on(row, {"spike_policy": "warn", **SPIKE}, (BAD,), parallel=parallel)
    assert [line[: len("iteration 7: spike, ")] for line in lines] == [f"iteration {BAD}: spike, "]
    assert (steps, []) == on(row, {}, (BAD,), parallel=parallel)[:2]
    # With DualPipeV the rank of the first and the last stage checks the loss. It must see the loss of one
    # process.
    by_loss = {"spike_policy": "warn", "spike_window": 4, "spike_loss_factor": 1.0001}
    one, v_shaped = on(Row(), by_loss, (BAD,)), on(row, by_loss, (BAD,), parallel=parallel)
    assert one[1] == v_shaped[1] != [] and one[2].recent_losses == pytest.approx(v_shaped[2].recent_losses)


def test_repeated_spikes_stop_the_run():
    bad = (6, 7, 8, 9)
    steps, lines, end = on(Row(micro_batch=4), {"spike_policy": "skip", **SPIKE}, bad)
    assert "iteration 9: spike" in end and "4 consecutive skipped updates" in end
    assert sorted(steps) == list(range(1, 10)) and len(lines) == 3
    few = {"spike_policy": "skip", "max_consecutive_skips": 2, **SPIKE}
    assert "iteration 7: spike" in on(Row(micro_batch=4), few, bad)[2]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_a_rollback_takes_the_newest_checkpoint_and_leaves_out_the_data_since(row, tmp_path):
    policy = {"spike_policy": "rollback", **SPIKE}
    steps, lines, end = on(row, policy, (8,), tmp_path / "spike")
    (line,) = lines
    assert f"rolled back to {tmp_path / 'spike' / 'global_step6'}" in line
    assert line.endswith("; the data of iterations 7 to 8 are skipped")
    expected, _, _ = on(LAYOUTS[0], skip("7-8"))
    del steps[7], steps[8]
    assert_same_steps(steps, expected)
    assert (end.iteration, end.rollbacks, end.skipped_iterations) == (STEPS, 1, 2)
    assert end.consumed_samples == STEPS * GLOBAL_BATCH


def test_rollbacks_are_counted_and_one_without_a_checkpoint_drops_the_update(tmp_path):
    policy = {"spike_policy": "rollback", "max_rollbacks": 1, "spike_window": 2}
    policy |= {"spike_grad_norm_factor": 2.0}
    steps, lines, end = on(Row(micro_batch=4), policy, (3, 5, 8), tmp_path)
    assert lines[0].startswith("iteration 3: spike")
    assert lines[0].endswith("update skipped; no checkpoint exists to roll back to")
    assert "global_step3; the data of iterations 4 to 5 are skipped" in lines[1]
    assert end.startswith("iteration 8: spike")
    assert end.endswith("reached --max-rollbacks 1")
    assert len(lines) == 2 and steps[8][2]


# --- gradients that are not finite ---


def with_nan(row, stability, bad_iterations, precision):
    """Returns the outcome if one rank's gradient of one parameter is NaN in some iterations."""
    trainer = make_trainer(config_of(row, stability, precision=precision))
    engine, state = trainer.engine, {"iteration": 0}
    train_step = engine.train_step

    def counted(*args, **named):
        state["iteration"] += 1
        return train_step(*args, **named)

    engine.train_step = counted
    if engine.mesh.rank == row.world_size - 1:
        weight = dict(engine.module.named_parameters())["4.mlp.dense_h_to_4h.bias"]
        weight.register_hook(lambda g: g * (math.nan if state["iteration"] in bad_iterations else 1.0))
    return outcome(trainer)


@pytest.mark.full
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0}])
def test_steps_that_are_not_finite_are_skipped_up_to_k_in_a_row(precision):
    row = Row(tp=2, pp=2, micro_batch=4)
    for steps, lines, end in run_world(4, with_nan, row, {"max_consecutive_skips": 3}, (2, 3, 5), precision):
        assert [i for i, (_, norm, skipped) in steps.items() if skipped and norm == math.inf] == [2, 3, 5]
        assert end.skipped_iterations == 3 and end.skips_in_a_row == 0
        reported = [
            line for line in lines if "4.mlp.dense_h_to_4h.bias" in line and "rank 3 (stage 1" in line
        ]
        # With fp16 an overflow is reported only if the loss scale cannot be lowered. The second of two
        # overflows halves it.
        assert [line.split(":")[0] for line in reported] == [f"iteration {i}" for i in (2, 3, 5)][
            2 if "fp16" in precision else 0 :
        ]


@pytest.mark.full
def test_the_kth_in_a_row_stops_the_run():
    row = Row(dp=2, micro_batch=4)
    for precision in ({"bf16": True}, {"fp16": True}):
        for steps, _, end in run_world(
            2, with_nan, row, {"max_consecutive_skips": 3}, (2, 3, 5, 6, 7), precision
        ):
            assert sorted(steps) == [1, 2, 3, 4, 5, 6]
            assert end.startswith("iteration 7: the gradient is non-finite, the step was not taken;")
            assert end.endswith("; 3 steps in a row (--max-consecutive-skips)")


# --- parameters that TP ranks replicate ---


def mismatched_and_stepped(row, stability):
    """Returns a norm's weight on this rank before and after a step. Its replica on TP rank 1 differs at
    first."""
    trainer = make_trainer(config_of(row, stability), steps=2)
    engine = trainer.engine
    state = trainer.step(TrainingState())
    (norm,) = [p for p in engine.module.parameters() if engine.optimizer.names[p] == "3.input_layernorm.bias"]
    with torch.no_grad():
        for flat in engine.optimizer.flat:
            for parameter, start, length in flat.fragments():
                if parameter is norm and engine.mesh.tp.rank == 1:
                    flat.master[start : start + length] += 0.5
        engine.optimizer._all_gather_params()
    before = norm.detach().clone()
    trainer.step(state)
    return before, norm.detach().clone(), trainer.metrics.steps


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("zero", [0, 1])
def test_copies_on_tensor_ranks_are_averaged_after_each_step(zero):
    row = Row(tp=2, dp=2, zero=zero, micro_batch=4)
    flag = {"sync_tp_duplicated_parameters": True}
    ranks = run_world(4, mismatched_and_stepped, row, flag)
    for before, after, _ in ranks:
        assert torch.equal(after, ranks[0][1])
        assert not torch.equal(after, before)
    assert not torch.equal(ranks[0][0], ranks[1][0])
    # The average of the replicas moved rank 0's value by half of the difference of 0.5. The two Adam steps
    # change it by less than 0.02.
    assert torch.allclose(ranks[0][1] - ranks[0][0], torch.tensor(0.25), atol=0.02)
    apart = run_world(4, mismatched_and_stepped, row, {})
    assert not torch.equal(apart[0][1], apart[1][1])


@pytest.mark.full
def test_averaging_equal_copies_changes_no_bit():
    row = Row(tp=2, pp=2, zero=1, micro_batch=4)
    assert on(row, {"sync_tp_duplicated_parameters": True}) == on(row, {})
