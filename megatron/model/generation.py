"""Text generation: sampling tokens after a prompt, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ConfigError
from megatron.model.scoring import LanguageModel

# Samples are greedy far above it.
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled from the model's distribution.

    temperature: divides the logits; 0 takes the most likely token (greedy).
    top_k: only the k most likely tokens; 0: all.
    top_p: only the most likely tokens that together have this probability; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature:g}, expected 0 (greedy) or more")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"--temperature is {self.temperature:g}, expected 0 (greedy) or at least "
                f"{_LEAST_TEMPERATURE:g}: logits that are divided by less overflow"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k is {self.top_k}, expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p:g}, expected more than 0 and at most 1 (all tokens)")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token; `logits` fp32 [vocab_size] on the CPU, without padding."""
        if self.temperature == 0:
            return int(logits.argmax())
        sorted_logits, tokens = logits.sort(descending=True, stable=True)
        probabilities = (sorted_logits / self.temperature).softmax(dim=0)
        if self.top_k:
            probabilities[self.top_k :] = 0.0
        # A token stays if those before it do not reach top_p: the most likely one always does.
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

    The model's context is the last `window` tokens. An empty prompt is the start of a document. The same
    arguments give the same tokens: sampling uses only the seed, on the CPU.
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
