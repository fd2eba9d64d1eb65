"""Command lines for the tests of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pytest

from megatron.arguments import parse_args
from megatron.config import ConfigError
from tests.unit.config.published_scripts import published

# A run that passes all checks with --dry-run, on one process.
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-samples 800 --dry-run"
).split()

RUN = [word for word in SMALL if word != "--dry-run"]
WITHOUT_LENGTH = [word for word in SMALL if word not in ("--train-samples", "800")]


def _on_one_data_set(name: str) -> list[str]:
    """Returns the words of a published script, with one data set and a DeepSpeed file, which do not exist."""
    flags = published(name).flags()
    words = "--data-path /nowhere/text_document --deepspeed_config ./no_such_config.json".split()
    for flag, values in flags.items():
        words += [] if "weighted" in flag or flag == "--data-path" else [flag, *values]
    return words


# 176 B parameters on 384 GPUs; and 104 B parameters in fp16, in a run whose length is counted in tokens.
BLOOM, GPT_104B = map(_on_one_data_set, ("tr11-176B-ml", "tr8b-104B-cl"))


def rows(text: str) -> list[tuple[str, list[str]]]:
    """Returns (flags, parts of the answer) of each row 'FLAGS => PART; PART'. Indented lines continue a
    row."""
    joined = re.sub(r"\n +", " ", text.strip()).splitlines()
    pairs = [(words.strip(), parts.strip()) for words, _, parts in (row.partition("=>") for row in joined)]
    return [(words, re.split(" *; *", parts) if parts else []) for words, parts in pairs]


def refusal(*words: str, base: Sequence[str] = SMALL, env: Mapping[str, str] | None = None) -> str:
    """Returns the error of a command line, which must be one sentence."""
    with pytest.raises(ConfigError) as caught:
        parse_args([*base, *words], env or {})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def check_refused(words: Sequence[str], parts: Iterable[str], base: Sequence[str] = SMALL) -> None:
    """Checks that the error of a command line contains these parts."""
    sentence = refusal(*words, base=base)
    assert [part for part in parts if part not in sentence] == [], sentence
