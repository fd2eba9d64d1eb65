"""The cache of keys and values for generation token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


class KeyValueCache:
    """Keys and values of this rank's layers and heads, for the texts of a batch. Each text has a row of the
    cache, and its tokens have the columns 0, 1, ... of the row, whatever the lengths of the other texts are.

    In a `starting` pass the layers compute the first tokens of texts as usual, and the cache stores their
    keys and values. In an `extending` pass the layers compute only the next tokens, whose queries attend to
    the stored keys. In every other pass, for example in training, the cache does nothing.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        """The positions of the new tokens, int64 [batch, new], inside of `extending`; otherwise None."""
        self._rows: list[int] | None = None
        self._num_keys = 0
        self._places: tuple[Tensor, Tensor]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_pass: dict[object, object] = {}

    @contextmanager
    def starting(self, rows: Sequence[int]) -> Iterator[None]:
        """Returns a context that stores the keys and values of a pass. rows: the cache's row of each text of
        the batch. The old content of these rows is lost."""
        self._rows = list(rows)
        try:
            yield
        finally:
            self._rows = None

    @contextmanager
    def extending(self, positions: Tensor, num_keys: int) -> Iterator[None]:
        """Returns a context in which a pass extends the texts of the rows 0, 1, ... of the cache by the
        tokens at `positions`. All positions are below `num_keys`."""
        self.positions, self._num_keys = positions, num_keys
        self._places = positions.t(), torch.arange(len(positions), device=positions.device)
        try:
            yield
        finally:
            self.positions = None
            self._of_pass.clear()

    def clear(self) -> None:
        """Frees the memory of all keys and values."""
        self._kept.clear()

    def new_tokens(self, x: Tensor) -> Tensor:
        """Returns the elements of `x` [batch or 1, seq] that the pass computes: all of them, or inside of
        `extending` the elements of the new tokens, [batch, new]."""
        if self.positions is None:
            return x
        return x.expand(len(self.positions), -1).gather(1, self.positions)

    def once_per_pass(self, owner: object, compute: Callable[[], T]) -> T:
        """Returns compute(). In an extending pass all layers share one result per `owner`."""
        if owner not in self._of_pass:
            self._of_pass[owner] = compute()
        return cast(T, self._of_pass[owner])

    def update(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Stores the keys and values of a layer's new tokens, [new, batch, groups, head_dim]. In an extending
        pass it returns the keys and values of all tokens, [keys, batch, groups, head_dim]; otherwise None."""
        if self.positions is None:
            if self._rows is None:
                return None
            kept = self._reserve(layer_index, key, value, len(key), max(self._rows) + 1)
            for old, new in zip(kept, (key, value), strict=True):
                old[: len(new), self._rows] = new
            return None
        batch = key.shape[1]
        keys, values = self._reserve(layer_index, key, value, self._num_keys, batch)
        keys[self._places], values[self._places] = key, value
        return keys[: self._num_keys, :batch], values[: self._num_keys, :batch]

    def _reserve(
        self, layer_index: int, key: Tensor, value: Tensor, length: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the buffers of a layer. If they are too short, their length grows to a power of two."""
        kept = self._kept.get(layer_index)
        if kept is None or kept[0].shape[0] < length or kept[0].shape[1] < rows:
            old_length, old_rows = (0, 0) if kept is None else kept[0].shape[:2]
            sizes = (1 << (max(length, old_length) - 1).bit_length(), max(rows, old_rows))
            # The buffers start with zeros: a masked key counts as 0 x value, and 0 x NaN is NaN.
            grown = key.new_zeros(*sizes, *key.shape[2:]), value.new_zeros(*sizes, *value.shape[2:])
            if kept is not None:
                for new, old in zip(grown, kept, strict=True):
                    new[:old_length, :old_rows] = old
            kept = self._kept[layer_index] = grown
        return kept
