"""A run that resumes with a different batch, sequence length or data ends where its flags say, given what its
checkpoint has consumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.commands import prepare_indices, verify_dataset
from megatron.data.dataset_builder import IndexedDatasetBuilder
from tests.end_to_end.command import Run, pretrain

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rotary "
    "--hidden-dropout 0 --attention-dropout 0 --vocab-size 128 --micro-batch-size 1 --log-interval 1 "
    "--eval-iters 0 --split 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine"
).split()
BATCH_4, BATCH_8 = ["--global-batch-size", "4"], ["--global-batch-size", "8"]
BASE = [*SMALL, "--seq-length", "32"]
EPOCH = 134
"""Samples of the data in one epoch."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("tokens") / "b"
    sizes = [67] * (2 * EPOCH * 32 // 134) + [1]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(np.arange(sum(sizes)) % 128, sizes)
        builder.finalize()
    return str(prefix)


@pytest.fixture(scope="module")
def begun(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that starts a run, stops it after some iterations, and returns the folder of its
    checkpoint."""
    folders: dict[str, Path] = {}

    def begin(flags: str) -> Path:
        if flags not in folders:
            folder = tmp_path_factory.mktemp("begun")
            words = [*BASE, *flags.split(), "--save", str(folder), "--data-path", tokens]
            pretrain(words).ok()
            folders[flags] = folder
        return folders[flags]

    return begin


def last_step(run: Run) -> tuple[int, int, int, float]:
    step = run.ok().steps[-1]
    assert step["iteration"] == step["total_iterations"]
    consumed = step["consumed_samples"], step["consumed_tokens"]
    return step["iteration"], *consumed, step["learning_rate"]


CHANGES = {
    "samples, a larger batch": (
        "--global-batch-size 4 --train-samples 160 --exit-interval 10",
        "--global-batch-size 8 --train-samples 160",
        (25, 160, 5120),
    ),
    "samples, a smaller batch": (
        "--global-batch-size 8 --train-samples 160 --exit-interval 10",
        "--global-batch-size 4 --train-samples 160",
        (30, 160, 5120),
    ),
    "samples, a smaller batch, the last sample of an epoch": (
        "--global-batch-size 8 --train-samples 128 --exit-interval 10",
        "--global-batch-size 4 --train-samples 128",
        (22, 128, 4096),
    ),
    "iterations, a smaller batch": (
        "--global-batch-size 8 --train-iters 20 --exit-interval 16",
        "--global-batch-size 4 --train-iters 20",
        (20, 144, 4608),
    ),
    "tokens, a larger batch": (
        "--global-batch-size 4 --train-samples 1000 --train-tokens 5120 --exit-interval 10",
        "--global-batch-size 8 --train-samples 1000 --train-tokens 5120",
        (25, 160, 5120),
    ),
    "tokens, longer sequences": (
        "--global-batch-size 4 --train-samples 1000 --train-tokens 5120 --exit-interval 10",
        "--global-batch-size 4 --train-samples 1000 --train-tokens 5120 --override-data --seq-length 64",
        (25, 100, 5120),
    ),
    "samples, with evaluations": (
        "--global-batch-size 4 --train-samples 160 --exit-interval 10 --split 9,1 --eval-iters 1",
        "--global-batch-size 8 --train-samples 160 --split 9,1 --eval-iters 1 --eval-interval 4",
        (25, 160, 5120),
    ),
    "samples, a ramp-up": (
        "--global-batch-size 8 --train-samples 160 --exit-interval 10",
        "--global-batch-size 16 --rampup-batch-size 4 4 160 --train-samples 160",
        (18, 160, 5120),
    ),
}


@pytest.mark.gate(rows=2, also=["tokens, longer sequences"])
@pytest.mark.parametrize(("first", "then", "end"), CHANGES.values(), ids=CHANGES)
def test_resumed_length(
    first: str, then: str, end: tuple[int, int, int], begun: Callable[[str], Path], tokens: str
) -> None:
    flags = [*BASE, *then.split(), "--load", str(begun(first)), "--data-path", tokens]
    assert last_step(pretrain(flags)) == (*end, pytest.approx(1e-4))


def test_resumed_length_after_several_changes_and_an_interruption(
    begun: Callable[[str], Path], tokens: str, tmp_path: Path
) -> None:
    """The second launch has larger batches. If it is interrupted and resumed on a different layout, it ends
    as planned."""
    start = begun("--global-batch-size 4 --train-samples 160 --exit-interval 10")
    flags = [*BASE, "--train-samples", "160", "--data-path", tokens, *BATCH_8]
    whole = pretrain([*flags, "--load", str(start)]).ok()
    flags += ["--save", str(tmp_path / "a"), "--load"]
    first = pretrain([*flags, str(start), "--exit-interval", "7"]).ok()
    second = pretrain([*flags, str(tmp_path / "a"), "--pipeline-model-parallel-size", "2"], processes=2).ok()
    steps = first.steps + second.steps
    assert [step["iteration"] for step in steps] == list(range(11, 26))
    for step, expected in zip(steps, whole.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5)
        same = ("iteration", "total_iterations", "learning_rate", "consumed_samples", "consumed_tokens")
        assert all(step[name] == expected[name] for name in same)
    third = [*BASE, "--train-samples", "200", "--data-path", tokens, "--global-batch-size", "2"]
    third += ["--load", str(tmp_path / "a"), "--override-lr-scheduler"]
    assert last_step(pretrain(third))[:2] == (25 + 20, 200)


def test_resumed_length_of_an_older_checkpoint(
    begun: Callable[[str], Path], tokens: str, tmp_path: Path
) -> None:
    """The newest checkpoint is damaged. The ranks find this after they have connected."""
    started = begun("--global-batch-size 4 --train-samples 160 --exit-interval 10 --save-interval 5")
    folder = shutil.copytree(started, tmp_path / "copy")
    file = max((folder / "global_step10").glob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    flags = [*BASE, "--train-samples", "160", "--data-path", tokens, *BATCH_8, "--load", str(folder)]
    run = pretrain(flags)
    assert run.ok().steps[0]["iteration"] == 6
    assert last_step(run)[:2] == (5 + 17, 20 + 17 * 8)


def test_resumed_length_of_the_tools(
    begun: Callable[[str], Path], tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The indices and samples are for 16 steps of 8 samples and 4 steps of 4 samples."""
    start = begun("--global-batch-size 8 --train-iters 20 --exit-interval 16")
    flags = [*BASE, *BATCH_4, "--train-iters", "20", "--data-path", tokens, "--load", str(start)]
    flags += ["--data-cache-path", str(tmp_path)]
    prepare_indices.main(["--world-size", "1", *flags])
    run = pretrain([*flags, "--require-prepared-indices"])
    assert last_step(run)[:2] == (20, 144)
    verify_dataset.main(["--sample", "143", *flags])
    assert "sample 143 of train" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        verify_dataset.main(["--sample", "144", *flags])
    assert "reads 144 samples of train, expected 0 to 143" in capsys.readouterr().err
    planned = pretrain([*flags, "--dry-run"]).ok()
    assert "the run ends at iteration 20, with 144 samples" in planned.stdout


def test_resumed_length_that_is_reached_trains_nothing(begun: Callable[[str], Path], tokens: str) -> None:
    """One more batch would exceed the length. Without this batch the run has fewer epochs, and would read the
    data in a different order."""
    start = begun("--global-batch-size 8 --train-samples 160 --exit-interval 10")
    flags = [*BASE, "--train-samples", "160", "--global-batch-size", "96", "--data-path", tokens]
    refused = pretrain([*flags, "--load", str(start)])
    assert refused.exit_code == 2 and "pass --data-order-samples 160 to keep its order, or" in refused.stderr
    run = pretrain([*flags, "--load", str(start), "--data-order-samples", "160"]).ok()
    assert run.steps == []
    assert (
        "nothing to train: the checkpoint is at iteration 10, with 80 samples and 2,560 tokens consumed, and "
        "the run ends at iteration 10" in run.stdout
    )


def test_resumed_length_of_a_constant_learning_rate(begun: Callable[[str], Path], tokens: str) -> None:
    """A constant learning rate has no decay whose length could differ."""
    constant = "--lr-decay-style constant --global-batch-size 4"
    start = begun(f"{constant} --train-iters 3")
    flags = [*BASE, *constant.split(), "--train-iters", "5", "--load", str(start), "--data-path", tokens]
    assert last_step(pretrain(flags))[::3] == (5, 1e-3)
