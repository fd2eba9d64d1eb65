"""Metrics that parts of the model record by name appear in the log line of the first rank."""

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.record import TrainingState
from megatron.mpu.step_metrics import StepMetrics
from tests.support.layouts import Row
from tests.support.layouts import config_of as config_of_row
from tests.support.pool import WorldError, run_world
from tests.support.trainers import make_trainer


def reduced_values():
    """Returns the metrics of two log intervals. In the second interval only rank 1 records values, under one
    name."""
    metrics, rank = StepMetrics(), dist.get_rank()
    metrics.record("outside of a step", 1.0)
    found = []
    with metrics.recording():
        for value in range(3):
            metrics.record("mean", torch.tensor(float(10 * rank + value)))
        if rank == 1:
            metrics.record("largest", 5.0, reduce="max")
            metrics.record("largest", 7.0, reduce="max")
            metrics.record("smallest", torch.tensor(-2, dtype=torch.int64), reduce="min")
        found.append(metrics.collect(torch.device("cpu")))
        if rank == 1:
            metrics.record("largest", -3.0, reduce="max")
        found.append(metrics.collect(torch.device("cpu")))
    return found


def test_values_are_reduced_over_ranks_and_steps():
    for first, second in run_world(2, reduced_values):
        assert first == {"mean": 6.0, "largest": 7.0, "smallest": -2.0}
        assert second == {"largest": -3.0}


def two_reductions():
    metrics = StepMetrics()
    with metrics.recording():
        metrics.record("x", 1.0, reduce="max" if dist.get_rank() else "mean")
    metrics.collect(torch.device("cpu"))


def test_two_reductions_of_a_name_are_an_error_on_every_rank():
    with pytest.raises(WorldError, match="metric 'x' is recorded with two reductions"):
        run_world(2, two_reductions)


def late():
    metrics = StepMetrics()
    with metrics.recording():
        metrics.collect(torch.device("cpu"))
        metrics.record("x", 1.0)
    metrics.collect(torch.device("cpu"))


def test_a_name_that_comes_late_is_an_error():
    with pytest.raises(WorldError, match="metric 'x' was not recorded in the first steps"):
        run_world(1, late)


def trained(config):
    """Returns the values of a metric of all transformer layers, by step."""
    trainer = make_trainer(config, steps=4)
    metrics = trainer.engine.module.metrics

    def record(module, inputs, output):
        metrics.record("layer output", output.norm(dim=-1).mean())

    for layer in trainer.engine.module.transformer_layers().values():
        layer.register_forward_hook(record)
    trainer.train(TrainingState())
    return [step.recorded["layer output"] for step in trainer.metrics.records]


def config_of(row, **training):
    return config_of_row(row, logging={"log_interval": 1}, training=training)


@pytest.mark.parametrize("recomputes", [False, True])
def test_every_layout_records_the_same_mean_also_of_recomputed_layers(recomputes):
    (one,) = run_world(1, trained, config_of(Row(micro_batch=4)))
    assert len(one) == 4 and all(one)
    row = Row(pp=2, dp=2, micro_batch=2)
    for values in run_world(4, trained, config_of(row, checkpoint_activations=recomputes)):
        assert values == pytest.approx(one, rel=1e-5)
