"""Text generation: samples one token at a time after a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ConfigError
from megatron.model.scoring import LanguageModel

# Sampling is already greedy at temperatures far above this one.
_MIN_TEMPERATURE = 1e-6


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
        # A token is kept if the more likely tokens do not reach top_p: the most likely token is always kept.
        probabilities[probabilities.cumsum(dim=0) - probabilities >= self.top_p] = 0.0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def generate(
    model: LanguageModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    window: int,
    eod: int,
    seed: int,
) -> Iterator[int]:
    """Yields up to `max_new_tokens` tokens after `prompt`; stops early if the model ends the document.

    The model's context is the last `window` tokens. An empty prompt is the start of a document. Equal
    arguments give equal tokens: sampling runs on the CPU and depends only on the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt) or [eod]
    for _ in range(max_new_tokens):
        context = torch.tensor(tokens[-window:])
        token = sampling.draw(model.next_token_logits(context).cpu(), generator)
        if token == eod:
            return
        tokens.append(token)
        yield token
