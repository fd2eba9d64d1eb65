"""--mock-data trains without files, with equal losses on every layout, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import MODEL, NO_DROPOUT

# The flags lack --global-batch-size, --max-position-embeddings and --save.
MOCK = [
    *MODEL,
    *NO_DROPOUT,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --lr 1e-3 "
    "--lr-decay-style constant".split(),
    *"--log-interval 1 --eval-iters 1".split(),
]


def losses(run) -> list[float]:
    return [line["lm_loss"] for line in run.ok().facts]


def test_mock_data_are_equal_on_two_layouts_and_after_a_resume(tmp_path: Path) -> None:
    documents = "--reset-attention-mask --reset-position-ids --eod-mask-loss --train-iters 5".split()
    flags = [*MOCK, *documents]
    one = losses(pretrain(flags))
    assert len(one) >= 7  # five steps, validation and test
    two = losses(pretrain([*flags, "--tensor-model-parallel-size", "2"], processes=2))
    assert two == pytest.approx(one, rel=1e-5)
    flags += ["--save", str(tmp_path), "--load", str(tmp_path)]
    pretrain([*flags, "--exit-interval", "2"]).ok()
    assert losses(pretrain(flags)) == pytest.approx(one[2:], rel=1e-5)
