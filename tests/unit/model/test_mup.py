"""--mup changes nothing at the base width, and the logits do not grow with the width."""

import math

import pytest
import torch

from tests.support.layouts import (
    FP32_BOUND,
    GLOBAL_BATCH,
    SEQ,
    Row,
    build_engine,
    config_of,
    micro_batches,
    relative_errors,
    train_layout,
)
from tests.support.pool import run_world

STEPS = 6
HEAD_WIDTH = 8
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % 100


def train_model(row, model):
    return train_layout(row, STEPS, model=model)


def test_at_its_base_width_nothing_changes():
    at_base = {"mup": True, "mup_base_hidden_size": 32, "mup_attn_mult": math.sqrt(HEAD_WIDTH)}
    standard = run_world(1, train_model, Row(), {})[0]
    assert relative_errors(run_world(1, train_model, Row(), at_base)[0], standard) == (0.0, 0.0)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("factor", ["input", "output", "attn"])
def test_each_multiplier_acts(factor):
    one, ten = ({"mup": True, "init_method_std": 1.0, f"mup_{factor}_mult": value} for value in (1.0, 10.0))
    first, second = (run_world(1, train_model, Row(), model)[0] for model in (one, ten))
    assert relative_errors(first, second)[1] > 1e-3


def test_every_layout_trains_as_one_process_does():
    mup = {"mup": True, "init_method_std": 0.5, "mup_input_mult": 3.0, "mup_output_mult": 4.0}
    expected = run_world(1, train_model, Row(), mup)[0]
    row = Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2)
    for history in run_world(row.world_size, train_model, row, mup):
        assert max(relative_errors(history, expected)) <= FP32_BOUND


def growth_of_logits(width, mup):
    """Returns the root mean square change of the logits over a few training steps."""
    model = {"hidden_size": width, "num_attention_heads": width // HEAD_WIDTH, "ffn_hidden_size": 4 * width}
    model |= {"num_layers": 2, "init_method_std": 0.1}
    if mup:
        model |= {"mup": True, "mup_base_hidden_size": 32, "mup_attn_mult": math.sqrt(HEAD_WIDTH)}
    engine = build_engine(config_of(Row(), model=model))

    def logits():
        with torch.no_grad():
            return engine.module.eval()(TOKENS).float()

    before = logits()
    for step in range(STEPS):
        engine.train_step(micro_batches(engine, step), GLOBAL_BATCH, 1e-2)
    return (logits() - before).square().mean().sqrt().item()


@pytest.mark.full
def test_a_wide_model_moves_as_far_as_a_narrow_one():
    growth = {
        mup: [run_world(1, growth_of_logits, width, mup)[0] for width in (32, 128, 512)]
        for mup in (False, True)
    }
    assert growth[False][2] / growth[False][0] > 4
    assert 0.5 < growth[True][2] / growth[True][0] < 2
