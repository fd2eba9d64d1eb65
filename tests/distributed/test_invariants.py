"""A mismatch of replicas is reported with its parameter and ranks. Equal replicas are not reported."""

import math

import pytest
import torch

from megatron.cluster.exit_codes import RunStopped
from megatron.training.stability import find_invariant_violation
from tests.support.layouts import Row, config_of
from tests.support.layouts import train as train_engine
from tests.support.pool import run_world
from tests.support.trainers import make_trainer

TWO_LAYERS = {"num_layers": 2}
NORM = "3.input_layernorm.weight"
MATRIX = "4.mlp.dense_h_to_4h.weight"
EMBEDDING = "tied_modules.embed.word_embeddings.weight"


def change(engine, name, kind, value):
    """Sets the first element of a parameter's weights, fp32 values or moment that this rank owns. In fp32 the
    weights are views of the master weights."""
    optimizer = engine.optimizer
    for flat in optimizer.flat:
        for parameter in flat.parameters:
            if optimizer.names[parameter] != name:
                continue
            if kind == "weights":
                parameter.data.view(-1)[0] = value
            elif fragment := flat.fragment(parameter):
                moments = {"fp32": flat.master.data, **optimizer.moments_of(flat)}
                moments[kind][fragment[0]] = value


def findings(row, changes, precision):
    """Returns the findings before and after one rank's state is changed. changes: (rank, name, kind,
    value)."""
    engine = make_trainer(config_of(row, model=TWO_LAYERS, precision=precision)).engine
    train_engine(engine, [0, 1])
    before = find_invariant_violation(engine.optimizer, engine.mesh)
    rank, name, kind, value = changes
    if engine.mesh.rank == rank:
        with torch.no_grad():
            change(engine, name, kind, value)
    return before, find_invariant_violation(engine.optimizer, engine.mesh)


EVERYTHING = Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2)
BF16 = {"bf16": True}
# Name -> (layout, (rank, parameter, kind, value) of the change, precision, words of the report).
MISMATCHES = {
    "a norm on a TP rank": (Row(tp=2), (1, NORM, "fp32", 0.5), BF16, "rank 1 differs"),
    "its moment": (Row(tp=2), (1, NORM, "exp_avg", 0.5), {}, "rank 1 differs from rank 0"),
    "a replica's weight": (Row(dp=4), (2, MATRIX, "weights", 0.5), BF16, "rank 2 differs from ranks 0-1, 3"),
    "a replica's moment": (Row(dp=2), (1, MATRIX, "exp_avg_sq", 0.5), {}, "rank 1"),
    "a tied copy": (Row(pp=2), (1, EMBEDDING, "weights", 0.5), BF16, "rank 1 differs from rank 0"),
    "one of many": (EVERYTHING, (6, EMBEDDING, "weights", 0.5), BF16, "rank 6 differs from ranks 0, 2, 4"),
    "a moment that two ranks hold parts of": (
        Row(pp=2, dp=2, zero=1),
        *((0, EMBEDDING, "exp_avg", 0.5), BF16, "ranks 2-3 differs from ranks 0-1"),
    ),
    "a non-finite value of equal replicas": (Row(pp=2), (1, MATRIX, "exp_avg", math.nan), {}, "rank 1"),
    "a moment that exists only once": (Row(dp=2, zero=3), (0, NORM, "exp_avg", 0.25), BF16, None),
}


@pytest.mark.gate(rows=5, also=["one of many", "a non-finite value of equal replicas"])
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatched_replica_is_named_on_every_rank(case):
    row, changes, precision, place = MISMATCHES[case]
    _, name, kind, value = changes
    part = f"{kind} of {name} on {place}"
    for before, after in run_world(row.world_size, findings, row, changes, precision):
        assert before is None
        if place is None or math.isnan(value):
            assert after == (None if place is None else f"non-finite: {part}")
        else:
            assert after.startswith("replicas differ: ") and part in after


def stopped(row, changes):
    trainer = make_trainer(
        config_of(row, model=TWO_LAYERS, stability={"check_invariants_interval": 2}, parallel=changes),
        steps=4,
    )
    step = trainer.step

    def drifting(state):
        state = step(state)
        if state.iteration == 3 and trainer.engine.mesh.rank == 1:
            change(trainer.engine, NORM, "fp32", 0.5)
        return state

    trainer.step = drifting
    from megatron.checkpoint.record import TrainingState

    with pytest.raises(RunStopped) as caught:
        trainer.train(TrainingState())
    return str(caught.value)


def test_a_run_looks_every_n_steps_and_stops():
    for sentence in run_world(2, stopped, Row(tp=2), {"sequence_parallel": True}):
        assert sentence.startswith("iteration 4: replicas differ: ") and NORM in sentence
        assert "Resume from an earlier checkpoint" in sentence
