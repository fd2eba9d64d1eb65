"""The zero-bubble schedule has the losses, gradients and norms of 1F1B to the last bit."""

import pytest
import torch

from tests.distributed.parity import SEQUENCE_PARALLEL
from tests.distributed.test_model_variants import LLAMA
from tests.support.layouts import DROPOUT, Row, build_engine, config_of, train, weights_of
from tests.support.pool import run_world

STEPS = 3
ONE_BUCKET_PER_LAYER = {"ddp_bucket_size": 1}
# Name -> (row, changes of its configuration). The order matters: the gate runs evenly spaced rows.
ROWS = {
    "two stages": (Row(pp=2), {}),
    "four stages, dropout": (
        Row(pp=4, positions="rotary"),
        {"model": DROPOUT},
    ),
    "tensor": (Row(tp=2, pp=2), {}),
    "sequence": (Row(tp=2, pp=2), SEQUENCE_PARALLEL),
    "fp16, fewer micro-batches than stages": (Row(pp=4, micro_batch=4, precision="fp16"), {}),
    "data, ZeRO-1 in buckets, bf16": (
        Row(pp=2, dp=2, zero=1, precision="bf16"),
        {"parallel": ONE_BUCKET_PER_LAYER},
    ),
    "data, ZeRO-1 in buckets": (Row(pp=2, dp=2, zero=1), {"parallel": ONE_BUCKET_PER_LAYER}),
    "untied llama": (Row(pp=4, positions="rotary"), {"model": LLAMA}),
    "recomputed": (Row(pp=2, recompute=True), {}),
    "recomputed, tensor, four stages, bf16": (Row(tp=2, pp=4, recompute=True, precision="bf16"), {}),
    "recomputed, sequence, bf16": (
        Row(tp=2, pp=2, recompute=True, precision="bf16"),
        {"parallel": {"sequence_parallel": True}, "model": LLAMA},
    ),
    "recomputed by DeepSpeed": (
        Row(tp=2, pp=2, recompute=True),
        {"training": {"checkpoint_activations": True, "partition_activations": True}},
    ),
    "recomputed, sequence, ZeRO-1": (
        Row(tp=2, pp=2, dp=2, zero=1, recompute=True),
        {"parallel": {"sequence_parallel": True, **ONE_BUCKET_PER_LAYER}},
    ),
    "plain loss": (Row(pp=2), {"training": {"loss_implementation": "plain"}}),
    "parallel layers": (Row(tp=2, pp=2), {"model": {"layer_arrangement": "parallel"}}),
}


def trained(row, schedule, changes):
    """Returns (losses and norms, accumulated gradients, weights) of a rank."""
    changes = {**changes, "parallel": {**changes.get("parallel", {}), "pipeline_schedule": schedule}}
    engine = build_engine(config_of(row, **changes))
    deferred, added = engine.module.deferred_gradients, []
    if deferred is not None:
        add = deferred.add
        deferred.add = lambda *gradient: (added.append(1), add(*gradient))
    history = train(engine, range(STEPS))
    if deferred is not None:
        assert not deferred.take()
        matrices = 4 * len(engine.module.transformer_layers())
        assert len(added) == matrices * engine.micro_batches * STEPS
    gradients = [flat.local_gradients.clone() for flat in engine.optimizer.flat]
    return history, gradients, weights_of(engine).shards


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", ROWS)
def test_it_trains_as_1f1b_to_the_last_bit(name):
    row, changes = ROWS[name]
    expected, found = (run_world(row.world_size, trained, row, s, changes) for s in ("1f1b", "zero-bubble"))
    for (history, gradients, weights), (other_history, other_gradients, other_weights) in zip(
        expected, found, strict=True
    ):
        assert history == other_history
        assert all(map(torch.equal, gradients, other_gradients))
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weight, other_weights[key]) for key, weight in weights.items())
