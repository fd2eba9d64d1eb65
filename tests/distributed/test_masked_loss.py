"""Loss masks with unequal numbers of tokens: every layout trains as plain PyTorch does with labels of
-100."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from tests.distributed.parity import LAYOUTS, assert_same_on
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
    """Returns the masks of a step's samples. They keep from none to all of a sample's tokens."""
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


def weights_and_history(row, steps=STEPS, **changes):
    """Returns (initial weights, (loss, grad norm) of each step). The last entry includes the loss of an
    evaluation."""
    engine = build_engine(config_of(row, **changes))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    history = []
    for step in range(steps):
        batches = masked_micro_batches(engine, step)
        loss = engine.train_step(batches, GLOBAL_BATCH, RATE, masks_tokens=True)
        history.append((loss.item(), engine.optimizer.grad_norm))
    evaluated = evaluate(engine, masked_micro_batches(engine, steps), engine.micro_batches)
    history[-1] += (evaluated.item(),)
    return weights, history


def masked_history(row, steps=STEPS, **changes):
    return weights_and_history(row, steps, **changes)[1]


def with_ignored_labels(step):
    tokens, labels = global_batch(step)
    return tokens, labels.masked_fill(masks(step) == 0, -100)


def plain(weights, **options):
    batches = [with_ignored_labels(step) for step in range(STEPS + 1)]
    *history, (evaluated, _) = train_plain_gpt(
        weights, batches, lr=RATE, vocab=VOCAB, clip=CLIP, layers=4, heads=4, **options
    )
    history[-1] = (*history[-1], evaluated)
    return history


@pytest.fixture(scope="module")
def expected():
    """Returns losses and grad norms of the dense model in plain PyTorch."""
    ((weights, _),) = run_world(1, weights_and_history, Row(micro_batch=4))
    return plain(weights)


RUNS = {
    "1 process": (Row(micro_batch=8), {}),
    "plain head": (Row(dp=2, micro_batch=2), {"training": {"loss_implementation": "plain"}}),
    "graph": (Row(micro_batch=2), {"training": {"cuda_graph_impl": "local"}}),
}


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("name", RUNS)
def test_a_masked_run_has_the_losses_of_plain_pytorch(expected, name):
    row, changes = RUNS[name]
    for history in run_world(row.world_size, masked_history, row, **changes):
        assert max(relative_errors(history, expected)) <= FP32_BOUND


@pytest.mark.gate(rows=0, also=["pp2-uneven"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(layout):
    assert_same_on(layout, {}, train=masked_history)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow(expected, precision):
    row = Row(tp=2, dp=2, precision=precision)
    for history in run_world(row.world_size, masked_history, row):
        assert relative_errors(history, expected)[0] <= LOW_PRECISION_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", ["gpt", "olmoe"])
def test_the_losses_of_a_router_keep_their_weight_beside_a_masked_loss(name):
    """A loss mask does not change balance loss and z-loss: they are means over all tokens, masked or not."""
    model, options = MODELS[name]
    changes = {"model": model}
    ((weights, found),) = run_world(1, weights_and_history, Row(micro_batch=4), **changes)
    reference = plain(
        weights,
        groups=model.get("num_query_groups"),
        experts=PlainExperts(**options),
        positions=model.get("position_embedding_type", "absolute"),
        glu=model.get("glu_activation"),
    )
    # The router's losses contribute to the gradient of a step, not to its reported loss or to an evaluation.
    assert max(relative_errors(found[: STEPS // 2], reference[: STEPS // 2])) <= FP32_BOUND
    row = Row(tp=2, dp=2, micro_batch=2)
    changes["parallel"] = {"sequence_parallel": True, "expert_model_parallel_size": 2}
    for history in run_world(row.world_size, masked_history, row, **changes):
        assert max(relative_errors(history, found)) <= FP32_BOUND
