"""A checkpoint that Microsoft's Megatron-DeepSpeed wrote opens with the usual command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.dataset_builder import IndexedDatasetBuilder
from tests.end_to_end.command import pretrain
from tests.unit.checkpoint.megatron_deepspeed_folder import ASSET_VOCAB, SEQ, plain_loss, unpack

FLAGS = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --vocab-size 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3
    --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1 --split 100,0,0
    --universal_checkpoint
""".split()


@pytest.mark.full  # test_tutorials.py resumes such a checkpoint, and the distributed test has its next losses
def test_the_first_loss_is_that_of_the_weights_in_plain_pytorch(tmp_path: Path) -> None:
    """The period of the data is the sequence length, so all samples are equal."""
    unpack(tmp_path)
    period = np.random.RandomState(0).randint(1, ASSET_VOCAB, SEQ)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        builder.add_documents(np.tile(period, 200), [200 * SEQ])
        builder.finalize()
    folder = tmp_path / "learned"
    run = pretrain([*FLAGS, "--data-path", str(tmp_path / "tokens"), "--load", str(folder)]).ok()
    assert "transformer layers 2 to 3 are 3 to 4 in this program, the final norm 4 is 6" in run.stdout
    samples = torch.from_numpy(np.append(period, period[0])).long().unsqueeze(0)
    (step,) = run.steps
    assert step["iteration"] == 4
    assert step["lm_loss"] == pytest.approx(plain_loss(folder, "learned", samples), rel=1e-6)
