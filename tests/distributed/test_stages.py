"""Stages with any layers, and several stages per rank, train, evaluate and resume with the losses of one
process."""

from functools import cache
from itertools import pairwise

import pytest
import torch.distributed as dist

from megatron.data.loader import MicroBatch
from megatron.errors import UserError
from megatron.mpu.mesh import Mesh
from tests.support.layouts import (
    EOD,
    FP32_BOUND,
    GLOBAL_BATCH,
    VOCAB,
    Row,
    build_engine,
    config_of,
    evaluate,
    relative_errors,
    sample_tokens,
    train,
)
from tests.support.pool import run_world

STEPS = 5
# Partition methods for four transformer layers, by the special property of their stages.
STAGES = {
    "embedding alone, head alone": (4, "weighted_type:embed:2|transformer:1"),
    "final norm and head, one layer each": (6, "stages:E,1,1,1,1,L"),
    "final norm alone": (3, "type:embed@first:.1|transformer|norm:4|embed@last:4"),
    "an empty stage in the middle": (4, "stages:2,0,2,0"),
    "empty stages beside the ends": (4, "stages:E,0,4,0"),
    "everything on the last stage": (3, "stages:0,0,4"),
    "everything on the first stage but the head": (3, "layout:Etttt||L"),
    "memory": (3, "memory"),
    "time": (3, "time"),
    "parameters": (3, "parameters"),
}
V_STAGES = {
    "as it comes": (2, "type:transformer"),
    "embedding and head alone": (2, "stages:E,2,2,0"),
    "empty stages": (2, "stages:0,4,0,0"),
    "by memory": (2, "memory"),
    "one layer each": (2, "layout:Et|t|t|tL"),
    "four ranks": (4, "stages:E,1,0,1,1,0,1,0"),
}
LOOP_STAGES = {**V_STAGES, "three stages per rank": (2, "layout:E|t|t|t|t|L")}
ZERO_BUBBLE = ("an empty stage in the middle", "embedding alone, head alone", "everything on the last stage")


def parallel_settings(schedule, method):
    """Returns the flags of a schedule."""
    settings = {"pipeline_schedule": schedule, "partition_method": method}
    if schedule == "interleaved":
        per_rank = 3 if method == "layout:E|t|t|t|t|L" else 2
        settings |= {"virtual_pipeline_stages": per_rank, "ddp_bucket_size": 1}  # ZeRO-1: a bucket per layer
    return settings


# (Schedule, name of the stages) -> (ranks, flags). The order matters: the gate runs evenly spaced rows.
CASES = {
    f"{schedule}: {name}": (ranks, parallel_settings(schedule, method))
    for schedule, table in {
        "dualpipev": V_STAGES,
        "1f1b": STAGES,
        "interleaved": LOOP_STAGES,
        "zero-bubble": {name: STAGES[name] for name in ZERO_BUBBLE},
    }.items()
    for name, (ranks, method) in table.items()
}


