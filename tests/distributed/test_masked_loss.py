"""Masks with unequal numbers of tokens: every layout trains as plain PyTorch does with labels of -100."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from tests.distributed.test_experts import MODELS
from tests.reference.plain_experts import PlainExperts
from tests.reference.plain_gpt import train_plain_gpt
from tests.support.layouts import (
    CLIP,
    FP32_BOUND,
    GLOBAL_BATCH,
    LOW_PRECISION_BOUND,
    RATE,
    SEQ,
    STEPS,
    VOCAB,
    Row,
    build_engine,
    config_of,
    evaluate,
    global_batch,
    relative_errors,
)
from tests.support.pool import run_world


def masks(step):
    """Returns the masks of a step's samples: none to all of the tokens of a sample count."""
    generator = torch.Generator().manual_seed(1000 + step)
    shares = torch.rand(GLOBAL_BATCH, 1, generator=generator) ** 3
    mask = (torch.rand(GLOBAL_BATCH, SEQ, generator=generator) < shares).float()
    mask[step % GLOBAL_BATCH] = 0.0
    return mask


def masked_micro_batches(engine, step):
    tokens, labels = global_batch(step)
    mask, size, mesh = masks(step), engine.run.config.batch.micro_batch_size, engine.mesh
    for first in range(mesh.dp.rank * size, GLOBAL_BATCH, mesh.dp_size * size):
        rows = slice(first, first + size)
        samples = range(step * GLOBAL_BATCH + first, step * GLOBAL_BATCH + first + size)
        yield MicroBatch(samples, *(x[rows].contiguous() for x in (tokens, labels, mask)))


def masked_history(row, changes):
    """Returns the initial weights; (loss, grad norm) of each step, and (loss of an evaluation, 1)."""
    engine = build_engine(config_of(row, **changes))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    history = []
    for step in range(STEPS):
        batches = masked_micro_batches(engine, step)
        loss = engine.train_step(batches, GLOBAL_BATCH, RATE, masks_tokens=True)
        history.append((loss.item(), engine.optimizer.grad_norm))
    evaluated = evaluate(engine, masked_micro_batches(engine, STEPS), engine.micro_batches)
    return weights, [*history, (evaluated.item(), 1.0)]


def with_ignored_labels(step):
    tokens, labels = global_batch(step)
    return tokens, labels.masked_fill(masks(step) == 0, -100)


def plain(weights, **options):
    batches = [with_ignored_labels(step) for step in range(STEPS + 1)]
    *history, (evaluated, _) = train_plain_gpt(
        weights, batches, lr=RATE, vocab=VOCAB, clip=CLIP, layers=4, heads=4, **options
    )
    return [*history, (evaluated, 1.0)]


@pytest.fixture(scope="module")
def expected():
    """The history of the dense model in plain PyTorch."""
    ((weights, _),) = run_world(1, masked_history, Row(micro_batch=4), {})
    return plain(weights)


SCHEDULES = {
    "interleaved": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
}
LAYOUTS = {
    "1 process": (Row(micro_batch=8), {}),
    "tp2 cp2": (Row(tp=2, cp=2, micro_batch=2), {}),
    "dp4 zero2": (Row(dp=4, zero=2, micro_batch=2), {}),
    "dp2 zero3": (Row(dp=2, zero=3), {}),
    "pp2 dp2": (Row(pp=2, dp=2), {}),
    "pp2 interleaved": (Row(pp=2, micro_batch=2), {"parallel": SCHEDULES["interleaved"]}),
    "pp2 zero-bubble": (Row(pp=2, micro_batch=2), {"parallel": SCHEDULES["zero-bubble"]}),
    "plain head": (Row(dp=2, micro_batch=2), {"training": {"loss_implementation": "plain"}}),
    "graph": (Row(micro_batch=2), {"training": {"cuda_graph_impl": "local"}}),
}


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_masked_run_has_the_losses_of_plain_pytorch(expected, name):
    row, changes = LAYOUTS[name]
    for _, history in run_world(row.world_size, masked_history, row, changes):
        assert max(relative_errors(history, expected)) <= FP32_BOUND


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow(expected, precision):
    row = Row(tp=2, dp=2, precision=precision)
    for _, history in run_world(row.world_size, masked_history, row, {}):
        assert relative_errors(history, expected)[0] <= LOW_PRECISION_BOUND


@pytest.mark.parametrize("name", ["olmoe", "gpt"])
def test_the_losses_of_a_router_keep_their_weight_beside_a_masked_loss(name):
    """Balance and z losses are means over all tokens, masked or not, as without a mask."""
    model, options = MODELS[name]
    changes = {"model": model}
    ((weights, found),) = run_world(1, masked_history, Row(micro_batch=4), changes)
    reference = plain(
        weights,
        groups=model.get("num_query_groups"),
        experts=PlainExperts(**options),
        positions=model.get("position_embedding_type", "absolute"),
        glu=model.get("glu_activation"),
    )
    # The losses of the router are in the gradient of a step, not in its loss or an evaluation.
    assert max(relative_errors(found[: STEPS // 2], reference[: STEPS // 2])) <= FP32_BOUND
    row = Row(tp=2, dp=2, micro_batch=2)
    changes["parallel"] = {"sequence_parallel": True, "expert_model_parallel_size": 2}
    for _, history in run_world(row.world_size, masked_history, row, changes):
        assert max(relative_errors(history, found)) <= FP32_BOUND
