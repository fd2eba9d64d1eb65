"""--compile changes how transformer layers are computed. Losses and grad norms change only by rounding."""

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
    """Returns (losses and grad norms of the steps, then the loss of an evaluation; number of compiled graphs;
    names of the parameters; number of layers)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = {**changes.get("training", {}), "compile": compiles}
    # For layers this small, one process compiles as fast as several, and no worker process remains.
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
        # One graph is for training and one for evaluation. A graph per layer would reach PyTorch's limit of
        # eight.
        if row.world_size == 1:
            assert graphs < layers


def breaks_and_products(row, changes, compiles):
    """Returns (losses and grad norms of the steps; shapes of the weights whose gradients the GEMM
    accumulated; graph breaks; number of compiled graphs)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    changes = {**changes, "training": {**changes.get("training", {}), "compile": compiles}}
    original = torch.compile
    with products_that_add() as shapes, pytest.MonkeyPatch.context() as patch:
        # This backend traces autograd's graphs and generates no code, which would take long.
        patch.setattr(torch, "compile", partial(original, backend="aot_eager"))
        history = train(build_engine(config_of(row, **changes)), range(STEPS))
    counters = torch._dynamo.utils.counters
    return history, sorted(shapes), dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (Row(micro_batch=4, precision="bf16", recompute=True), {"model": {"layer_arrangement": "parallel"}}),
        # Several micro-batches are in flight, and each bucket's gradients are reduced in the backward pass.
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
        # With context parallelism, functions that are not compiled gather keys and values.
        assert row.cp > 1 or not breaks
