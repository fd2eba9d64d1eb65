"""A checkpoint of one layout opens on every layout, with equal losses."""

import pytest

from tests.distributed.resharding import SHAPES, STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.support.checkpoints import state_after
from tests.support.layouts import FP32_BOUND, Row, relative_errors
from tests.support.pool import run_world


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("saver", "resumers"),
    [("tp2 pp2", ("1 process", "tp4 dp2")), *((saver, tuple(SHAPES)) for saver in SHAPES)],
    ids=["two others", *SHAPES],
)
def test_a_checkpoint_opens_on_every_layout(saver, resumers, tmp_path):
    """The vocabulary of 101 tokens is padded to 104, 112 and 128 rows on 1, 2 and 4 TP ranks, so the padding
    changes, too."""
    changes = {
        "model": {"hidden_dropout": 0.1, "glu_activation": "swiglu", "make_vocab_size_divisible_by": 8}
    }
    expected = uninterrupted(changes)
    run_world(SHAPES[saver].world_size, save_before, SHAPES[saver], tmp_path, changes)
    for row in (SHAPES[name] for name in resumers):
        for state, history in run_world(row.world_size, resume_midway, row, tmp_path, changes):
            assert state == state_after(STEPS_BEFORE)
            loss_error, norm_error = relative_errors(history, expected)
            assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


INTERLEAVED = {"parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("other", ["1 process", "pp4 dp2", "tp4 dp2"])
def test_interleaved_stages_open_on_other_layouts_and_open_theirs(other, back, tmp_path):
    own = (SHAPES["tp2 pp2"], INTERLEAVED)
    saver, resumer = ((SHAPES[other], {}), own) if back else (own, (SHAPES[other], {}))
    run_world(saver[0].world_size, save_before, saver[0], tmp_path, saver[1])
    row, changes = resumer
    for state, history in run_world(row.world_size, resume_midway, row, tmp_path, changes):
        assert state == state_after(STEPS_BEFORE)
        assert max(relative_errors(history, uninterrupted({}))) <= FP32_BOUND


@pytest.mark.full
@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_the_first_loss_after_a_resume_does_not_depend_on_the_number_of_stages(pipeline, tmp_path):
    """BigScience saw losses of 1.9439 on 12 stages and 2.0429 on 72 stages after resumes from one
    checkpoint."""
    changes = {"model": {"num_layers": 8}}
    run_world(2, save_before, Row(tp=2), tmp_path, changes)
    row = Row(pp=pipeline)
    ((_, history), *_) = run_world(row.world_size, resume_midway, row, tmp_path, changes)
    assert history[0][0] == pytest.approx(uninterrupted(changes)[0][0], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("before, after", [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")])
def test_a_resume_may_change_the_precision(before, after, tmp_path):
    save_row, row = Row(tp=2, zero=1, precision=before), Row(pp=2, precision=after)
    run_world(2, save_before, save_row, tmp_path, {})
    ((_, history), *_) = run_world(2, resume_midway, row, tmp_path, {})
    assert relative_errors(history, uninterrupted({}))[0] <= 2e-3


@pytest.mark.full
def test_another_kind_of_optimizer_loads_the_weights_and_starts_with_new_moments(tmp_path):
    run_world(1, save_before, Row(), tmp_path, {})
    sgd = {"optimizer": {"optimizer": "sgd", "clip_grad": 1.0}}
    ((_, history),) = run_world(1, resume_midway, Row(), tmp_path, sgd)
    assert history[0] == pytest.approx(uninterrupted({})[0], rel=FP32_BOUND)
