"""Compares `DistributedGPT` on several ranks with the model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.model.inference.distributed import DistributedGPT
from megatron.model.inference.single_process import GPTModel
from megatron.mpu.parameters import initialize_parameters
from tests.support.layouts import EOD, VOCAB, Row, build_engine, config_of
from tests.support.pool import run_world

MODEL = {"num_layers": 4, "init_method_std": 0.2}
# Name -> (layout, settings of the layout, settings of the model).
ROWS: dict[str, tuple[Row, dict[str, Any], dict[str, Any]]] = {
    "TP 2 x PP 2": (Row(tp=2, pp=2), {}, {}),
    "TP 2 x DP 2, sequence parallel, rotary": (
        Row(tp=2, dp=2, positions="rotary"),
        {"sequence_parallel": True},
        {"untie_embeddings_and_output_weights": True},
    ),
    "PP 2 x DP 2, V schedule": (Row(pp=2, dp=2), {"pipeline_schedule": "dualpipev"}, {}),
    "CP 2 x PP 2, document boundaries": (Row(cp=2, pp=2), {}, {}),
    "PP 2, interleaved, document boundaries": (
        Row(pp=2),
        {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
        {},
    ),
    "TP 2 x PP 2, uneven, windows in some layers": (
        Row(tp=2, pp=2, positions="rotary"),
        {"partition_method": "stages:E+3,1+L"},
        {"window_size": 5, "window_pattern": ("W", "W", "F"), "window_rotary_base": 100.0},
    ),
    "ZeRO-3": (Row(dp=2), {"zero_stage": 3}, {}),
}


def texts() -> torch.Tensor:
    """Returns tokens [7, 14]. No number of replicas and no micro-batch size divides 7."""
    return torch.randint(VOCAB, (7, 14), generator=torch.Generator().manual_seed(0))


def growing_texts() -> Iterator[list[list[int]]]:
    """Yields the texts without their last tokens. Each time they are one token longer, once two tokens."""
    for end in (3, 4, 5, 7, 8):
        yield [row[: end + index] for index, row in enumerate(texts()[:5].tolist())]


def config(name: str) -> Config:
    row, parallel, model = ROWS[name]
    data = {"reset_attention_mask": True, "reset_position_ids": True} if "document" in name else {}
    return config_of(row, parallel=parallel, model=MODEL | model, data=data)


def on_ranks(name: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None:
    """Returns None, except on rank 0: (log-probabilities, whether each token is the most likely one,
    next-token logits for each of `growing_texts`)."""
    settings, row = config(name), ROWS[name][0]
    engine = build_engine(settings)
    mesh = engine.mesh
    model = DistributedGPT(engine.module.eval(), mesh, micro_batch_size=2)
    assert model.batch_size >= 2 * row.dp
    if mesh.rank:
        model.serve()
        return None
    rows = texts()
    scores = model.score(rows[:, :-1], rows[:, 1:])
    again = model.score(rows[:3, :5], rows[:3, 1:6])
    assert torch.allclose(again.log_probs, scores.log_probs[:3, :5], atol=1e-5)
    logits = [model.next_token_logits(growing) for growing in growing_texts()]
    model.stop()
    return scores.log_probs, scores.is_greedy, logits


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("name", ROWS)
def test_scores_are_those_of_one_process(name: str) -> None:
    settings, rows = config(name), texts()
    model = GPTModel(settings, VOCAB, EOD).eval()
    initialize_parameters(model, settings.training.seed, ())
    with torch.no_grad():
        logits = model(rows[:, :-1])
    expected = logits.log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    found = run_world(ROWS[name][0].world_size, on_ranks, name)[0]
    assert found is not None
    log_probs, is_greedy, next_logits = found
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(is_greedy, logits.argmax(-1) == rows[:, 1:])
    for growing, found_logits in zip(growing_texts(), next_logits, strict=True):
        last = torch.stack([logits[row, len(text) - 1] for row, text in enumerate(growing)])
        torch.testing.assert_close(found_logits, last, rtol=1e-5, atol=1e-5)
