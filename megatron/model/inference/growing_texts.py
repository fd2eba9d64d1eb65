"""Computes logits of the next token for texts that grow, with passes over as few tokens as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.model.attention.cache import KeyValueCache


class Pass(NamedTuple):
    """The input of a forward pass, equal on all ranks.

    is_start: whether the pass computes all tokens of the texts; otherwise it computes only the last token of
    each text. table: int64 [texts, 2 + longest text]. Each row has the text's row in the cache, its number of
    tokens, and its tokens, padded on the right. No token attends to the padding.
    """

    is_start: bool
    table: Tensor

    @classmethod
    def of(cls, is_start: bool, texts: dict[int, list[int]]) -> Pass:
        """Returns a pass over `texts`, whose keys are rows of the cache."""
        rows = [[row, len(text), *text] for row, text in texts.items()]
        return cls(is_start, padded(rows, 0))

    def to(self, device: torch.device) -> Pass:
        return self._replace(table=self.table.to(device))

    @property
    def tokens(self) -> Tensor:
        """The tokens of the texts, int64 [texts, longest text]."""
        return self.table[:, 2:]

    def prepare(
        self, cache: KeyValueCache | None, multiple: int = 1
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Returns the tokens of the forward pass and the context to run it in. cache: None if the layers do
        not use the cache. multiple: the number of new tokens per text is padded to a multiple of it."""
        if cache is None:
            return self.tokens, nullcontext()
        if self.is_start:
            return self.tokens, cache.starting(self.table[:, 0].tolist())
        positions = self.table[:, 1:2] - 1 + torch.arange(multiple, device=self.table.device)
        tokens = torch.nn.functional.pad(self.tokens, (0, multiple - 1))
        return tokens, cache.extending(positions, tokens.shape[1])

    def last_of(self, hidden: Tensor) -> Tensor:
        """Returns the hidden state of each text's last token, [texts, 1, hidden]. hidden:
        [texts, computed tokens, hidden]."""
        if not self.is_start:
            return hidden[:, :1]
        return hidden[torch.arange(len(hidden), device=hidden.device), self.table[:, 1] - 1].unsqueeze(1)


class GrowingTexts:
    """Computes the logits of the next token of texts. It remembers the texts whose keys and values are in the
    cache; the result does not depend on them."""

    def __init__(
        self, run: Callable[[Pass], Tensor], max_rows: int | None = None, caches: bool = True
    ) -> None:
        """run: computes the logits [texts, vocab_size] of a pass. max_rows: largest number of texts in a pass
        that computes all their tokens; None: no limit. caches: whether the layers use the cache."""
        self._run, self._max_rows, self._caches = run, max_rows, caches
        self._texts: list[list[int]] = []

    def logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Returns the logits of the next token after each text: see `LanguageModel.next_token_logits`."""
        known = self._texts
        extended = {row for row, text in enumerate(texts) if row < len(known) and known[row] == text[:-1]}
        self._texts = []  # if a pass fails, the content of the cache is unknown
        started = [row for row in range(len(texts)) if row not in extended]
        result: dict[int, Tensor] = {}
        if extended:
            # The rows of a pass are consecutive. A row that is not extended gets one token, which is
            # overwritten below.
            rows = {row: text if row in extended else text[:1] for row, text in enumerate(texts)}
            logits = self._run(Pass.of(False, rows))
            result = {row: logits[row] for row in extended}
        width = self._max_rows or len(texts)
        for first in range(0, len(started), width):
            part = started[first : first + width]
            result |= zip(part, self._run(Pass.of(True, {row: texts[row] for row in part})), strict=True)
        if self._caches:
            self._texts = [list(text) for text in texts]
        return torch.stack([result[row] for row in range(len(texts))])


def padded(texts: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Returns the texts as a tensor [texts, longest text], padded on the right."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
