"""Same numbers on every layout: loss and grad norm of 20 steps against the single-process run, and that run
against a GPT in plain PyTorch. A covering subset; `benchmarks/parity.py` runs all layouts."""

from functools import cache

import pytest

from tests.reference.plain_gpt import train_plain_gpt
from tests.support.golden import BOUND, DROPOUT, GOLDEN_ROWS, committed, golden_history
from tests.support.layouts import (
    CLIP,
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    PROCESS_LAYOUTS,
    RATE,
    STEPS,
    VOCAB,
    Row,
    build_engine,
    config_of,
    covering_rows,
    dropout_rows,
    full_matrix,
    global_batch,
    low_precision_rows,
    option_pairs,
    relative_errors,
    train,
    train_layout,
)
from tests.support.pool import run_world

# On a busy machine the many small messages of 4 TP ranks wait for a core each.
SHORT = 10


@cache
def reference(row):
    """The single-process fp32 history, dropout 0."""
    return run_world(1, train_layout, row)[0]


def test_the_matrix_is_complete_and_its_subset_covers_it():
    matrix, rows = full_matrix(), covering_rows()
    assert len(matrix) == len(set(matrix)) == 408
    assert len(PROCESS_LAYOUTS) == 17 and {(row.tp, row.pp, row.dp) for row in rows} == set(PROCESS_LAYOUTS)
    assert set().union(*map(option_pairs, rows)) == set().union(*map(option_pairs, matrix))


def test_the_reference_run_learns_and_some_of_its_steps_are_clipped():
    history = reference(Row())
    assert len(history) == STEPS
    assert history[-1][0] < history[0][0] - 0.5
    norms = [norm for _, norm in history]
    assert min(norms) < CLIP < max(norms)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("row", covering_rows(), ids=str)
def test_every_layout_has_the_loss_and_the_grad_norm_of_one_process(row):
    for history in run_world(row.world_size, train_layout, row):
        loss_error, norm_error = relative_errors(history, reference(row.reference))
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("row", low_precision_rows(), ids=str)
def test_bf16_and_fp16_follow_the_fp32_loss(row):
    for history in run_world(row.world_size, train_layout, row, SHORT):
        loss_error, norm_error = relative_errors(history, reference(row.reference)[:SHORT])
        assert 0 < loss_error <= LOW_PRECISION_BOUND
        assert norm_error < 0.05, "a wrong scale, which Adam would forgive"


def loss_rows():
    """Layouts whose head and loss differ: a sharded vocabulary, head and embedding on different stages."""
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
        loss_error, norm_error = relative_errors(history, fused)
        exact = row.precision == "fp32"
        assert loss_error <= (FP32_BOUND if exact else LOW_PRECISION_BOUND)
        assert norm_error <= (FP32_BOUND if exact else 0.05)


@pytest.mark.full
@pytest.mark.parametrize("row", [Row(tp=2, pp=2, dp=2, zero=1)], ids=str)
def test_z_loss_does_not_depend_on_the_layout(row):
    z_loss = {"training": {"z_loss_weight": 0.1}}
    expected = run_world(1, train_layout, Row(), SHORT, **z_loss)[0]
    assert relative_errors(expected, reference(row.reference)[:SHORT])[0] > 1e-2, "z-loss changed nothing"
    for history in run_world(row.world_size, train_layout, row, SHORT, **z_loss):
        assert max(relative_errors(history, expected)) <= FP32_BOUND


@cache
def dropout_reference(row):
    """The single-process fp32 history with dropout."""
    return run_world(1, train_layout, row, SHORT, model=DROPOUT)[0]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", dropout_rows(), ids=str)
def test_dropout_does_not_depend_on_the_layout(row):
    expected = dropout_reference(row.reference)
    assert relative_errors(expected, reference(row.reference)[:SHORT])[0] > 1e-3, "dropout changed nothing"
    for history in run_world(row.world_size, train_layout, row, SHORT, model=DROPOUT):
        loss_error, norm_error = relative_errors(history, expected)
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


def initial_weights_and_history(row, changes):
    engine = build_engine(config_of(row, **changes))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return weights, train(engine, range(STEPS))


PLAIN_CASES = {
    "absolute": ("absolute", {}),
    "rotary": ("rotary", {}),
    "alibi": ("alibi", {}),
    "embed-layernorm": ("alibi", {"embed_layernorm": True}),
    **{glu: ("absolute", {"glu_activation": glu}) for glu in ("geglu", "liglu", "reglu", "swiglu")},
}


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("case", PLAIN_CASES)
def test_one_process_trains_as_a_gpt_in_plain_pytorch_does(case):
    positions, model = PLAIN_CASES[case]
    ((weights, history),) = run_world(
        1, initial_weights_and_history, Row(positions=positions), {"model": model}
    )
    plain = train_plain_gpt(
        weights,
        [global_batch(step) for step in range(STEPS)],
        lr=RATE,
        vocab=VOCAB,
        clip=CLIP,
        layers=4,
        heads=4,
        positions=positions,
        embed_norm=model.get("embed_layernorm", False),
        glu=model.get("glu_activation"),
    )
    loss_error, norm_error = relative_errors(history, plain)
    assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", GOLDEN_ROWS)
def test_committed_loss_curves_have_not_moved(name):
    loss_error, norm_error = relative_errors(
        golden_history(name), [tuple(step) for step in committed()[name]]
    )
    assert loss_error <= BOUND and norm_error <= BOUND
