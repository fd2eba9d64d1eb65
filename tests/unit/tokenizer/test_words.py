"""Compares tokenizing word by word with the `tokenizers` library, for the word patterns of
published models."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from megatron.tokenizer import words
from megatron.tokenizer.words import WordEncoder
from tests.unit.tokenizer.test_fast import texts
from tests.unit.tokenizer.vocabularies import train_gpt2_vocabulary

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(*patterns: str) -> Any:
    stages = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*stages, pre_tokenizers.ByteLevel(False, use_regex=False)])


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re)?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KINDS = {
    "gpt2": (GPT2, None),
    "llama3": (split(LLAMA3), None),
    "qwen2": (split(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
    "o200k": (split(O200K), None),
    "bloom": (split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), None),
    "deepseek": (split(*DEEPSEEK), None),
    "starcoder": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), GPT2]), normalizers.NFKC()),
}
ADDED = [AddedToken("<|x|>", normalized=False), AddedToken("    "), AddedToken("  \n"), AddedToken("<|x|>>")]
# Letters, marks, digits and spaces of several kinds, unassigned characters, and parts of added tokens.
CHARACTERS = (
    "aZé1٣² \n\r\t.'s，。一あ\u0301ſK;\u2028\u00a0\x1c\x85\x00🙂\U000e0100ﬁ한ㅏ\u0915\u093f\u0378\U0001fffe"
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


def library(vocabulary: tuple[str, str], pre_tokenizer: Any, normalizer: Any = None) -> Any:
    """Returns a tokenizer with added tokens, as the classes of this package wrap it."""
    source = Tokenizer(models.BPE.from_file(*vocabulary))
    source.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        source.normalizer = normalizer
    source.add_tokens(ADDED)
    return SimpleNamespace(source=source, tokenize=lambda text: source.encode(text).ids)


def nasty_texts() -> list[str]:
    generator = random.Random(2)
    pieces = [*CHARACTERS, "<|x|>", "<|x|>>", "    ", "  \n"]
    mixed = ["".join(generator.choices(pieces, k=generator.randrange(40))) for _ in range(600)]
    # Each character of the first planes, in order.
    characters = ["".join(map(chr, range(start, start + 256))) for start in range(0, 0x3400, 256)]
    return ["", *texts(), *mixed, *characters]


# Other tests of the gate train with the word pattern of gpt2.
@pytest.mark.gate(rows=0, also=("qwen2", "deepseek"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_the_ids_of_the_library(
    kind: str, vocabulary: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = library(vocabulary, *KINDS[kind])
    given = nasty_texts()
    expected = [tokenizer.tokenize(text) for text in given]
    for long_text, table in ((1 << 16, 1 << 18), (3, 10)):  # long texts, and a table that is always full
        monkeypatch.setattr(words, "LISTED_CHARACTERS", long_text)
        monkeypatch.setattr(words, "MAX_WORDS", table)
        encoder = WordEncoder(tokenizer)
        ids, sizes = encoder.encode_texts(given)
        found = np.split(ids, np.cumsum(sizes)[:-1])
        assert [part.tolist() for part in found] == expected
        assert len(encoder._ids) <= table
        # The encoder itself handles emoji and the characters of Unicode 3.2, without the library.
        assert encoder._disputed.isdisjoint({*CHARACTERS} - {*"\U000e0100\u0378\U0001fffe"})


def test_a_long_word_is_tokenized_in_parts(
    vocabulary: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = library(vocabulary, GPT2)
    monkeypatch.setattr(words, "PART_CHARACTERS", 40)
    encoder, generator = WordEncoder(tokenizer), random.Random(3)
    # Random letters, and parts of tokens of the vocabulary without a space.
    tokens = [token for token in tokenizer.source.get_vocab() if token.isalpha() and token.isascii()]
    given = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=k)) for k in range(70, 400)]
    given += ["".join(generator.choices(tokens, k=100)) for _ in range(200)]
    given += ["e" * 500, "the" * 100, "дом" * 300, "".join(generator.choices("本語ü🙂aé", k=400))]
    ids, sizes = encoder.encode_texts(given)
    found = np.split(ids, np.cumsum(sizes)[:-1])
    assert [part.tolist() for part in found] == [tokenizer.tokenize(text) for text in given]
    assert sum(len([*encoder._ids._parts(text)]) for text in given) > 3 * len(given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "without a space in front"),
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, "does not end with ByteLevel"),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(False, use_regex=False)}, "does not split texts"),
        ({"pre_tokenizer": split(r"(a)\1")}, "has groups"),
        ({"pre_tokenizer": split("a*")}, "matches empty words"),
        ({"pre_tokenizer": split(r"\h+|.")}, "differently|cannot read"),  # \h: hexadecimal, or a space
        ({"normalizer": normalizers.Lowercase()}, "normalizer is Lowercase"),
        ({"added": AddedToken("<mask>", lstrip=True)}, "token <mask> depends on the text around it"),
        ({"model": models.WordPiece({"a": 0})}, "not a BPE"),
        ({"model": models.BPE({"a": 0}, [], end_of_word_suffix="</w>")}, "depend on their place in a word"),
        ({"encode_special_tokens": True}, "splits special tokens"),
    ],
)
def test_what_is_not_known_to_be_equal_is_rejected(
    change: dict[str, Any], reason: str, vocabulary: tuple[str, str]
) -> None:
    tokenizer = library(vocabulary, GPT2)
    if "added" in change:
        tokenizer.source.add_tokens([change["added"]])
    else:
        ((name, value),) = change.items()
        setattr(tokenizer.source, name, value)
    with pytest.raises(ValueError, match=reason):
        WordEncoder(tokenizer)
