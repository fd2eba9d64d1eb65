"""Runs tools/convert_huggingface.py and tools/inspect_checkpoint.py on checkpoints that
pretrain_gpt.py wrote."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from megatron.arguments import parse_args
from megatron.checkpoint.reading import load_model, read_checkpoint
from megatron.commands import convert_checkpoint, convert_huggingface, inspect_checkpoint
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.conftest import VOCAB_SIZE
from tests.end_to_end.command import ROOT, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT
from tests.unit.checkpoint.hugging_face_folder import hf_logits, megatron_logits, save_hf
from tests.unit.checkpoint.test_huggingface_llama import save_hf as save_olmo_3

PROMPT = "def main(argv):\n    for argument in argv:"
VARIANTS = {
    "GPT2LMHeadModel": f"--pipeline-model-parallel-size 2 {' '.join(ABSOLUTE)}",
    "BloomForCausalLM": "--tensor-model-parallel-size 2 --zero-stage 1 --position-embedding-type alibi "
    "--embed-layernorm --bf16",
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("architecture", VARIANTS)
def test_an_exported_model_has_the_same_logits_and_is_described(
    architecture: str, corpus: Path, data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved, hf_folder = tmp_path / "saved", tmp_path / "hf"
    flags = [*MODEL, *VARIANTS[architecture].split(), *NO_DROPOUT, *SHORT, *data]
    run = pretrain([*flags, "--save", str(saved), "--save-interval", "3"], processes=2)
    assert run.exit_code == 0, run.stderr

    convert_huggingface.main(["--load", str(saved), "--output", str(hf_folder)])
    precision = "bf16" if "--bf16" in flags else "fp32"
    assert f"{architecture} in {precision}, iteration 5 of {saved}/global_step5" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    megatron_tokenizer = GPT2BPETokenizer(str(corpus / "vocab.json"), str(corpus / "merges.txt"))
    assert tokenizer.encode(PROMPT) == megatron_tokenizer.tokenize(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    assert type(model).__name__ == architecture
    tokens = torch.tensor([megatron_tokenizer.tokenize(PROMPT)])
    with torch.no_grad():
        expected = load_model(read_checkpoint(saved), fp32_on_cpu=True)(tokens)
        logits = model.eval()(tokens).logits
    assert logits.std() > 0.1, "logits without spread would show nothing"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    assert inspect_checkpoint.main([str(saved), "--json"]) == 0
    overview = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in overview["checkpoints"]] == ["global_step3", "global_step5"]
    assert overview["checkpoint"]["state"]["iteration"] == 5
    assert overview["checkpoint"]["problems"] == []
    assert sum(group["num_files"] for group in overview["checkpoint"]["files"]) == len(
        list((saved / "global_step5").iterdir())
    )
    assert inspect_checkpoint.main([str(saved / "global_step3"), str(saved)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["state.iteration", "3", "5"] in rows
    assert "tied_modules.embed.word_embeddings.weight" in [row[0] for row in rows if row]


# --- from Hugging Face to training ---

LENGTH = 32


def printed_flags(output: str) -> list[str]:
    """Returns the flags that the conversion to a universal checkpoint printed."""
    (line,) = (line for line in output.splitlines() if line.startswith("start from it with: "))
    return shlex.split(line.removeprefix("start from it with: "))


def first_loss(flags: list[str], hf_folder: Path) -> float:
    """Returns the loss of transformers' model on the first global batch of a run with these flags."""
    config = parse_args(flags, {})
    batch = config.batch.global_batch_size
    dataset, _, _ = build_gpt_datasets(
        config.data, config.model.seq_length, config.training.seed, (5 * batch, batch, batch)
    )
    samples = torch.stack([torch.as_tensor(dataset[index]) for index in range(batch)]).long()
    logits = hf_logits(hf_folder, samples[:, :-1])[..., :VOCAB_SIZE]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("kind", ["bloom", "gpt2"])
