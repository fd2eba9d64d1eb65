"""Runs the command tools/train_tokenizer.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron.commands import train_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.unit.tokenizer.vocabularies import TEXT


def train(folder: Path, *inputs: Path, vocab_size: int = 320) -> GPT2BPETokenizer:
    flags = ["--input", *map(str, inputs), "--vocab-size", str(vocab_size), "--output-dir", str(folder)]
    train_tokenizer.main(flags)
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXT))
    return path


def test_the_vocabulary_has_the_given_size_and_encodes_any_text(jsonl: Path, tmp_path: Path) -> None:
    tokenizer = train(tmp_path / "made" / "here", jsonl)
    assert tokenizer.vocab_size == 320
    assert tokenizer.eod == 0
    assert tokenizer.detokenize([0]) == "<|endoftext|>"
    unseen = "Ω≈ç√ \x00 \t\r\n 東京 🙂"
    assert tokenizer.detokenize(tokenizer.tokenize(unseen)) == unseen
    assert len(tokenizer.tokenize(TEXT[0])) < len(TEXT[0].encode())


def test_gzipped_and_plain_text_give_the_same_tokenizer(tmp_path: Path) -> None:
    lines = [text.strip() + "\n" for text in TEXT]
    as_json = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    contents = {"a.jsonl": as_json.encode(), "b.txt": "".join(lines).encode()}
    contents["c.jsonl.gz"] = gzip.compress(contents["a.jsonl"])
    merges = set()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        train(tmp_path / "made", tmp_path / name)
        merges.add((tmp_path / "made" / "merges.txt").read_text())
    assert len(merges) == 1


def test_a_text_with_too_few_pairs_is_reported(
    jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train(tmp_path, jsonl, vocab_size=30000)
    assert tokenizer.vocab_size < 30000
    assert f"only {tokenizer.vocab_size:,} tokens, not 30,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--vocab-size": "100"}, ["--vocab-size is 100", "at least 257"]),
        ({"--input": "/no/such.jsonl"}, ["--input /no/such.jsonl"]),
        ({"--json-key": "body"}, ["line 1", "no key 'body'", "--json-key"]),
        ({"--min-frequency": "0"}, ["--min-frequency is 0"]),
        ({"--output-dir": "/proc/nowhere"}, ["--output-dir /proc/nowhere"]),
        ({"--vocab-sise": "3"}, ["--vocab-sise"]),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    changes: dict[str, str],
    words: list[str],
    jsonl: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {"--input": str(jsonl), "--vocab-size": "300", "--output-dir": str(tmp_path), **changes}
    with pytest.raises(SystemExit) as caught:
        train_tokenizer.main([word for pair in flags.items() for word in pair])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words)
