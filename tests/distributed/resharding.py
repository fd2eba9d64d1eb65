"""A run of ten steps: it saves after five steps on one layout and continues on a different layout. The
reference is an uninterrupted run."""

from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from tests.support.checkpoints import FINGERPRINT, save_midway
from tests.support.layouts import (
    Row,
    build_engine,
    config_of,
    train,
    train_layout,
    unconnected_run,
)
from tests.support.pool import run_world

STEPS_BEFORE, STEPS_AFTER = 5, 5
# Layouts by name. Each layout saves a checkpoint, and each layout loads the checkpoints of all layouts.
SHAPES = {
    "tp2 pp2": Row(tp=2, pp=2, zero=1, micro_batch=2),
    "1 process": Row(micro_batch=2),
    "pp4 dp2": Row(pp=4, dp=2, zero=1),
    "tp4 dp2": Row(tp=4, dp=2, zero=1, micro_batch=2),
    "tp2 pp2 dp2": Row(tp=2, pp=2, dp=2, micro_batch=2),
}


def save_before(row, folder, changes):
    save_midway(row, folder, STEPS_BEFORE, **changes)


def resume_midway(row, folder, changes):
    options = {"load": str(folder), **changes.get("checkpoint", {})}
    config = config_of(row, **{**changes, "checkpoint": options})
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    train(engine, [9])  # other weights and moments: the load must replace all
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    return checkpoint.state, train(engine, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))


_histories = {}


def uninterrupted(changes):
    key = str(changes)
    if key not in _histories:
        row = Row(micro_batch=2)
        _histories[key] = run_world(1, train_layout, row, STEPS_BEFORE + STEPS_AFTER, **changes)[0]
    return _histories[key][STEPS_BEFORE:]
