"""All ranks collect garbage after the same steps, and steps leave no tensors in reference cycles."""

import gc
import weakref

import pytest
import torch

from megatron.checkpoint.record import TrainingState
from megatron.engine.pipeline_engine import GPTEngine
from megatron.training.garbage import collections_after_steps
from tests.distributed.parity import DUALPIPEV
from tests.support.layouts import Row, config_of, train_layout
from tests.support.pool import run_world
from tests.support.trainers import make_trainer


class Node:
    """An object with a reference to itself: only the garbage collector frees it."""

    def __init__(self):
        self.itself = self


def test_garbage_is_freed_after_some_steps_only():
    was_enabled, freed = gc.isenabled(), []
    with collections_after_steps() as after_step:
        for step in range(1, 251):
            weakref.finalize(Node(), freed.append, step)
            [[] for _ in range(5_000)]  # enough objects for an automatic collection
            after_step(step)
            last_collection = max(collected for collected in (0, 2, 100, 200) if collected <= step)
            assert freed == list(range(1, last_collection + 1))
        assert gc.get_freeze_count() > 10_000
    assert gc.isenabled() == was_enabled and gc.get_freeze_count() == 0


def collections_of_training():
    """Returns the steps of the training loop after which the garbage collector runs."""
    trainer = make_trainer(config_of(Row()))
    steps = []

    def record(phase, info):
        steps.append((phase, trainer.updates.num_steps))

    gc.callbacks.append(record)
    trainer.train(TrainingState())
    gc.callbacks.remove(record)
    return steps


def test_the_training_loop_collects_after_its_second_step():
    assert run_world(1, collections_of_training) == [[("start", 2), ("stop", 2)]]


def cyclic_tensors(row, changes):
    """Returns how many tensors each step after the second leaves in reference cycles."""
    counts, train_step = [], GPTEngine.train_step

    def counting(engine, *args, **kwargs):
        loss = train_step(engine, *args, **kwargs)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        counts.append(sum(isinstance(found, torch.Tensor) for found in gc.garbage))
        gc.set_debug(0)
        gc.garbage.clear()
        return loss

    GPTEngine.train_step = counting
    try:
        train_layout(row, 4, **changes)
    finally:
        GPTEngine.train_step = train_step
    return counts[2:]


ROWS = [
    (Row(pp=2, tp=2, micro_batch=4, recompute=True, precision="bf16"), {}),
    (Row(dp=2, zero=3, cp=2, micro_batch=2, positions="rotary"), {}),
    (Row(pp=2, dp=2, zero=1), DUALPIPEV),
]


@pytest.mark.parametrize("row, changes", ROWS)
def test_no_step_leaves_tensors_to_the_collector(row, changes):
    for counts in run_world(row.world_size, cyclic_tensors, row, changes):
        assert counts == [0, 0]
