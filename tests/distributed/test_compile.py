"""--compile changes how transformer layers are computed, and no number beyond rounding."""

from functools import partial

import pytest
import torch

from megatron.model.gpt_model import ParallelTransformerLayerPipe
from tests.distributed.test_weight_gradient import products_that_add
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    Row,
    build_engine,
    config_of,
    evaluate,
    micro_batches,
    relative_errors,
    train,
)
from tests.support.pool import run_world

STEPS = 4


def history_of(row, changes, compiles):
    """Losses and grad norms of some steps, the loss of an evaluation, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = {**changes.get("training", {}), "compile": compiles}
    # One process compiles as fast as several for layers this small, and leaves none behind.
    with torch._inductor.config.patch(compile_threads=1):
        engine = build_engine(config_of(row, **{**changes, "training": training}))
        history = train(engine, range(STEPS))
        evaluated = evaluate(engine, micro_batches(engine, 0), engine.micro_batches).item()
    names = {name for name, _ in engine.module.named_parameters()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    layers = sum(isinstance(module, ParallelTransformerLayerPipe) for module in engine.module.modules())
    return [*history, (evaluated, 1.0)], graphs, names, layers


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (Row(micro_batch=4), {"model": {"num_layers": 12}}),
        (Row(pp=2, micro_batch=2, recompute=True, positions="rotary"), {"model": DROPOUT}),
        (Row(tp=2, micro_batch=2, positions="alibi"), {"data": {"reset_attention_mask": True}}),
        (
            Row(tp=2, micro_batch=2, recompute=True),
            {"parallel": {"sequence_parallel": True}, "model": {"glu_activation": "swiglu"}},
        ),
        (Row(tp=2, micro_batch=4, recompute=True), {"training": {"partition_activations": True}}),
        (Row(dp=2, micro_batch=2, zero=3), {}),
        (Row(pp=2, micro_batch=2), {"parallel": {"pipeline_schedule": "zero-bubble"}, "model": DROPOUT}),
        (
            Row(tp=2, micro_batch=2, recompute=True, positions="rotary"),
            {
                "model": {
                    "group_query_attention": True,
                    "normalization": "RMSNorm",
                    "glu_activation": "swiglu",
                }
            },
        ),
    ],
    ids=str,
)
def test_compiled_layers_give_the_numbers_of_eager_ones(row, changes):
    eager = run_world(row.world_size, history_of, row, changes, False)
    compiled = run_world(row.world_size, history_of, row, changes, True)
    for (expected, none, names, layers), (found, graphs, names_compiled, _) in zip(
        eager, compiled, strict=True
    ):
        assert max(relative_errors(found, expected)) < FP32_BOUND
        assert none == 0 < graphs
        assert names == names_compiled
        # Training and evaluation, and not one graph per layer: PyTorch gives up after eight.
        if row.world_size == 1:
            assert graphs < layers


def breaks_and_products(row, changes, compiles):
    """History of some steps with products that add, and how many added; breaks of the graphs, and the hooks
    that buckets count gradients with."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    changes = {**changes, "training": {**changes.get("training", {}), "compile": compiles}}
    original = torch.compile
    with products_that_add() as shapes, pytest.MonkeyPatch.context() as patch:
        # Autograd's graphs are made, and no code, which takes long.
        patch.setattr(torch, "compile", partial(original, backend="aot_eager"))
        history = train(build_engine(config_of(row, **changes)), range(STEPS))
    counters = torch._dynamo.utils.counters
    return history, sorted(shapes), dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (Row(micro_batch=4, precision="bf16", recompute=True), {"model": {"layer_arrangement": "parallel"}}),
        # Several micro-batches in flight; the gradients of each bucket are reduced in the backward pass.
        (Row(pp=2, dp=2, zero=1, micro_batch=1, precision="bf16"), {"parallel": {"ddp_bucket_size": 1}}),
        (Row(cp=2, micro_batch=4, precision="bf16"), {}),
        (Row(dp=2, micro_batch=4, zero=3, precision="bf16"), {}),
    ],
    ids=str,
)
def test_a_compiled_layer_with_dropout_is_one_graph_whose_products_add(row, changes):
    changes = {**changes, "model": {**changes.get("model", {}), "hidden_dropout": 0.1}}
    eager, compiled = (
        run_world(row.world_size, breaks_and_products, row, changes, compiles) for compiles in (False, True)
    )
    for (expected, added, *_), (found, added_compiled, breaks, graphs) in zip(eager, compiled, strict=True):
        assert max(relative_errors(found, expected)) < LOW_PRECISION_BOUND
        assert added_compiled == added != []
        assert graphs > 0
        # Context parallelism gathers keys and values in functions that are not compiled.
        assert row.cp > 1 or not breaks
