"""Text generation: samples the tokens after a prompt, one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ConfigError
from megatron.model.inference.scoring import LanguageModel

# A temperature of this size already makes sampling greedy.
_MIN_TEMPERATURE = 1e-6
# Decoders return this character for an incomplete UTF-8 character, which the next token may complete.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled from the model's distribution.

    temperature: divides the logits; 0 takes the most likely token (greedy).
    top_k: samples only from the k most likely tokens; 0: from all tokens.
    top_p: samples only from the most likely tokens that together have this probability; 1: from all tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature {self.temperature:g}: expected 0 (greedy) or more")
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise ConfigError(
                f"--temperature {self.temperature:g}: expected 0 (greedy) or at least "
                f"{_MIN_TEMPERATURE:g}, since a smaller divisor makes the logits overflow"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k}: expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p:g}: expected more than 0 and at most 1 (all tokens)")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Returns the next token. logits: fp32 [vocab_size] without padding, on the CPU."""
        if self.temperature == 0:
            return int(logits.argmax())
        sorted_logits, tokens = logits.sort(descending=True, stable=True)
        probabilities = (sorted_logits / self.temperature).softmax(dim=0)
        if self.top_k:
            probabilities[self.top_k :] = 0.0
        if self.top_p < 1:
            # A token is kept if the more likely tokens do not reach top_p. So the most likely token is always
            # kept.
            probabilities[probabilities.cumsum(dim=0) - probabilities >= self.top_p] = 0.0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


class Continuation:
    """A prompt, the tokens after it, and their text."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: Sequence[str] = (),
        after: Sequence[int] = (),
    ) -> None:
        """decode: a tokenizer's `detokenize`. stop: strings that end the text, which is cut before the first
        of them. after: tokens that are decoded together with the new tokens, since some tokenizers decode the
        first token of a text differently."""
        self.prompt, self.tokens = list(prompt), list[int]()
        self.max_new_tokens = max_new_tokens
        self.text, self.is_complete = "", False
        """The text so far, without the end that the next token may change: an incomplete UTF-8 character, or
        the beginning of a stop string."""
        self._decode, self._stop, self._after = decode, stop, list(after)
        self._start = len(self._decode(self._after)) if after else 0

    def append(self, token: int) -> None:
        """Adds a token. Ends the text after `max_new_tokens` tokens or at a stop string."""
        self.tokens.append(token)
        text = self._decode([*self._after, *self.tokens])[self._start :]
        found = [text.index(stop) for stop in self._stop if stop in text]
        if found or len(self.tokens) >= self.max_new_tokens:
            self.text, self.is_complete = text[: min(found, default=None)], True
        elif not text.endswith(INCOMPLETE):
            beginnings = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
            held = max((len(part) for part in beginnings if text.endswith(part)), default=0)
            self.text = text[: len(text) - held]

    def complete(self) -> None:
        """Ends the text, because the model has ended the document."""
        self.text, self.is_complete = self._decode([*self._after, *self.tokens])[self._start :], True


def first_visible(length: int, window: int) -> int:
    """Returns the index of the first token that the model sees of a text of `length` tokens. It is the
    smallest multiple of half the window from which the rest of the text fits in the window.

    Of a text that is longer than the window, the model sees between half a window and a whole window of the
    last tokens. The first token that it sees changes only every half window. Until then cached keys and
    values stay valid, and a new token needs a pass over one token only.
    """
    half = (window + 1) // 2
    return half * -(-max(length - window, 0) // half)


def generate(
    model: LanguageModel,
    texts: Sequence[Continuation],
    sampling: Sampling,
    *,
    window: int,
    eod: int,
    seed: int,
    batch_size: int | None = None,
) -> Iterator[Continuation]:
    """Continues all texts, up to `batch_size` at a time (None: the model's `generation_batch_size`). Yields a
    text whenever it has a new token, and when it is complete.

    The model sees the tokens of a text from `first_visible` on. An empty prompt stands for the start of a
    document. Equal arguments give equal tokens: sampling runs on the CPU, and each text has its own generator
    with the seed `seed`. A text therefore depends on the other texts only by the rounding of the logits.
    """

    def visible(tokens: list[int]) -> list[int]:
        return tokens[first_visible(len(tokens), window) :]

    def begin(text: Continuation) -> tuple[Continuation, list[int], torch.Generator]:
        return text, text.prompt or [eod], torch.Generator().manual_seed(seed)

    size = batch_size or model.generation_batch_size
    active, waiting = [begin(text) for text in texts[:size]], deque(texts[size:])
    while active:
        logits = model.next_token_logits([visible(start + text.tokens) for text, start, _ in active]).cpu()
        for (text, _, generator), row in zip(active, logits, strict=True):
            token = sampling.draw(row, generator)
            if token == eod:
                text.complete()
            else:
                text.append(token)
            yield text
        # A waiting text takes the place of a complete one. All other texts keep their places, so that their
        # cached keys and values stay valid.
        for place in reversed(range(len(active))):
            if active[place][0].is_complete:
                following = begin(waiting.popleft()) if waiting else active.pop()
                if place < len(active):
                    active[place] = following
