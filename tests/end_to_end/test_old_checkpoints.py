"""Checkpoints that earlier versions wrote still open, and training continues with the earlier version's
losses.

Commit f43906c wrote the asset with 4 processes (TP 2 x DP 2, ZeRO-1) after 3 of 6 steps, and converted it to
a universal checkpoint. The losses below are the losses of its steps 4 to 6.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.dataset_builder import IndexedDatasetBuilder
from tests.end_to_end.command import pretrain
from tests.support.assets import unpack

FLAGS = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --vocab-size 100 --make-vocab-size-divisible-by 4 --micro-batch-size 1 --global-batch-size 4
    --train-iters 6 --lr 1e-3 --eval-iters 0 --log-interval 1 --split 100,0,0
""".split()
LOSSES = [4.599300, 4.609995, 4.603704]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with the checkpoints and the token files that the run read."""
    unpack("checkpoints_2026_11_21", tmp_path)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        builder.add_documents(np.random.RandomState(0).randint(1, 100, 4000), [100] * 40)
        builder.finalize()
    return tmp_path


@pytest.mark.parametrize("flags", [[], ["--universal_checkpoint"]], ids=["native", "universal"])
def test_a_checkpoint_of_an_earlier_version_opens_with_its_losses(flags: list[str], folder: Path) -> None:
    run = pretrain([*FLAGS, *flags, "--data-path", str(folder / "tokens"), "--load", str(folder)])
    assert run.exit_code == 0, run.stderr
    assert [step["lm_loss"] for step in run.steps] == pytest.approx(LOSSES, rel=1e-6)
    assert [step["iteration"] for step in run.steps] == [4, 5, 6]
