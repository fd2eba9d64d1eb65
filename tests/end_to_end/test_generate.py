"""Compares tools/generate.py with a GPT in plain PyTorch, on checkpoints of several layouts and models."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.reading import load_model, read_checkpoint
from megatron.commands import generate
from megatron.model.inference import generation
from tests.end_to_end.trained import NEW_TOKENS, SEQ, VARIANTS, Trained

PROMPT = "def main(argv):\n    for argument in"


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    generate.main(list(flags))
    return capsys.readouterr().out


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_text_is_the_argmax_of_a_plain_gpt(
    name: str, train: Callable[[str], Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(name)
    printed = output(
        capsys, "--load", str(trained.folder), "--prompt", PROMPT, "--greedy", "--max-new-tokens", "40"
    )
    expected = trained.greedy_tokens(PROMPT)
    assert len(set(expected)) > 1 or len(expected) == NEW_TOKENS
    assert printed == PROMPT + trained.tokenizer.detokenize(expected) + "\n"


def test_padding_is_never_sampled(trained: Trained) -> None:
    checkpoint = read_checkpoint(str(trained.folder))
    model = load_model(checkpoint, fp32_on_cpu=True)
    table = model.tied_modules["embed"].word_embeddings.weight
    assert table.shape[0] > checkpoint.vocab_size
    with torch.no_grad():
        table[checkpoint.vocab_size :] = 100 * table.abs().max()
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, checkpoint.vocab_size)

    text = generation.Continuation(trained.tokenizer.detokenize, [5], 200)
    sampling = generation.Sampling(temperature=50.0)
    for _ in generation.generate(model, [text], sampling, window=SEQ, eod=checkpoint.eod, seed=3):
        pass
    assert len(set(text.tokens)) > 10
    assert max(text.tokens) < checkpoint.vocab_size


@pytest.mark.full
def test_a_sample_is_the_same_for_the_same_seed_and_another_for_another(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load", str(trained.folder / "global_step5"), "--prompt", PROMPT, "--seed"]
    first, again, other = (output(capsys, *flags, seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first.startswith(PROMPT)


def test_several_prompts_do_not_influence_each_other(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The texts of a batch are printed in the order of the prompts, whichever text is complete first."""
    flags = ["--load", str(trained.folder), "--max-new-tokens", "10", "--top-k", "20", "--stop", "e"]
    prompts = ["class A", "import os", "x = 1\u2028y"]
    alone = [output(capsys, *flags, "--prompt", prompt) for prompt in prompts]
    assert len({len(text) for text in alone}) > 1
    for prompt, text in zip(prompts, alone, strict=True):
        assert text.startswith(prompt) and "e" not in text.removeprefix(prompt)
    (tmp_path / "prompts").write_text("\n".join(prompts[1:]) + "\n", encoding="utf-8")
    together = [*flags, "--prompt", prompts[0], "--prompt-file", str(tmp_path / "prompts")]
    for size in ("1", "2", "8"):
        assert output(capsys, *together, "--batch-size", size) == ("-" * 40 + "\n").join(alone)


def test_a_prompt_comes_from_stdin(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--load", str(trained.folder), "--greedy", "--max-new-tokens", "5"]
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert output(capsys, *flags) == output(capsys, *flags, "--prompt", "import os")


def test_a_hostile_prompt_on_stdin_is_one_sentence(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors in ("strict", "surrogateescape"):  # as in a UTF-8 locale, and in the C locale
        text = io.TextIOWrapper(io.BytesIO(b"import \xff"), "utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", text)
        assert mistake(generate.main, "--load", ".").startswith("error: stdin is not UTF-8 text ")


def test_a_tokenizer_that_was_moved_is_named_by_flags(
    trained: Trained, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    flags = ["--load", str(trained.folder), "--greedy", "--max-new-tokens", "5", "--prompt", "x"]
    moved = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    assert output(capsys, *flags, *moved) == output(capsys, *flags)


def test_a_special_token_in_a_prompt_is_text_without_the_flag(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[int]] = []
    monkeypatch.setattr(
        generation, "generate", lambda _model, texts, *_, **__: given.append(texts[0].prompt) or []
    )
    flags = ["--load", str(trained.folder), "--prompt", "a<|endoftext|>b"]
    for more in ((), ("--parse-special-tokens",)):
        output(capsys, *flags, *more)
    a, b = (trained.tokenizer.tokenize(text) for text in "ab")
    assert trained.tokenizer.eod not in given[0] and given[1] == [*a, trained.tokenizer.eod, *b]
    assert trained.tokenizer.detokenize(given[0]) == trained.tokenizer.detokenize(given[1])


def test_a_prompt_beyond_the_sequence_length_is_truncated_with_a_note(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, is_truncated in ((SEQ, False), (SEQ + 1, True)):
        prompt = trained.tokenizer.detokenize([5] * count)
        assert len(trained.tokenizer.tokenize(prompt)) == count
        flags = ["--load", str(trained.folder), "--prompt", prompt, "--greedy", "--max-new-tokens", "1"]
        generate.main(flags)
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert len(notes) == is_truncated
        assert all(f"{SEQ + 1} tokens" in note and f"length is {SEQ}:" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--load", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
        (["--load", "."], ["holds no checkpoint", "latest"]),
        (["--load", ".", "--top-k", "-1"], ["--top-k -1"]),
        (["--load", ".", "--temperature", "1e-300"], ["--temperature 1e-300", "at least 1e-06"]),
        (["--load", ".", "--prompt", "\udcff"], ["--prompt is not UTF-8 text"]),
        (["--load", "x" * 300], ["there is no such folder"]),
        (["--load", ".", "--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
        (["--load", ".", "--batch-size", "0"], ["--batch-size is 0"]),
        (["--load", ".", "--stop", ""], ["--stop is an empty string"]),
        (["--load", ".", "--prompt-file", "none"], ["--prompt-file none cannot be read"]),
        (["--load", ".", "--seed", "-1"], ["--seed is -1"]),
        (["--load", ".", "--temprature", "1"], ["--temprature"]),
        ([], ["--load"]),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    flags: list[str],
    words: list[str],
    mistake: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a user may have checkpoints in the checkout
    sentence = mistake(generate.main, *flags, "--prompt", "x")
    assert all(word in sentence for word in words)


def test_another_tokenizer_is_refused(trained: Trained, tmp_path: Path, mistake: Callable[..., str]) -> None:
    from tests.unit.tokenizer.vocabularies import train_gpt2_vocabulary

    vocab, merges = train_gpt2_vocabulary(tmp_path)
    flags = ["--load", str(trained.folder), "--prompt", "x", "--vocab-file", vocab, "--merge-file", merges]
    assert f"was trained with {trained.tokenizer.vocab_size} tokens" in mistake(generate.main, *flags)
