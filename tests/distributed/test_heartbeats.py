"""Heartbeats of the engine, for the watchdog: one per micro-batch, on every stage."""

from megatron.testing.layouts import GLOBAL_BATCH, RATE, Row, build_engine, config_of, micro_batches
from megatron.testing.pool import run_world


def heartbeats():
    engine = build_engine(config_of(Row(pp=2, micro_batch=1)))
    found: list[str] = []
    engine.train_step(micro_batches(engine, 0), 0, GLOBAL_BATCH, RATE, heartbeat=lambda: found.append("step"))
    engine.evaluate(micro_batches(engine, 1), 2, heartbeat=lambda: found.append("evaluation"))
    engine.train_step(micro_batches(engine, 2), GLOBAL_BATCH, GLOBAL_BATCH, RATE)
    return found.count("step"), found.count("evaluation")


def test_every_stage_has_a_heartbeat_per_micro_batch():
    assert run_world(2, heartbeats) == [(GLOBAL_BATCH, 2)] * 2
