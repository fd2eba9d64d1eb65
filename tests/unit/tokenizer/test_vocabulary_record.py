"""Token files and checkpoints are rejected with a vocabulary different from their own."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.data.preprocessing import preprocess
from megatron.errors import UserError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.vocabulary_record import (
    check_record,
    common_digest,
    record_path,
    vocabulary_digest,
    write_record,
)
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary


@pytest.fixture
def original(tmp_path: Path) -> Namespace:
    vocab, merges = train_gpt2_vocabulary(tmp_path)
    return tokenizer_flags(vocab_file=vocab, merge_file=merges)


@pytest.fixture
def other(original: Namespace, tmp_path: Path) -> Namespace:
    """Returns the flags of a tokenizer whose vocabulary has two tokens exchanged."""
    vocabulary = json.loads(Path(original.vocab_file).read_text())
    first, second = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(vocabulary))
    return tokenizer_flags(vocab_file=str(path), merge_file=original.merge_file)


@pytest.fixture
def prefix(original: Namespace, tmp_path: Path) -> str:
    """Returns the prefix of token files made with `original`."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT))
    preprocess([str(text)], str(tmp_path / "data"), ["text"], original)
    return str(tmp_path / "data_text_document")


def test_token_files_record_their_vocabulary(original: Namespace, prefix: str) -> None:
    check_record(prefix, "--data-path", vocabulary_digest(build_tokenizer(original)))


def test_another_vocabulary_of_the_same_size_is_refused(other: Namespace, prefix: str) -> None:
    digest = vocabulary_digest(build_tokenizer(other))
    with pytest.raises(UserError, match=f"--data-path {prefix} was tokenized with a vocabulary") as refused:
        check_record(prefix, "--data-path", digest)
    assert digest[:12] in str(refused.value)


def test_files_of_other_programs_without_a_record_are_accepted(other: Namespace, prefix: str) -> None:
    Path(record_path(prefix)).unlink()
    check_record(prefix, "--data-path", vocabulary_digest(build_tokenizer(other)))


def test_new_token_files_replace_the_record(other: Namespace, prefix: str, tmp_path: Path) -> None:
    preprocess([str(tmp_path / "text.jsonl")], str(tmp_path / "data"), ["text"], other)
    check_record(prefix, "--data-path", vocabulary_digest(build_tokenizer(other)))


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b'{"vocabulary_sha256": 1}', b"x" * 100_000, b"\xff"]
)
def test_a_hostile_record_is_named(content: bytes, original: Namespace, prefix: str) -> None:
    path = Path(record_path(prefix))
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} cannot be read"):
        check_record(prefix, "--data-path", vocabulary_digest(build_tokenizer(original)))


def test_a_record_is_written_atomically(original: Namespace, prefix: str, monkeypatch) -> None:
    before = Path(record_path(prefix)).read_bytes()

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError):
        write_record(prefix, build_tokenizer(original))
    assert Path(record_path(prefix)).read_bytes() == before


def test_without_a_tokenizer_the_records_are_compared_with_each_other(
    original: Namespace, other: Namespace, prefix: str, tmp_path: Path
) -> None:
    unrecorded = ("--data-path", str(tmp_path / "none"))
    assert common_digest([unrecorded]) is None
    digest = vocabulary_digest(build_tokenizer(original))
    assert common_digest([unrecorded, ("--data-path", prefix), ("--data-path", prefix)]) == digest
    preprocess([str(tmp_path / "text.jsonl")], str(tmp_path / "other"), ["text"], other)
    second = str(tmp_path / "other_text_document")
    with pytest.raises(UserError, match=f"--data-path {second} and {prefix} .* different vocabularies"):
        common_digest([("--data-path", prefix), ("--data-path", second)])