def evaluation(engine, num_micro_batches):
    """Returns the mean loss of `num_micro_batches` micro-batches of one sample. No training step has this
    number of micro-batches."""
    data, rank = engine.mesh.dp_size, engine.mesh.dp.rank
    tokens = sample_tokens(9000, num_micro_batches)

    def micro_batches():
        for sample in range(rank, num_micro_batches, data):
            yield MicroBatch.from_rows(tokens[sample : sample + 1], sample)

    return evaluate(engine, micro_batches(), num_micro_batches // data).item()


def train_and_evaluate(row, parallel, clip, dropout):
    config = config_of(
        row,
        parallel=parallel,
        optimizer={"clip_grad": clip},
        model={"hidden_dropout": dropout, "attention_dropout": dropout},
    )
    engine = build_engine(config)
    history = train(engine, range(STEPS))
    losses = [evaluation(engine, number) for number in (16, GLOBAL_BATCH)]
    return history + train(engine, [STEPS]), losses


@cache
def reference(clip, dropout):
    return run_world(1, train_and_evaluate, Row(micro_batch=4), {}, clip, dropout)[0]


def check(row, parallel, clip=1.0, dropout=0.0):
    expected_history, expected_losses = reference(clip, dropout)
    exact = row.precision == "fp32"
    for history, losses in run_world(row.world_size, train_and_evaluate, row, parallel, clip, dropout):
        loss_error, norm_error = relative_errors(history, expected_history)
        assert loss_error <= (FP32_BOUND if exact else 2e-3)
        assert norm_error <= (FP32_BOUND if exact else 2e-2)
        assert losses == pytest.approx(expected_losses, rel=FP32_BOUND if exact else 2e-3)


@pytest.mark.gate(rows=4, also=["1f1b: embedding alone, head alone-1"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_stages_of_any_content_train_as_one_process_does(case, zero):
    ranks, parallel = CASES[case]
    # DualPipeV on 4 ranks needs 8 micro-batches, which are the whole batch.
    replicas = 1 if ranks > 4 or case == "dualpipev: four ranks" else 2
    check(Row(pp=ranks, dp=replicas, zero=zero), parallel, dropout=0.1)


def mixtures():
    """Returns (row, flags, clipping) for schedules and stages together with every feature that affects a
    pipeline."""
    for name in ("embedding alone, head alone", "empty stages beside the ends"):
        for precision in ("fp32", "fp16"):
            pipeline, method = STAGES[name]
            row = Row(tp=2, pp=pipeline, recompute=True, precision=precision)
            yield row, {"partition_method": method}, 1.0
    for name in ("embedding alone, head alone", "an empty stage in the middle", "final norm alone"):
        for precision in ("bf16", "fp16"):
            pipeline, method = STAGES[name]
            row = Row(pp=pipeline, dp=2, zero=1, recompute=True, precision=precision)
            yield row, {"partition_method": method}, 0.0
    for schedule in ("dualpipev", "interleaved"):
        for row in (
            Row(tp=2, pp=2, dp=2, zero=1, recompute=True),
            Row(pp=2, dp=2, zero=1, precision="bf16", recompute=True),
            Row(tp=2, pp=2, precision="fp16"),
        ):
            yield row, parallel_settings(schedule, "type:transformer"), 1.0
    yield Row(tp=2, pp=4), parallel_settings("interleaved", "layout:E|t||t|t||t|L"), 1.0
    _, method = STAGES["embedding alone, head alone"]
    yield Row(pp=4, dp=2, precision="bf16"), {"partition_method": method}, 1.0


@pytest.mark.full
@pytest.mark.parametrize("row, parallel, clip", mixtures(), ids=str)
def test_stages_with_all_that_goes_with_a_pipeline(row, parallel, clip):
    check(row, parallel, clip)


def times_and_bounds(row, parallel, changes):
    from megatron.pipeline.layer_times import find_layer_times
    from megatron.pipeline.stages import plan_stages

    config = config_of(row, parallel={"partition_method": "profile", **parallel}, **changes)
    mesh = Mesh.create(row.world_size, row.tp, row.pp, dist.get_rank())
    times = find_layer_times(config, mesh.connect(), VOCAB, EOD)
    return times, plan_stages(config, VOCAB, times).bounds


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_all_ranks_partition_by_the_same_measured_times(schedule):
    """Covers document ids, which are sent along with the hidden states, recomputation, and unfused
    attention."""
    changes = {"data": {"reset_attention_mask": True}, "model": {"attention_dropout": 0.1}}
    row = Row(tp=2, pp=2, dp=2, recompute=True, precision="bf16")
    found = run_world(row.world_size, times_and_bounds, row, {"pipeline_schedule": schedule}, changes)
    assert all(rank == found[0] for rank in found)
    times, bounds = found[0]
    assert set(times) >= {"EmbeddingPipe@first", "EmbeddingPipe@last", "ParallelTransformerLayerPipe"}
    # The fused loss leaves no work to the layer float16_to_fp32.
    assert all(value > 0 for kind, value in times.items() if kind != "float16_to_fp32")
    assert all(first < last for first, last in pairwise(bounds))


def stages_by_memory(parallel, problem):
    """Returns (number of the planner's calls on this rank, this rank's stages or the error)."""
    from megatron.cluster.exit_codes import SharedUserError
    from megatron.data.vocabulary import Vocabulary
    from megatron.planner.layer_memory import memory_costs
    from megatron.run import Run
    from megatron.training.build import find_stages

    row = Row(tp=2, pp=2)
    config = config_of(row, parallel={"partition_method": "memory", **parallel})
    calls = []

    def counted(*args):
        calls.append(args)
        if problem:
            raise UserError(problem)
        return memory_costs(*args)

    run = Run.from_config(config, Vocabulary(VOCAB, EOD), measures=True)
    try:
        end = find_stages(run.connected(dist.get_rank()), counted).stages.partition
    except SharedUserError as error:
        end = str(error)
    return len(calls), end


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_all_ranks_partition_by_the_memory_that_rank_0_finds(schedule):
    from megatron.planner.layer_memory import planned_run

    parallel = {"pipeline_schedule": schedule}
    config = config_of(Row(tp=2, pp=2), parallel={"partition_method": "memory", **parallel})
    planned = planned_run(config, VOCAB).stages.partition
    found = run_world(4, stages_by_memory, parallel, None)
    assert found == [(int(rank == 0), planned) for rank in range(4)]


@pytest.mark.parametrize(
    ("parallel", "problem", "expected"),
    [
        ({}, "the layers cannot be measured", "the layers cannot be measured"),
        ({"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 8}, None, "and 16 stages (8 x"),
    ],
    ids=["rank 0 finds no memory", "too few layers"],
)
def test_an_error_of_the_partition_by_memory_ends_all_ranks(parallel, problem, expected):
    for rank, (calls, end) in enumerate(run_world(4, stages_by_memory, parallel, problem)):
        assert calls == (rank == 0) and expected in end
