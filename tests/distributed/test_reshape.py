"""What one layout saved opens on every other, with the same numbers."""

import pytest

from megatron.checkpoint.manager import find_checkpoint, load_checkpoint, save_checkpoint
from tests.distributed.layouts import (
    EOD,
    FP32_BOUND,
    VOCAB,
    Row,
    build_engine,
    config_of,
    relative_errors,
    train,
)
from tests.distributed.pool import run_world
from tests.distributed.test_resume import FINGERPRINT, state_after

STEPS_BEFORE, STEPS_AFTER = 5, 5
# (TP, PP, DP), ZeRO stage, micro-batch: each saves, and each opens what every other one saved.
SHAPES = {
    "1 process": Row(micro_batch=2),
    "tp2 pp2": Row(tp=2, pp=2, zero=1),
    "pp4 dp2": Row(pp=4, dp=2, zero=1),
    "tp4 dp2": Row(tp=4, dp=2, zero=1, micro_batch=2),
    "tp2 pp2 dp2": Row(tp=2, pp=2, dp=2, micro_batch=2),
}


def save_midway(row, folder, changes):
    engine = build_engine(config_of(row, **changes))
    train(engine, range(STEPS_BEFORE))
    save_checkpoint(engine, folder, state_after(STEPS_BEFORE), VOCAB, EOD, FINGERPRINT)


def resume_midway(row, folder, changes):
    options = {"load": str(folder), **changes.get("checkpoint", {})}
    config = config_of(row, **{**changes, "checkpoint": options})
    checkpoint = find_checkpoint(config, VOCAB, FINGERPRINT)
    engine = build_engine(config)
    train(engine, [9])  # other weights and moments: all must be replaced
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return checkpoint.state, train(engine, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))


def uninterrupted(changes):
    row = Row(micro_batch=2)
    return run_world(1, train_with_changes, row, STEPS_BEFORE + STEPS_AFTER, changes)[0][STEPS_BEFORE:]


def train_with_changes(row, steps, changes):
    return train(build_engine(config_of(row, **changes)), range(steps))


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("saver", SHAPES)
def test_a_checkpoint_opens_on_every_layout(saver, tmp_path):
    """The vocabulary of 101 is padded to 104, 112 and 128 rows on 1, 2 and 4 tensor ranks."""
    changes = {
        "model": {"hidden_dropout": 0.1, "glu_activation": "swiglu", "make_vocab_size_divisible_by": 8}
    }
    expected = uninterrupted(changes)
    run_world(SHAPES[saver].world_size, save_midway, SHAPES[saver], tmp_path, changes)
    for row in SHAPES.values():
        for state, history in run_world(row.world_size, resume_midway, row, tmp_path, changes, timeout=300.0):
            assert state == state_after(STEPS_BEFORE)
            loss_error, norm_error = relative_errors(history, expected)
            assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_the_first_loss_after_a_resume_does_not_depend_on_the_number_of_stages(pipeline, tmp_path):
    """BigScience saw 1.9439 on 12 stages and 2.0429 on 72, for one checkpoint."""
    changes = {"model": {"num_layers": 8}}
    run_world(2, save_midway, Row(tp=2), tmp_path, changes)
    row = Row(pp=pipeline)
    ((_, history), *_) = run_world(row.world_size, resume_midway, row, tmp_path, changes)
    assert history[0][0] == pytest.approx(uninterrupted(changes)[0][0], rel=1e-6)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("before, after", [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")])
def test_a_resume_may_change_the_precision(before, after, tmp_path):
    save_row, row = Row(tp=2, zero=1, precision=before), Row(pp=2, precision=after)
    run_world(2, save_midway, save_row, tmp_path, {})
    ((_, history), *_) = run_world(2, resume_midway, row, tmp_path, {})
    assert relative_errors(history, uninterrupted({}))[0] <= 2e-3


def test_another_kind_of_optimizer_takes_the_weights_and_begins_anew(tmp_path):
    run_world(1, save_midway, Row(), tmp_path, {})
    sgd = {"optimizer": {"optimizer": "sgd", "clip_grad": 1.0}}
    ((_, history),) = run_world(1, resume_midway, Row(), tmp_path, sgd)
    assert history[0] == pytest.approx(uninterrupted({})[0], rel=FP32_BOUND)
