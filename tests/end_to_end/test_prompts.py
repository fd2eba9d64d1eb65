"""Trains on chats from jsonl. The losses equal transformers' loss with labels of -100."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.commands import convert_huggingface, evaluate, merge_datasets, preprocess_data, verify_dataset
from megatron.data.gpt_dataset import build_gpt_datasets, one_epoch
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample import SampleDataset
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import NO_DROPOUT
from tests.support.chat_tokenizer import random_chats, save_chat_tokenizer, write_rows
from tests.unit.data.token_files import data_config

SEQ, GLOBAL_BATCH, STEPS, SEED = 192, 8, 3, 1234
SEPARATE = ["--reset-attention-mask", "--reset-position-ids"]
LAYOUTS = {
    "dp4 zero1": (4, "--micro-batch-size 2 --zero-stage 1"),
    "1 process": (0, "--micro-batch-size 4"),
    "tp2": (2, "--micro-batch-size 2 --tensor-model-parallel-size 2"),
    "pp2": (2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"),
    "cp2": (2, "--micro-batch-size 2 --context-parallel-size 2"),
}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tiny Llama, its chat tokenizer, and token files of chats."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("chats")
    vocab_size = len(AutoTokenizer.from_pretrained(save_chat_tokenizer(folder / "llama")))
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, max_position_embeddings=SEQ, initializer_range=0.1, **sizes)
    )
    model.save_pretrained(folder / "llama")
    for part in range(2):
        rows = write_rows(folder / f"chat{part}.jsonl", random_chats(60, seed=part))
        preprocess_data.main(
            ["--input", str(rows), "--json-keys", "messages", "--output-prefix", str(folder / f"chat{part}")]
            + ["--tokenizer-name-or-path", str(folder / "llama")]
        )
    prefixes = [str(folder / f"chat{part}_messages_document") for part in range(2)]
    merge_datasets.main(["--input", *prefixes, "--output-prefix", str(folder / "chat")])
    return folder


def tune(folder: Path, processes: int, flags: str, *more: str, separate: bool = True):
    return pretrain(
        ["--load-huggingface", str(folder / "llama"), "--data-path", str(folder / "chat"), "--split", "1,0,0"]
        + f"--seq-length {SEQ} --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} --lr 1e-3".split()
        + "--lr-decay-style constant --log-interval 1 --eval-iters 0 --clip-grad 0 --weight-decay 0".split()
        + f"--seed {SEED} {flags}".split()
        + [*NO_DROPOUT, *(SEPARATE if separate else []), *more],
        processes=processes,
    )


def expected_losses(folder: Path) -> list[float]:
    """Trains transformers' model with AdamW in the order of the run, with each document as its own sequence.
    Returns the losses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    data = build_gpt_datasets(
        data_config(str(folder / "chat"), split="1,0,0"), SEQ, SEED, (GLOBAL_BATCH * STEPS, 0, 0)
    ).train
    assert data is not None
    losses = []
    for step in range(STEPS):
        samples = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        loss = masked_mean(model, [part for i in samples for part in documents(data, i)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def masked_mean(model: Any, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns transformers' loss over all labels of the documents. Each document is its own sequence."""
    count = sum((labels[1:] != -100).sum().item() for _, labels in parts)
    losses = [
        model(input_ids=ids[None], labels=labels[None], num_items_in_batch=count).loss
        for ids, labels in parts
        if (labels[1:] != -100).any()
    ]
    return torch.stack(losses).sum()


def documents(data: SampleDataset, i: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the ids and labels, in transformers' form, of each document of a sample."""
    tokens, counts, ids = data.sample(i)
    assert counts is not None and ids is not None
    labels = np.where(counts, tokens, -100)
    cuts = np.flatnonzero(np.diff(ids)) + 1
    parts = zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True)
    return [(torch.from_numpy(part), torch.from_numpy(part_labels)) for part, part_labels in parts]


@cache
def reference(folder: Path) -> tuple[float, ...]:
    tune(folder, 0, LAYOUTS["1 process"][1], "--exit-interval", "1").ok()  # builds the index files
    return tuple(expected_losses(folder))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_on_chats_has_the_masked_losses_of_transformers(prepared: Path, name: str) -> None:
    run = tune(prepared, *LAYOUTS[name]).ok()
    losses = [step["lm_loss"] for step in run.steps]
    assert losses == pytest.approx(reference(prepared), rel=1e-6)


def test_data_of_prompts_need_separate_documents(prepared: Path) -> None:
    run = tune(prepared, 0, LAYOUTS["1 process"][1], separate=False)
    (sentence,) = run.errors
    assert run.exit_code == 2 and "has a loss mask" in sentence and "--reset-attention-mask" in sentence


def test_merged_files_are_verified_with_their_mask(prepared: Path, capsys, tmp_path: Path) -> None:
    verify_dataset.main([str(prepared / "chat")])
    counted = [
        int(np.fromfile(f"{prepared}/chat{part}_messages_document_loss_mask.bin", "u1").sum())
        for part in range(2)
    ]
    assert f"loss mask   {sum(counted):,} tokens count in the loss" in capsys.readouterr().out
    for name in os.listdir(prepared):
        if name.startswith("chat0_messages_document"):
            (tmp_path / name).write_bytes((prepared / name).read_bytes())
    mask = tmp_path / "chat0_messages_document_loss_mask.bin"
    for change, reason in (
        (lambda found: bytes([1 - found[0]]) + found[1:], "its SHA-256 is"),
        (lambda found: b"\x02" + found[1:], "it has the number 2"),
        (lambda found: found[:-1], "truncated"),
        (None, "does not exist"),
    ):
        found = mask.read_bytes()
        if change is None:
            mask.unlink()
            mask.with_suffix(".idx").unlink()
        else:
            mask.write_bytes(change(found))
        with pytest.raises(SystemExit, match="2"):
            verify_dataset.main([str(tmp_path / "chat0_messages_document")])
        assert reason in capsys.readouterr().err
        if change is not None:
            mask.write_bytes(found)


def test_a_resumed_run_on_another_layout_has_the_same_lines(prepared: Path, tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path), "--save-interval", "1"]
    whole = tune(prepared, 0, LAYOUTS["1 process"][1]).ok()
    first = tune(prepared, 0, LAYOUTS["1 process"][1], *saved, "--exit-interval", "1").ok()
    rest = tune(prepared, 2, LAYOUTS["pp2"][1], *saved).ok()
    losses = [step["lm_loss"] for step in (*first.steps, *rest.steps)]
    assert losses == pytest.approx([step["lm_loss"] for step in whole.steps], rel=1e-5)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("layout", ["--pipeline-model-parallel-size 2", ""])
def test_the_tool_evaluates_documents_apart(prepared: Path, tmp_path: Path, layout: str) -> None:
    """The documents contain the end-of-document token in their middle, too, so the token alone does not
    separate them."""
    chat, flags = str(prepared / "chat"), ["--save", str(tmp_path), "--save-interval", "1", "--lr", "1e-30"]
    tune(prepared, 0, LAYOUTS["1 process"][1], *flags, "--exit-interval", "1").ok()
    run = pretrain(
        ["--load", str(tmp_path), "--data-path", chat, "--subset", "all", "--samples", "8", *layout.split()],
        script="tools/evaluate.py",
    ).ok()
    (loss,) = re.findall(r"lm loss: (\S+)", run.stdout)
    assert float(loss) == pytest.approx(loss_of_transformers(prepared), rel=1e-5)


def loss_of_transformers(prepared: Path) -> float:
    """Returns the loss of the model in the folder on the first eight samples, each document on its own."""
    from transformers import AutoModelForCausalLM

    data = one_epoch(IndexedDataset(str(prepared / "chat")), "all", range(120), SEQ, SEED)
    model = AutoModelForCausalLM.from_pretrained(prepared / "llama", dtype=torch.float32)
    return masked_mean(model, [part for i in range(8) for part in documents(data, i)]).item()


def test_the_tool_evaluates_documents_apart_before_the_fine_tuning(
    prepared: Path, tmp_path: Path, capsys
) -> None:
    """A converted model does not record that documents are separated: flags do it, and a note names them."""
    converted = str(tmp_path / "global_step0_universal")
    convert_huggingface.main(["--from-hugging-face", str(prepared / "llama"), "--output", converted])
    flags = ["--load", converted, "--data-path", str(prepared / "chat"), "--samples", "8"]
    flags += ["--seq-length", str(SEQ)]
    losses = []
    for more in ([], SEPARATE):
        capsys.readouterr()
        evaluate.main([*flags, *more])
        printed = capsys.readouterr()
        assert ("its documents attend to each other: set --reset-attention-mask" in printed.err) is (
            more == []
        )
        losses.append(float(re.findall(r"lm loss: (\S+)", printed.out)[0]))
    expected = loss_of_transformers(prepared)
    assert losses[1] == pytest.approx(expected, rel=1e-5) and abs(losses[0] - expected) > 1e-4 * expected
