"""A run with a curriculum and a range of iterations to skip, in one go and interrupted on another layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL

CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8},
}
LENGTHS = [8, 8, 16, 16, 16, 24, 24, *[32] * 6]  # 1216 tokens in steps of 4 samples
TAKEN = [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13]
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-samples 400 --train-tokens 1100 --lr 1e-3 "
    "--min-lr 1e-4 --lr-warmup-samples 8 --lr-decay-tokens 1000 --eval-interval 6 --eval-iters 1 "
    "--log-interval 1 --skip-train-iteration-range 3-4 --check-invariants-interval 3 --spike-policy warn "
    "--spike-window 3 --spike-grad-norm-factor 1.01"
).split()


@pytest.mark.full
def test_a_run_interrupted_and_resumed_on_another_layout_skips_and_warns_as_an_uninterrupted_one(
    data: list[str], tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(json.dumps({"curriculum_learning": CURRICULUM}))
    flags = [*MODEL, *ABSOLUTE, *FLAGS, *data, "--deepspeed_config", str(tmp_path / "deepspeed.json")]
    uninterrupted = pretrain(flags).ok()
    assert [step["iteration"] for step in uninterrupted.steps] == TAKEN
    assert [step["curriculum_seqlen"] for step in uninterrupted.steps] == [LENGTHS[i - 1] for i in TAKEN]
    for step in uninterrupted.steps:
        tokens = 4 * sum(LENGTHS[: step["iteration"]])
        assert (step["consumed_tokens"], step["total_iterations"]) == (tokens, 13)
        decayed = 1e-4 + 9e-4 * (1 - min(1, (tokens - 64) / (1000 - 64)))
        assert step["learning_rate"] == pytest.approx(decayed if tokens > 32 else 5e-4, rel=1e-3)
    assert (
        uninterrupted.stdout.count("Skipped iterations 3 to 4 due to --skip-train-iteration-range flag\n")
        == 1
    )
    assert "note: curriculum: sequence length 8 at first, 32 from step 8 on" in uninterrupted.stdout

    checkpoints = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    layout = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    first = pretrain([*flags, *checkpoints, "--exit-interval", "7"])
    second = pretrain([*flags, *checkpoints, *layout], processes=4)
    assert first.exit_code == second.exit_code == 0, second.stderr
    steps = [*first.steps, *second.steps]
    assert [step["iteration"] for step in steps] == TAKEN
    for step, expected in zip(steps, uninterrupted.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5)
        assert step["consumed_tokens"] == expected["consumed_tokens"]
        assert step["learning_rate"] == expected["learning_rate"]
    losses = [line["lm_loss"] for line in [*first.evaluations, *second.evaluations]]
    assert losses == pytest.approx([line["lm_loss"] for line in uninterrupted.evaluations], rel=1e-5)
    # The window is in the checkpoint: both halves warn of what the uninterrupted run does.
    spikes = re.compile(r"^iteration (\d+): spike, grad norm", re.M)
    found = spikes.findall(uninterrupted.stdout)
    assert found == [*spikes.findall(first.stdout), *spikes.findall(second.stdout)]
    assert found, "no grad norm was above the median of three"
