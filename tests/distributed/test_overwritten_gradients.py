"""The first micro-batch of a step overwrites the gradient sums, so no value of an earlier step is read."""

from unittest import mock

import pytest
import torch

from megatron.optimizer.flat_group import FlatGroup
from tests.distributed.test_weight_gradient import products_that_add
from tests.support.layouts import Row, build_engine, config_of, train, weights_of
from tests.support.pool import run_world

STEPS = 4
BUCKETS = {"parallel": {"ddp_bucket_size": 1}}
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24}
ROWS = {
    "one process": (Row(precision="bf16"), {}),
    "fp32": (Row(), {}),
    "plain loss": (Row(precision="bf16"), {"training": {"loss_implementation": "plain"}}),
    "ZeRO-1 in buckets": (Row(dp=2, zero=1, precision="bf16"), BUCKETS),
    "ZeRO-2": (Row(dp=2, zero=2, precision="bf16"), {}),
    "ZeRO-3": (Row(dp=2, zero=3, precision="bf16", recompute=True), {}),
    "ZeRO-3, fp32": (Row(dp=2, zero=3), {}),
    "tensor, pipeline": (Row(tp=2, pp=2, precision="bf16", positions="rotary"), {}),
    "zero bubble": (Row(pp=2, precision="bf16"), {"parallel": {"pipeline_schedule": "zero-bubble"}}),
    "tied on one rank, interleaved": (
        Row(pp=2, precision="bf16"),
        {"parallel": {"pipeline_schedule": "dualpipev"}, "model": {"num_layers": 8}},
    ),
    "untied": (Row(pp=2, precision="bf16"), {"model": {"untie_embeddings_and_output_weights": True}}),
    "experts": (Row(dp=2, zero=1, micro_batch=2, precision="bf16"), {"model": EXPERTS}),
    "fp16, with skipped steps": (
        Row(tp=2, micro_batch=2, precision="fp16"),
        {"parallel": {"sequence_parallel": True}, "precision": {"initial_loss_scale": 2.0**25}},
    ),
}


def trained(row, changes, overwrites):
    """Trains with gradient accumulation in the GEMM. Gradients of an earlier step are set to NaN, so that
    reading one is seen in the losses. Returns (losses and grad norms, weights, number of flat groups that
    this step has written)."""
    forget = FlatGroup.forget_gradients

    def forget_and_poison(flat):
        forget(flat)
        if not flat._always_adds:
            fragments = [flat.local_gradients[start:][:length] for _, start, length in flat.fragments()]
            for gradient in fragments if flat.shards_gradients else flat.full_grads:
                gradient.fill_(torch.nan)

    with products_that_add(), mock.patch.object(FlatGroup, "forget_gradients", forget_and_poison):
        engine = build_engine(config_of(row, **changes))
        engine.optimizer.overwrites_gradients = overwrites
        history = train(engine, range(STEPS))
        defined = [flat for flat in engine.optimizer.flat if flat._shard_beta]
    return history, weights_of(engine).shards, len(defined)


@pytest.mark.gate(rows=3, also=["tied on one rank, interleaved"])
@pytest.mark.parametrize("name", ROWS)
def test_a_run_that_overwrites_is_one_that_adds_to_zeros(name):
    row, changes = ROWS[name]
    runs = [run_world(row.world_size, trained, row, changes, overwrites) for overwrites in (False, True)]
    for (history, weights, _), (found, found_weights, defined) in zip(*runs, strict=True):
        assert found == history
        assert weights.keys() == found_weights.keys()
        assert all(torch.equal(found_weights[key], weight) for key, weight in weights.items())
        assert row.precision == "fp32" or not defined
