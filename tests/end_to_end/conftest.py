"""Trained models, shared by the tests of the tools."""

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
    """Trains a variant; each only once."""
    return cache(lambda name: train_variant(name, tmp_path_factory.mktemp("trained"), corpus, data))


@pytest.fixture
def trained(train: Callable[[str], Trained]) -> Trained:
    """Any one of them."""
    return train(next(iter(VARIANTS)))
