"""A curriculum of growing sequences gives equal losses on every layout. Evaluations use sequences of full
length."""

import dataclasses

import pytest

from megatron.checkpoint.record import TrainingState
from megatron.config.sections.curriculum import LengthCurriculum
from tests.distributed.parity import INTERLEAVED, SEQUENCE_PARALLEL
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
    GLOBAL_BATCH,
    SEQ,
    Row,
    config_of,
    evaluate,
    micro_batches,
    relative_errors,
)
from tests.support.pool import run_world
from tests.support.trainers import make_trainer

LENGTHS = (8, 8, 16, 16, 32, 32)
CURRICULUM = LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(2, 4))
LAYOUTS = {
    "TP 2 x PP 2": (Row(tp=2, pp=2, micro_batch=2), {}),
    "sequence parallel": (Row(tp=2, pp=2, micro_batch=4), SEQUENCE_PARALLEL),
    "PP 4, recomputed": (Row(pp=4, recompute=True), {}),
    "dualpipev": (
        Row(pp=2),
        {"parallel": {"pipeline_schedule": "dualpipev", "partition_method": "stages:E,2,2,0"}},
    ),
    "interleaved": (
        Row(pp=2),
        INTERLEAVED,
    ),
    "DP 2, ZeRO 1": (Row(dp=2, zero=1), {}),
}


def train(row, changes, curriculum=CURRICULUM):
    """Returns (loss, grad norm) of each step, the evaluation losses after steps 1 and 3, the sequence length
    of each step, and the last training state."""
    changes = {**changes, "model": {**DROPOUT, **changes.get("model", {})}}
    config = dataclasses.replace(config_of(row, **changes), curriculum=curriculum)
    trainer = make_trainer(config, steps=len(LENGTHS))
    state, evaluations = TrainingState(), []
    for step in range(len(LENGTHS)):
        state = trainer.step(state)
        if step in (1, 3):
            count = GLOBAL_BATCH // row.micro_batch // row.dp
            evaluations.append(
                (float(evaluate(trainer.engine, micro_batches(trainer.engine, 50), count)), 1.0)
            )
    history = [trainer.metrics.steps[i + 1][:2] for i in range(len(LENGTHS))]
    lengths = [record.seq_length for record in trainer.metrics.records]
    return history, evaluations, lengths, state


@pytest.fixture(scope="module")
def single():
    rows = {positions: Row(positions=positions) for positions in ("absolute", "rotary", "alibi")}
    return {positions: run_world(1, train, row, {})[0] for positions, row in rows.items()}


@pytest.mark.full
def test_tokens_are_those_that_were_read(single):
    _, _, lengths, state = single["absolute"]
    assert tuple(lengths) == LENGTHS
    assert state.consumed_samples == len(LENGTHS) * GLOBAL_BATCH
    assert state.consumed_tokens == sum(LENGTHS) * GLOBAL_BATCH


@pytest.mark.full
def test_short_steps_are_those_of_a_run_with_short_sequences(single):
    short = {"model": {"seq_length": 8}}
    history, _, _, _ = run_world(1, train, Row(), short, dataclasses.replace(CURRICULUM, lengths=(8, 8, 8)))[
        0
    ]
    assert history[:2] == single["absolute"][0][:2]
    assert history[2] != single["absolute"][0][2]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_numbers_of_one_process(name, single):
    row, changes = LAYOUTS[name]
    positions = ["absolute", "rotary", "alibi"][list(LAYOUTS).index(name) % 3]
    row = dataclasses.replace(row, positions=positions)
    for history, evaluations, lengths, state in run_world(row.world_size, train, row, changes):
        expected = single[positions]
        assert max(relative_errors(history, expected[0])) < FP32_BOUND
        assert max(relative_errors(evaluations, expected[1])) < FP32_BOUND
        assert (lengths, state) == expected[2:]
        assert SEQ == lengths[-1]
