"""Loss and grad norm of 20 steps are equal on every layout and on one process, which test_model_variants.py
compares with plain PyTorch. These layouts are a covering subset; `benchmarks/parity.py` runs all layouts."""

import pytest

from tests.distributed.parity import SHORT, assert_same_numbers, one_process
from tests.support.golden import BOUND, GOLDEN_ROWS, committed, golden_history
from tests.support.layouts import (
    CLIP,
    DROPOUT,
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    PROCESS_LAYOUTS,
    STEPS,
    Row,
    covering_rows,
    dropout_rows,
    full_matrix,
    low_precision_rows,
    option_pairs,
    relative_errors,
    train_layout,
)
from tests.support.pool import run_world


def test_the_matrix_is_complete_and_its_subset_covers_it():
    matrix, rows = full_matrix(), covering_rows()
    assert len(matrix) == len(set(matrix)) == 408
    assert len(PROCESS_LAYOUTS) == 17 and {(row.tp, row.pp, row.dp) for row in rows} == set(PROCESS_LAYOUTS)
    assert set().union(*map(option_pairs, rows)) == set().union(*map(option_pairs, matrix))


def test_the_reference_run_learns_and_some_of_its_steps_are_clipped():
    history = one_process(Row())
    assert len(history) == STEPS
    assert history[-1][0] < history[0][0] - 0.5
    norms = [norm for _, norm in history]
    assert min(norms) < CLIP < max(norms)


@pytest.mark.gate(rows=1, also=["tp2-pp2-dp2-zero0-micro1-recompute-absolute-fp32"])
@pytest.mark.parametrize("row", covering_rows(), ids=str)
def test_every_layout_has_the_loss_and_the_grad_norm_of_one_process(row):
    assert_same_numbers(row, STEPS)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("row", low_precision_rows(), ids=str)
def test_bf16_and_fp16_follow_the_fp32_loss(row):
    assert_same_numbers(row)


def loss_rows():
    """Returns layouts whose head and loss differ: a sharded vocabulary, or head and embedding on different
    stages."""
    return [
        Row(),
        Row(tp=4, pp=2, micro_batch=2),
        Row(pp=2, dp=2, zero=1, micro_batch=2, recompute=True, positions="alibi"),
        Row(tp=2, pp=2, precision="bf16"),
        Row(tp=2, micro_batch=2, precision="fp16"),
    ]


@pytest.mark.full
@pytest.mark.parametrize("row", loss_rows(), ids=str)
def test_the_plain_loss_trains_as_the_fused_one_does(row):
    plain = {"training": {"loss_implementation": "plain"}}
    fused = run_world(row.world_size, train_layout, row, SHORT)[0]
    for history in run_world(row.world_size, train_layout, row, SHORT, **plain):
        loss_error, norm_error = relative_errors(history, fused)  # equal even in low precision
        assert loss_error <= (FP32_BOUND if row.precision == "fp32" else LOW_PRECISION_BOUND)
        assert norm_error <= (FP32_BOUND if row.precision == "fp32" else 0.05)


@pytest.mark.full
def test_z_loss_does_not_depend_on_the_layout():
    z_loss = {"training": {"z_loss_weight": 0.1}}
    row = Row(tp=2, pp=2, dp=2, zero=1)
    with_z_loss = one_process(row, SHORT, **z_loss)
    assert relative_errors(with_z_loss, one_process(row, SHORT))[0] > 1e-2, "z-loss changed nothing"
    assert_same_numbers(row, numbers=z_loss)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", dropout_rows(), ids=str)
def test_dropout_does_not_depend_on_the_layout(row):
    with_dropout = one_process(row, SHORT, model=DROPOUT)
    assert relative_errors(with_dropout, one_process(row, SHORT))[0] > 1e-3, "dropout changed nothing"
    assert_same_numbers(row, numbers={"model": DROPOUT})


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", GOLDEN_ROWS)
def test_committed_loss_curves_have_not_moved(name):
    loss_error, norm_error = relative_errors(
        golden_history(name), [tuple(step) for step in committed()[name]]
    )
    assert loss_error <= BOUND and norm_error <= BOUND
