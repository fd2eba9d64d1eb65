"""Runs the commands of docs/finetuning.md in order on a tiny BLOOM, and interrupts a fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import VOCAB_SIZE
from tests.end_to_end.clone import commands_in, make_clone, run
from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT
from tests.support.chat_tokenizer import random_chats, write_rows
from tests.unit.checkpoint.hugging_face_folder import save_hf

# Values of the page -> smaller values.
SMALL = {
    "--seq-length 1024": "--seq-length 32",
    "--train-iters 2000": "--train-iters 4",
    "--lr-warmup-iters 100": "--lr-warmup-iters 1",
    "--save-interval 500": "--save-interval 2",
    "--global-batch-size 16": "--global-batch-size 4",
    "--eval-interval 500": "--eval-interval 2",
    "--eval-iters 10": "--eval-iters 1",
}


def commands() -> list[str]:
    """Returns the commands of the page's bash blocks, with smaller values."""
    text = "\n".join(commands_in("docs/finetuning.md"))
    for given, small in SMALL.items():
        assert given in text
        text = text.replace(given, small)
    return text.splitlines()


@pytest.fixture
def clone(tmp_path: Path, corpus: Path) -> Path:
    """Returns a clone of the repository with a model in it."""
    from transformers import GPT2TokenizerFast

    model = make_clone(tmp_path, corpus) / "bloom-560m"
    save_hf(model, "bloom", sizes=(VOCAB_SIZE, 2))
    GPT2TokenizerFast(str(corpus / "vocab.json"), str(corpus / "merges.txt")).save_pretrained(model)
    return tmp_path


@pytest.mark.full
def test_the_page_fine_tunes_bloom_and_converts_it_back(clone: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert, tokenize, tune, export, *chats, further = commands()
    run(convert, clone)
    run(tokenize, clone)
    log = run(f"{tune} --exit-interval 2", clone)
    assert "weights from runs/bloom/global_step0_universal, iteration 0" in log and "(--finetune)" in log
    log = run(tune, clone)
    assert "starting from runs/tuned/global_step2, iteration 2" in log and "4/       4" in log
    run(export, clone)
    before, after = (
        AutoModelForCausalLM.from_pretrained(clone / name, dtype=torch.float32).state_dict()
        for name in ("bloom-560m", "my_bloom_tuned")
    )
    assert before.keys() == after.keys()
    assert not torch.equal(
        before["transformer.h.0.mlp.dense_4h_to_h.weight"], after["transformer.h.0.mlp.dense_4h_to_h.weight"]
    )
    assert len(AutoTokenizer.from_pretrained(clone / "my_bloom_tuned")) == VOCAB_SIZE
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    (clone / "bloom-560m" / "chat_template.jinja").write_text(template)
    write_rows(clone / "chat.jsonl", random_chats(100))
    preprocess, verify, chat = chats
    assert "count in the loss" in run(preprocess, clone) and "loss mask   " in run(verify, clone)
    assert "4/       4" in run(chat, clone)
    log = run(further, clone)
    assert "weights from runs/tuned/global_step4, iteration 4" in log and "4/       4" in log
    record = json.loads((clone / "runs/tuned-further/global_step4/run.json").read_text())
    assert record["origin"]["folder"] == "global_step4" and record["origin"]["weights_only"]


BASE = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3 --eval-iters 0 --log-interval 1"
TUNE = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 1 "
    "--train-iters 6 --eval-iters 1 --eval-interval 6 --log-interval 1 --seed 7 --save-interval 2"
)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["--zero-stage 1 --bf16", "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 1024"]
)
def test_interrupted_fine_tuning_prints_the_lines_of_uninterrupted(
    layout: str, data: list[str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    pretrain([*MODEL, *ABSOLUTE, *NO_DROPOUT, *BASE.split(), *data, "--save", str(base)]).ok()
    own_data = [*data[: data.index("--split")], "--split", "500,400,100"]
    common = [*TUNE.split(), *layout.split(), *own_data, "--load", str(base), "--use-checkpoint-args"]

    def tune(save: str, *flags: str) -> Run:
        command = [*common, "--finetune", "--save", str(tmp_path / save), *flags]
        return pretrain(command, processes=2).ok()

    uninterrupted = tune("uninterrupted")
    parts = [tune("parts", "--exit-interval", step) for step in ("2", "4")] + [tune("parts")]
    assert [step["iteration"] for step in uninterrupted.steps] == [1, 2, 3, 4, 5, 6]
    assert [step for run in parts for step in run.steps] == uninterrupted.steps
    assert parts[-1].evaluations == uninterrupted.evaluations
    assert "weights from" in parts[0].stdout and "starting from" in parts[1].stdout


def test_flags_that_differ_from_the_checkpoints_are_one_sentence(tmp_path: Path) -> None:
    run = pretrain(["--load", str(tmp_path), "--use-checkpoint-args"], processes=2)
    (sentence,) = run.errors
    assert f"--use-checkpoint-args: --load {tmp_path} holds no checkpoint" in sentence
    assert run.rank_exit_codes == {2}
