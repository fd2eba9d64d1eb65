"""--compile changes how transformer layers are computed, and no number beyond rounding."""

import pytest
import torch

from megatron.model.gpt_model import ParallelTransformerLayerPipe
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
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
