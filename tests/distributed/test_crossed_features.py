"""Trains with multi-token prediction of DeepSeek-V3, attention sinks, caps, a window, a masked loss and
documents at the same time."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.parity import INTERLEAVED, SEQUENCE_PARALLEL
from tests.distributed.test_latent_attention import DEEPSEEK_V3
from tests.distributed.test_masked_loss import masked_micro_batches
from tests.support.layouts import (
    FP32_BOUND,
    GLOBAL_BATCH,
    RATE,
    SEQ,
    Row,
    build_engine,
    config_of,
    evaluate,
)
from tests.support.pool import run_world

MODEL = {
    **{**DEEPSEEK_V3, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3, "softmax_type": "learnable"},
    **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "window_size": 7},
    **{"window_pattern": ("W", "F"), "window_rope_scaling": True},
}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}


def batches_of(engine, step):
    """Yields masked micro-batches with the document ids of the data: 2 to 4 documents per sample."""
    for batch in masked_micro_batches(engine, step):
        ids = [torch.arange(SEQ) * (2 + sample % 3) // SEQ for sample in batch.samples]
        yield replace(batch, document_ids=torch.stack(ids))


def losses_and_norms(row, layout):
    """Returns the loss, the grad norm and the losses of both prediction depths of each of 3 steps, then the
    loss of an evaluation."""
    engine = build_engine(config_of(row, model=MODEL, data=DOCUMENTS, **layout))
    numbers, device = [], torch.device("cpu")
    for step in range(3):
        with engine.module.metrics.recording():
            loss = engine.train_step(batches_of(engine, step), GLOBAL_BATCH, RATE, masks_tokens=True)
        found = engine.module.metrics.collect(device)
        numbers += [loss.item(), engine.optimizer.grad_norm, found["mtp_1 loss"], found["mtp_2 loss"]]
    return [*numbers, evaluate(engine, batches_of(engine, 3), engine.micro_batches).item()]


LAYOUTS = {
    "tp2-sequence": (Row(tp=2, micro_batch=2), SEQUENCE_PARALLEL),
    "pp2-interleaved": (Row(pp=2), INTERLEAVED),
    "cp2-pp2": (Row(cp=2, pp=2), {}),
}


@pytest.fixture(scope="module")
def expected():
    return torch.tensor(run_world(1, losses_and_norms, Row(micro_batch=2), {})[0])


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process_does(expected, name):
    row, layout = LAYOUTS[name]
    for found in run_world(row.world_size, losses_and_norms, row, layout):
        assert ((torch.tensor(found) - expected).abs() / expected.abs()).max() <= FP32_BOUND
