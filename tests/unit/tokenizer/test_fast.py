"""Compares gigatoken with the libraries of the tokenizers, and tests what it does not support."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.backends import texts_encoder
from megatron.tokenizer.fast import GigatokenEncoder, ReferenceEncoder
from megatron.tokenizer.words import WordEncoder
from tests.unit.tokenizer.test_tokenizers import TRICKY, train_sentence_piece
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary


def sentence_piece(folder: Path, model_type: str) -> Tokenizer:
    path = train_sentence_piece(folder / f"{model_type}.model", model_type=model_type)
    return build_tokenizer(tokenizer_flags(tokenizer_model=path))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    from transformers import GPT2Tokenizer

    folder = tmp_path_factory.mktemp("tokenizers")
    vocab, merges = train_gpt2_vocabulary(folder)
    GPT2Tokenizer(vocab, merges).save_pretrained(folder / "hf")
    return {
        "gpt2": build_tokenizer(tokenizer_flags(vocab_file=vocab, merge_file=merges)),
        "transformers": build_tokenizer(tokenizer_flags(tokenizer_name_or_path=str(folder / "hf"))),
        "sentencepiece": sentence_piece(folder, "bpe"),
        "unigram": sentence_piece(folder, "unigram"),
    }


def texts() -> list[str]:
    """Returns difficult texts, and random pieces of them in random order."""
    generator = random.Random(1)
    mixed = []
    for _ in range(300):
        parts = generator.choices(TRICKY, k=4)
        cuts = [sorted(generator.sample(range(len(part) + 1), min(2, len(part) + 1))) for part in parts]
        mixed.append("".join(part[cut[0] : cut[-1]] for part, cut in zip(parts, cuts, strict=True)))
    return [*TRICKY, *mixed]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("gpt2", "auto"), ("gpt2", "words"), ("transformers", "gigatoken"), ("transformers", "words")),
        ("sentencepiece", "auto"),
    ],
)
def test_the_ids_are_those_of_the_tokenizers_library(
    name: str, backend: str, tokenizers: dict[str, Tokenizer]
) -> None:
    encoder = texts_encoder(tokenizers[name], backend)
    assert isinstance(encoder, WordEncoder if backend == "words" else GigatokenEncoder)
    for is_first in (True, False):
        ids, sizes = encoder.encode(texts(), is_first)
        expected_ids, expected_sizes = ReferenceEncoder(tokenizers[name]).encode(texts(), is_first)
        assert np.array_equal(ids, expected_ids) and np.array_equal(sizes, expected_sizes)
    assert [len(part) for part in encoder.encode([], True)] == [0, 0]


@pytest.mark.parametrize("backend", ["gigatoken", "words"])
def test_other_ids_are_noticed_in_every_batch(
    backend: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers["gpt2"]
    encoder = texts_encoder(tokenizer, backend)
    monkeypatch.setattr(tokenizer, "tokenize", lambda text: [*text.encode(), 0])
    for is_first in (True, False):
        with pytest.raises(UserError, match="other token ids .*set --tokenizer-backend reference"):
            encoder.encode(TEXT, is_first)


def test_what_gigatoken_does_not_support_is_tokenized_by_the_library(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(texts_encoder(tokenizers["unigram"], "auto"), ReferenceEncoder)
    with pytest.raises(
        UserError, match="gigatoken does not support this tokenizer .*set --tokenizer-backend reference"
    ):
        texts_encoder(tokenizers["unigram"], "gigatoken")
    assert isinstance(texts_encoder(tokenizers["gpt2"], "reference"), ReferenceEncoder)
    with pytest.raises(UserError, match="words does not support this tokenizer"):
        texts_encoder(tokenizers["unigram"], "words")
    monkeypatch.setitem(sys.modules, "awkward", None)  # gigatoken without its dependency
    assert isinstance(texts_encoder(tokenizers["gpt2"], "auto"), WordEncoder)
    assert isinstance(texts_encoder(tokenizers["sentencepiece"], "auto"), ReferenceEncoder)
    with pytest.raises(UserError, match="pip install gigatoken"):
        texts_encoder(tokenizers["gpt2"], "gigatoken")
