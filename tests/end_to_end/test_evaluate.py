"""Compares tools/evaluate.py with the evaluation at the end of the training run."""

from __future__ import annotations

import re
import signal
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.commands import ds_to_universal, evaluate
from megatron.commands.evaluate import with_separate_documents
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import UserError
from tests.end_to_end.command import ROOT, environment
from tests.end_to_end.flags import MODEL, SHORT
from tests.end_to_end.trained import SEQ, VARIANTS, Trained
from tests.support.forked import run_script

FIRST_BATCH = ["--samples", "4"]  # the samples of --eval-iters 1 and --global-batch-size 4
# In fp32 only the order of sums differs. In 16 bits the fused head of training rounds differently.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


def losses(capsys: pytest.CaptureFixture[str], trained: Trained, *flags: str) -> list[float]:
    """Returns the losses that the tool prints, one per data set."""
    evaluate.main(["--load", str(trained.folder), *flags])
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", capsys.readouterr().out)]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("micro_batch_size", ["3", "1"])  # with 3 the last micro-batch is smaller
def test_the_loss_is_that_of_training_on_the_same_samples(
    micro_batch_size: str,
    name: str,
    train: Callable[[str], Trained],
    data: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = train(name)
    tolerance = TOLERANCES[next((kind for kind in TOLERANCES if kind in name), "fp32")]
    flags = ["--data-path", data[1], *FIRST_BATCH, "--micro-batch-size", micro_batch_size]
    for subset, logged in (("valid", "validation"), ("test", "test")):
        (loss,) = losses(capsys, trained, *flags, "--subset", subset)
        assert loss == pytest.approx(trained.losses[logged], rel=tolerance)


def test_a_universal_checkpoint_and_several_data_sets_give_the_same_losses(
    trained: Trained, data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    universal = tmp_path / "global_step5_universal"
    native = trained.folder / "global_step5"
    ds_to_universal.main(["--input_folder", str(native), "--output_folder", str(universal)])
    capsys.readouterr()
    # A separate data set contains the validation documents of the corpus, found without the code under test.
    corpus = IndexedDataset(data[1])
    count = len(corpus)
    bounds = np.cumsum([round(share * count / 1000) for share in (900, 50, 50)])
    with IndexedDatasetBuilder(tmp_path / "valid", corpus.dtype) as builder:
        for i in range(bounds[0] - (bounds[2] - count), bounds[1] - (bounds[2] - count)):
            builder.add_documents(corpus[i], [len(corpus[i])])
        builder.finalize()
    first, second = losses(capsys, trained, "--data-path", data[1], data[1], *FIRST_BATCH)
    assert first == second
    # The run reads equal documents in equal order, shuffled with an equal seed.
    flags = ["--data-path", str(tmp_path / "valid"), "--subset", "all", *FIRST_BATCH]
    assert losses(capsys, trained, *flags) == [first]
    evaluate.main(["--load", str(universal), "--data-path", data[1], *FIRST_BATCH])
    assert f"lm loss: {first:.6E}" in capsys.readouterr().out


def test_all_samples_are_read_once_by_default(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents([1, 2, 3] * 33, [60, 39])
        builder.finalize()
    flags = ["--data-path", str(tmp_path / "data"), "--seq-length", "16"]  # the run has not seen these data
    evaluate.main(["--load", str(trained.folder), *flags])
    line = capsys.readouterr().out
    assert (
        "| all | 2 of 2 documents | 6 of 6 samples of 16 tokens |" in line
    )  # 99 tokens: 6 samples, and 2 tokens remain
    loss, perplexity = (float(re.search(rf"{name}: (\S+)", line)[1]) for name in ("loss", "PPL"))
    assert perplexity == pytest.approx(np.exp(loss), rel=1e-5)


def test_mistakes_are_one_sentence_and_code_2(
    trained: Trained, data: list[str], tmp_path: Path, mistake: Callable[..., str]
) -> None:
    mistake = partial(mistake, evaluate.main, "--load", str(trained.folder))
    assert "/none" in mistake("--data-path", data[1], "--load", str(tmp_path / "none"))
    assert "no/data.idx" in mistake("--data-path", "no/data")
    assert "--data-path 0.3" in mistake("--data-path", "0.3", data[1])
    assert f"at most {SEQ}" in mistake("--data-path", data[1], "--seq-length", str(SEQ + 1))
    assert "--samples is 0" in mistake("--data-path", data[1], "--samples", "0")
    assert "--subset all" in mistake("--data-path", data[1], "--split", "1", "--subset", "valid")
    with IndexedDatasetBuilder(tmp_path / "short", np.uint16) as builder:
        builder.add_documents([1] * 100, [98, 2])
        builder.finalize()
    short = mistake("--data-path", str(tmp_path / "short"), "--split", "1,1")
    assert "valid split has 2 tokens" in short and "--subset all evaluates all 2 documents" in short
    assert "--split is 'x'" in mistake("--data-path", data[1], "--split", "x")
    with IndexedDatasetBuilder(tmp_path / "other", np.uint16) as builder:
        builder.add_documents([1] * 100, [100])
        builder.finalize()
    record = Path(f"{data[1]}.tokenizer.json").read_text()
    digest = re.search('"vocabulary_sha256": "(.*)"', record)[1]
    (tmp_path / "other.tokenizer.json").write_text(record.replace(digest, "0" * 64))
    assert "was tokenized with a vocabulary" in mistake(
        "--data-path", str(tmp_path / "other"), "--subset", "all"
    )


@pytest.mark.parametrize("size", ["tensor-model", pytest.param("context", marks=pytest.mark.full)])
def test_the_tool_starts_its_ranks_on_this_host(
    size: str, trained: Trained, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", data[1], "--samples", "5", "--micro-batch-size", "2"]
    (expected,) = losses(capsys, trained, *flags)
    flags += ["--load", str(trained.folder), f"--{size}-parallel-size", "2"]
    ended = run_script(ROOT / "tools/evaluate.py", flags, environment(), 0)
    assert ended.exit_codes == [0], ended.stderr
    (loss,) = re.findall(r"lm loss: (\S+)", ended.stdout)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_launcher_may_start_the_ranks_and_replicas_share_the_samples(
    name: str, train: Callable[[str], Trained], data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(name)
    flags = ["--data-path", data[1], "--samples", "5", "--micro-batch-size", "1"]
    (expected,) = losses(capsys, trained, *flags)
    flags += ["--load", str(trained.folder), "--pipeline-model-parallel-size", "2"]
    flags += ["--local-rank=0"]  # torch.distributed.launch adds it; LOCAL_RANK is equal
    ended = run_script(ROOT / "tools/evaluate.py", flags, environment(), 4)
    assert ended.exit_codes == [0, 0, 0, 0], ended.stderr
    (loss,) = re.findall(r"lm loss: (\S+)", ended.stdout)
    tolerance = next((TOLERANCES[kind] for kind in TOLERANCES if kind in name), 1e-5)
    assert float(loss) == pytest.approx(expected, rel=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("processes", [0, 2], ids=["own ranks", "launcher"])
def test_a_rank_without_a_device_is_named_once(processes: int, trained: Trained, data: list[str]) -> None:
    flags = ["--data-path", data[1], *FIRST_BATCH, "--load", str(trained.folder)]
    flags += ["--tensor-model-parallel-size", "2"]
    script = ROOT / "tests/end_to_end/no_device.py"
    ended = run_script(script, flags, environment(), processes)
    # Under a launcher, rank 0 ends the other ranks.
    assert ended.exit_codes[0] == 2 and {*ended.exit_codes} <= {2, -signal.SIGTERM}
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert "LOCAL_RANK 2 has no device: 2 devices are visible" in error


def test_mistakes_of_a_layout_end_before_the_ranks_start(
    trained: Trained, data: list[str], mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = partial(mistake, evaluate.main, "--load", str(trained.folder))
    on_data = ["--data-path", data[1]]
    assert "--num-attention-heads 4" in mistake(*on_data, "--tensor-model-parallel-size", "3")
    assert "is 0: expected at least 1" in mistake(*on_data, "--pipeline-model-parallel-size", "0")
    without = "--expert-model-parallel-size 2 without --num-experts"
    assert without in mistake(*on_data, "--expert-model-parallel-size", "2")
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    assert "pip install lm_eval" in mistake("--tasks", "toy", "--tensor-model-parallel-size", "2")
    # With the ranks of a launcher, only rank 0 prints.
    flags = ["--load", str(trained.folder), *on_data, "--samples", "0"]
    ended = run_script(ROOT / "tools/evaluate.py", flags, environment(), 2)
    # As under a launcher, the rank that ends first ends the other ranks.
    assert 2 in ended.exit_codes and {*ended.exit_codes} <= {2, -signal.SIGTERM}
    assert ended.stderr.count("--samples is 0") == 1


def test_documents_are_separated_as_the_flags_of_training_allow() -> None:
    flags = Namespace(reset_attention_mask=True, reset_position_ids=True)
    words = [*MODEL, *SHORT, "--mock-data", "--vocab-size", "9", "--position-embedding-type"]
    rotary, alibi = (
        Checkpoint(Path(), TrainingState(), {"config": parse_args([*words, positions], {}).to_dict()})
        for positions in ("rotary", "alibi")
    )
    data = with_separate_documents(rotary, flags).config.data
    assert data.reset_attention_mask and data.reset_position_ids
    unset = Namespace(reset_attention_mask=False, reset_position_ids=False)
    assert with_separate_documents(alibi, unset) is alibi
    with pytest.raises(
        UserError, match="--reset-position-ids with --position-embedding-type alibi: .* remove"
    ):
        with_separate_documents(alibi, flags)
