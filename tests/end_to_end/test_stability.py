"""A run with a curriculum and a range of iterations to skip has the losses of the uninterrupted run after it
was interrupted on a different layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import rmtree

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
    # The checkpoint contains the window, so the two halves print the warnings of the uninterrupted run.
    spikes = re.compile(r"^iteration (\d+): spike, grad norm", re.M)
    found = spikes.findall(uninterrupted.stdout)
    assert found == [*spikes.findall(first.stdout), *spikes.findall(second.stdout)]
    assert found, "no grad norm was above the median of three"


INTERVALS = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 --log-interval 5 "
    "--eval-interval 5 --eval-iters 1 --save-interval 5 --check-invariants-interval 5 "
    "--skip-train-iteration-range"
).split()


@pytest.mark.gate(rows=1, also=["['4-17']-[17, 20]"])
@pytest.mark.parametrize(
    ("ranges", "events"),
    [
        (["3-7"], [7, 10, 15, 20]),
        (["3-7", "8-8", "9-12"], [7, 12, 15, 20]),
        (["4-17"], [17, 20]),  # several multiples, one event
        (["13-99"], [5, 10, 20]),
        (["6-6"], [5, 10, 15, 20]),
    ],
    ids=str,
)
def test_events_inside_a_skipped_range_happen_once_at_its_end(
    ranges: list[str], events: list[int], data: list[str], tmp_path: Path
) -> None:
    """Events are saves, evaluations and replica checks. A run that exits inside the range and resumes has
    them once as well."""
    flags = [*MODEL, *ABSOLUTE, *data, *INTERVALS, *ranges, "--save", str(tmp_path), "--load", str(tmp_path)]
    whole = pretrain(flags).ok()
    at = [line["iteration"] for line in whole.evaluations if str(line["at"]).startswith("iteration")]
    saved = sorted(int(path.name.removeprefix("global_step")) for path in tmp_path.glob("global_step*"))
    assert at == saved == events
    rmtree(tmp_path)
    evaluated = {}
    for _ in events:
        part = pretrain([*flags, "--exit-interval", "5"]).ok()
        evaluated |= {line["at"]: line["lm_loss"] for line in part.evaluations}
    assert re.findall(r"at iteration (\d+) \(--exit-interval 5\)", part.stdout) == ["20"]
    assert evaluated == {line["at"]: line["lm_loss"] for line in whole.evaluations}
    assert (tmp_path / f"global_step{events[0]}").is_dir()


def test_a_range_ends_the_log_interval_in_which_it_begins(data: list[str]) -> None:
    run = pretrain([*MODEL, *ABSOLUTE, *data, *INTERVALS[:10], "--log-interval", "5", *INTERVALS[-1:], "3-7"])
    assert [step["iteration"] for step in run.ok().steps] == [2, 10, 15, 20]
    assert run.stdout.index("iteration        2/") < run.stdout.index("Skipped iterations 3 to 7")
