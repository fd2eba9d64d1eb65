"""Many replicas and a large vocabulary, as typed: copies are compared at every step, and the run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import NO_DROPOUT

# Padded to 4096 tokens the embedding is more than half of a stage.
FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--make-vocab-size-divisible-by 4096 --pipeline-model-parallel-size 2 --check-invariants-interval 1 "
    "--micro-batch-size 1 --global-batch-size 24 --lr 1e-3 --lr-decay-iters 20 --eval-iters 0 "
    "--log-interval 1"
).split()


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", ["0", "1"])
@pytest.mark.parametrize("replicas", [3, 4])
def test_tied_copies_are_equal_at_every_step_and_the_run_resumes(
    data: list[str], tmp_path: Path, replicas: int, zero_stage: str
) -> None:
    folder = ["--save", str(tmp_path), "--load", str(tmp_path)]
    flags = [*FLAGS, *NO_DROPOUT, *data, *folder, "--zero-stage", zero_stage]
    for iterations in (10, 12):
        run = pretrain([*flags, "--train-iters", str(iterations)], processes=2 * replicas)
        assert run.exit_code == 0, run.stderr
        assert run.steps[-1]["iteration"] == iterations
    assert len(run.steps) == 2, "it resumed from iteration 10"
