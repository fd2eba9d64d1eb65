"""Trains with each precision, with variants of the model, and in modes that end a run differently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT

VARIANT = "--position-embedding-type alibi --embed-layernorm --glu-activation swiglu".split()
DOCUMENTS = "--reset-attention-mask --eod-mask-loss".split()
FLAGS = [*MODEL, *SHORT, *VARIANT, *DOCUMENTS, *NO_DROPOUT]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def fp32(data: list[str]) -> Run:
    return pretrain([*FLAGS, *data])


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "precision", [["--bf16", "--zero-stage", "1"], ["--fp16", "--initial-loss-scale", "1024"]]
)
def test_16_bit_formats_follow_fp32_over_a_pipeline(precision: list[str], fp32: Run, data: list[str]) -> None:
    run = pretrain([*precision, *PIPELINE, *FLAGS, *data], processes=2).ok()
    assert len(run.steps) == len(fp32.steps) == 5
    for step, exact in zip(run.steps, fp32.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(exact["lm_loss"], rel=2e-3)
        assert step["number_of_skipped_iterations"] == 0
        assert step.get("loss_scale") == (1024.0 if "--fp16" in precision else None)


def test_deterministic_algorithms_train_the_same_model(
    fp32: Run, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation of a step has a deterministic implementation on a CPU."""
    flags = [*FLAGS, "--deterministic-mode", *data]
    run = pretrain(flags).ok()
    losses = [step["lm_loss"] for step in fp32.steps]
    assert [step["lm_loss"] for step in run.steps] == pytest.approx(losses, rel=1e-6)
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    refused = pretrain(flags)
    assert refused.exit_code == 2 and "Expected one of Ring, Tree" in refused.stderr


def test_a_loss_scale_that_overflows_skips_steps_and_halves(data: list[str]) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, "--fp16", "--hysteresis", "1"]
    run = pretrain([*flags, "--initial-loss-scale", str(2.0**30), "--train-iters", "16", *data]).ok()
    scale = 2.0**30
    for step in run.steps:
        skipped = step["number_of_skipped_iterations"]
        assert ("lm_loss" in step) == (not skipped)
        scale /= 2**skipped
        assert step["loss_scale"] == scale
    skips = [step["number_of_skipped_iterations"] for step in run.steps]
    assert skips[0] == 1 and 0 in skips


@pytest.mark.full
def test_document_boundaries_change_the_loss_alike_on_every_layout(data: list[str], fp32: Run) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, *DOCUMENTS, "--reset-position-ids"]
    split = pretrain([*flags, *data, "--tensor-model-parallel-size", "2"], processes=2)
    one = pretrain([*flags, *data])
    assert split.exit_code == one.exit_code == 0
    losses = [step["lm_loss"] for step in one.steps]
    assert [step["lm_loss"] for step in split.steps] == pytest.approx(losses, rel=1e-5)
    without = pretrain([*(flag for flag in flags if flag not in DOCUMENTS and "reset" not in flag), *data])
    assert max(abs(a["lm_loss"] - b) for a, b in zip(without.steps, losses, strict=True)) > 1e-4


@pytest.mark.full
def test_tokens_end_a_run_and_no_train_evaluates_what_it_saved(data: list[str], tmp_path: Path) -> None:
    checkpoints = ["--save", str(tmp_path), "--load", str(tmp_path)]
    flags = [
        *"--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-samples 400 --eval-iters 2".split(),
        *"--train-tokens 700 --lr-decay-tokens 600 --min-lr 1e-4 --log-interval 2".split(),
        *MODEL,
        *ABSOLUTE,
        *data,
        *checkpoints,
    ]
    trained = pretrain(flags).ok()
    # The 6th step of 4 x 32 tokens reaches 700 tokens. Each line is printed every second step, and is a mean
    # over two.
    assert [step["iteration"] for step in trained.steps] == [2, 4, 6]
    assert trained.steps[-1]["total_iterations"] == 6 and trained.steps[-1]["consumed_tokens"] == 768
    rates = [1e-4 + 9e-4 * (1 - min(1, tokens / 600)) for tokens in (256, 512, 768)]
    assert [step["learning_rate"] for step in trained.steps] == pytest.approx(rates, rel=1e-3)

    evaluated = pretrain([*flags, "--no-train"])
    assert evaluated.exit_code == 0 and evaluated.steps == []
    assert evaluated.evaluations == trained.evaluations != []


@pytest.mark.full
def test_8_bit_adam_lists_its_8_bit_moments_and_resumes(data: list[str], tmp_path: Path) -> None:
    """The run has a pipeline whose second stage has the final norm and the head. A second run resumes with
    plain Adam."""
    flags = [*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, "--ffn-hidden-size", "256", "--save", str(tmp_path)]
    eight_bit = [*flags, *data, "--use_bnb_optimizer", "--zero-stage", "1"]
    run = pretrain([*eight_bit, *PIPELINE, "--exit-interval", "2"], processes=2).ok()
    assert run.stdout.count("moments after the first step") == 1
    assert re.search(r" 8 bits \| +\d+ parameters .* 2\.031 bytes per element", run.stdout)
    resumed = pretrain([*flags, *data, "--load", str(tmp_path)]).ok()
    assert [step["iteration"] for step in resumed.steps] == [3, 4, 5]
    assert resumed.steps[0]["lm_loss"] == pytest.approx(run.steps[-1]["lm_loss"], rel=0.05)
    assert "moments after" not in resumed.stdout


@pytest.mark.full
def test_zero_3_with_offload_has_the_losses_of_one_process_and_opens_elsewhere(
    data: list[str], fp32: Run, tmp_path: Path
) -> None:
    """On a CPU the log says that --cpu-offload has no effect."""
    shared = [*FLAGS, *data, "--zero-stage", "3", "--cpu-offload", "--checkpoint-activations"]
    run = pretrain([*shared, "--save", str(tmp_path), "--exit-interval", "3"], processes=2).ok()
    assert "ZeRO stage 3" in run.stdout and "--cpu-offload has no effect" in run.stdout
    resumed = pretrain([*FLAGS, *data, "--load", str(tmp_path)]).ok()
    assert [step["iteration"] for step in [*run.steps, *resumed.steps]] == [1, 2, 3, 4, 5]
    for step, exact in zip([*run.steps, *resumed.steps], fp32.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(exact["lm_loss"], rel=1e-5)