@pytest.mark.parametrize(("axis", "processes"), [("tensor", 2), ("pipeline", 2), ("tensor", 1)])
def test_training_starts_from_a_model_of_hugging_face_on_any_layout(
    kind: str,
    axis: str,
    processes: int,
    corpus: Path,
    data: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model's folder contains a tokenizer, as on the hub. The model has 40 rows more than the tokenizer
    has tokens, which --vocab-size confirms."""
    from transformers import GPT2TokenizerFast

    hf_folder, start = tmp_path / "hf", tmp_path / "start"
    save_hf(hf_folder, kind, max_shard_size="100KB", sizes=(VOCAB_SIZE + 40, 4))
    GPT2TokenizerFast(str(corpus / "vocab.json"), str(corpus / "merges.txt")).save_pretrained(hf_folder)
    output = str(start / "global_step0_universal")
    confirmed = ["--vocab-size", str(VOCAB_SIZE)]
    convert_huggingface.main(["--from-hugging-face", str(hf_folder), "--output", output, *confirmed])
    printed = capsys.readouterr()
    assert "40 of 640 rows of the word embeddings" in printed.err
    corpus_flags = data[: data.index("--tokenizer-type")]
    # BLOOM reads sequences of any length, so its config.json contains no length.
    flags = [*printed_flags(printed.out), "--seq-length", str(LENGTH), *NO_DROPOUT, *SHORT, *corpus_flags]
    run = pretrain([*flags, f"--{axis}-model-parallel-size", str(processes)], processes=processes)
    assert run.exit_code == 0, run.stderr
    assert f"starting from {start}/global_step0_universal, iteration 0" in run.stdout
    losses = [step["lm_loss"] for step in run.steps]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert losses[0] == pytest.approx(first_loss(flags, hf_folder), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("axis", "processes"), [("tensor", 2), ("pipeline", 2)])
def test_load_huggingface_starts_a_run_that_the_same_command_resumes(
    axis: str, processes: int, corpus: Path, data: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GPT2TokenizerFast

    hf_folder, saved = tmp_path / "hf", tmp_path / "saved"
    save_hf(hf_folder, "gpt2", max_shard_size="100KB", sizes=(VOCAB_SIZE + 40, 4))
    GPT2TokenizerFast(str(corpus / "vocab.json"), str(corpus / "merges.txt")).save_pretrained(hf_folder)
    corpus_flags = data[: data.index("--tokenizer-type")]
    start = ["--load-huggingface", str(hf_folder), *NO_DROPOUT, *SHORT, *corpus_flags]
    command = [*start, "--save", str(saved), f"--{axis}-model-parallel-size", str(processes)]
    run = pretrain([*command, "--exit-interval", "3"], processes=processes)
    assert run.exit_code == 0, run.stderr
    assert f"weights from {hf_folder}, iteration 0" in run.stdout
    losses = [step["lm_loss"] for step in run.steps]
    model = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
    positions = ["--max-position-embeddings", "32", *start[2:], "--vocab-size", str(VOCAB_SIZE)]
    expected = first_loss([*model, *positions], hf_folder)
    assert len(losses) == 3 and losses[0] == pytest.approx(expected, rel=1e-6)
    again = pretrain([*command, "--save-hf-interval", "4", "--save-hf-at-end"], processes=processes)
    assert again.exit_code == 0, again.stderr
    assert [step["iteration"] for step in again.steps] == [4, 5]
    for step in (4, 5):
        written = saved / f"huggingface_step{step}"
        assert f"wrote {written} in " in again.stdout and "GPT2LMHeadModel in fp32" in again.stdout
        assert len(AutoTokenizer.from_pretrained(written)) == VOCAB_SIZE
    # A run that starts from the last folder has the loss that this run reached.
    flags = ["--load-huggingface", str(saved / "huggingface_step5"), *command[2:-4], "--eval-only"]
    assert pretrain(flags).evaluations[-1]["lm_loss"] == pytest.approx(
        again.evaluations[-1]["lm_loss"], rel=1e-6
    )


@pytest.mark.full
def test_a_native_checkpoint_has_the_same_loss_after_a_round_trip_through_hugging_face(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, hf_folder, start = tmp_path / "saved", tmp_path / "hf", tmp_path / "start"
    flags = [*MODEL, *ABSOLUTE, *NO_DROPOUT, *SHORT, *data]
    run = pretrain([*flags, "--tensor-model-parallel-size", "2", "--save", str(saved)], processes=2)
    assert run.exit_code == 0, run.stderr
    convert_huggingface.main(["--load", str(saved), "--output", str(hf_folder)])
    convert_huggingface.main(
        ["--from-hugging-face", str(hf_folder), "--output", str(start / "global_step0_universal")]
    )
    again = pretrain([*flags, "--no-train", "--load", str(start)])
    assert again.exit_code == 0, again.stderr
    assert len(run.evaluations) == len(again.evaluations) == 2
    for before, after in zip(run.evaluations, again.evaluations, strict=True):
        assert after["lm_loss"] == pytest.approx(before["lm_loss"], rel=1e-6)


def test_the_command_of_the_page_for_olmo_3_converts_a_model_with_windows_in_some_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith(".venv") and "HF_OLMO3" in line)
    save_olmo_3(tmp_path / "HF_OLMO3", "olmo-3")
    script, *words = shlex.split(command)[1:]
    assert script == "tools/convert_huggingface.py"
    monkeypatch.chdir(tmp_path)
    convert_huggingface.main(words)
    printed = capsys.readouterr().out
    assert "wrote olmo3_start/global_step0_universal: Olmo3ForCausalLM of HF_OLMO3" in printed
    flags = [*printed_flags(printed), "--dry-run", "--lr", "1", "--train-iters", "1"]
    model = parse_args([*flags, "--micro-batch-size", "1", "--global-batch-size", "1"], {}).model
    assert (model.window_size, model.window_pattern) == (5, ("W", "W", "W", "F"))
    convert_checkpoint.main(["--from", "HF_OLMO3", "--to", "again/"])  # the other tool, without the flag
    assert sorted(os.listdir("again")) == ["global_step0_universal", "latest_universal"]
    batch = ["--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1", "--train-iters", "1"]
    assert parse_args(["--load", "again/", "--use-checkpoint-args", "--dry-run", *batch], {}).model == model
    assert (model.window_rotary_base, model.rope_scaling_type) == (None, "yarn")
    converted = read_checkpoint(tmp_path / "olmo3_start", universal=True)
    expected = hf_logits(tmp_path / "HF_OLMO3")
    assert expected.std() > 0.1
    torch.testing.assert_close(megatron_logits(converted), expected, rtol=1e-5, atol=1e-5)
