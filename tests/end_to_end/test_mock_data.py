"""--mock-data trains without files, with equal numbers on every layout, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import MODEL, NO_DROPOUT

# Without --global-batch-size, --max-position-embeddings and --save.
MOCK = [
    *MODEL,
    *NO_DROPOUT,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --lr 1e-3 "
    "--lr-decay-style constant".split(),
    *"--log-interval 1 --eval-iters 1".split(),
]


def losses(run) -> list[float]:
    return [line["lm_loss"] for line in run.ok().facts]


def test_mock_data_train_and_evaluate_alike_on_two_layouts() -> None:
    documents = "--reset-attention-mask --reset-position-ids --eod-mask-loss --train-iters 5".split()
    one = losses(pretrain([*MOCK, *documents]))
    two = losses(pretrain([*MOCK, *documents, "--tensor-model-parallel-size", "2"], processes=2))
    assert len(one) >= 7  # five steps, validation and test
    assert two == pytest.approx(one, rel=1e-5)


def test_mock_data_continue_after_a_resume(tmp_path: Path) -> None:
    whole = losses(pretrain([*MOCK, "--train-iters", "4"]))
    saved = [*MOCK, "--save", str(tmp_path), "--load", str(tmp_path)]
    pretrain([*saved, "--train-iters", "4", "--exit-interval", "2"]).ok()
    assert losses(pretrain([*saved, "--train-iters", "4"]))[:2] == pytest.approx(whole[2:4], rel=1e-5)
