"""Trained models and rejected commands, shared by the tests of the tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.end_to_end.trained import VARIANTS, Trained, train_variant


@pytest.fixture(scope="session")
def train(
    corpus: Path, data: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """Returns a function that trains a variant, each variant only once."""
    return cache(lambda name: train_variant(name, tmp_path_factory.mktemp("trained"), corpus, data))


@pytest.fixture
def trained(train: Callable[[str], Trained]) -> Trained:
    """Returns any one trained model."""
    return train(next(iter(VARIANTS)))


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns a function that runs a tool's main with flags that it rejects, and returns its only output: one
    sentence on stderr."""

    def sentence(main: Callable[[list[str]], None], *flags: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main([*flags])
        assert caught.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("error: ")
        return printed.err

    return sentence
