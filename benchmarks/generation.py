#!/usr/bin/env python3
"""Measures how fast texts are generated, with and without cached keys and values, in tokens per second.

    python benchmarks/generation.py     four minutes

The model has the sizes of examples/quickstart.sh and random weights, and the prompts have different lengths.
The reference without a cache continues one prompt after the other, and computes the whole visible text for
each token. The model's context has 128 tokens. In longer texts the first visible token advances by 64 tokens
at a time. Both methods take turns, and a figure is the best of all rounds, with one thread. The generated
tokens must be equal.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.machine import benchmark_parser, describe_machine, times_in_turns
from megatron.arguments import parse_args
from megatron.model.inference.generation import Continuation, Sampling, generate
from megatron.model.inference.scoring import LanguageModel
from megatron.model.inference.single_process import GPTModel
from megatron.mpu.parameters import initialize_parameters
from megatron.text_table import format_table

VOCAB, WINDOW = 1024, 128
MODEL = (
    "--num-layers 4 --hidden-size 448 --num-attention-heads 8 --seq-length 128 "
    "--position-embedding-type rotary --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --vocab-size 1024 --tokenizer-type NullTokenizer"
)
SAMPLINGS = {"greedy": Sampling(0.0), "sampled": Sampling(1.0)}


class Recomputing:
    """The model without a cache."""

    generation_batch_size = 1

    def __init__(self, model: GPTModel) -> None:
        self.model, self.score = model, model.score

    @torch.no_grad()
    def next_token_logits(self, texts: Sequence[list[int]]) -> Tensor:
        logits: Tensor = self.model(torch.tensor(texts), last_only=True)
        return logits[:, -1].float()


def seconds_of(model: LanguageModel, sampling: Sampling, prompts: int, new_tokens: int) -> tuple[float, list]:
    """Generates texts. Returns the seconds, and the new tokens of each prompt."""
    texts = [Continuation(str, range(5, 6 + index), new_tokens) for index in range(prompts)]
    start = perf_counter()
    for _ in generate(model, texts, sampling, window=WINDOW, eod=-1, seed=1):
        pass
    return perf_counter() - start, [text.tokens for text in texts]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[120, 200])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args()
    config = parse_args(MODEL.split(), {})
    model = GPTModel(config, VOCAB, None).eval()
    initialize_parameters(model, config.training.seed, ())
    models: dict[str, LanguageModel] = {"recomputed": Recomputing(model), "cached": model}
    print(describe_machine())
    rows = [("new tokens", "prompts", "tokens", *(f"{name}, tokens/s" for name in models), "ratio", "equal")]
    for new_tokens, prompts, (name, sampling) in product(flags.new_tokens, flags.prompts, SAMPLINGS.items()):
        texts: dict[str, list] = {}

        def work(key: str, arguments: tuple = (sampling, prompts, new_tokens), texts: dict = texts) -> float:
            seconds, texts[key] = seconds_of(models[key], *arguments)
            return seconds

        times = times_in_turns({key: partial(work, key) for key in models}, flags.rounds, warm_up=0)
        best = {key: min(seconds) for key, seconds in times.items()}
        rates = [f"{prompts * new_tokens / seconds:.0f}" for seconds in best.values()]
        ratio = best["recomputed"] / best["cached"]
        same = "yes" if texts["recomputed"] == texts["cached"] else "NO"
        rows.append((str(new_tokens), str(prompts), name, *rates, f"{ratio:.1f}", same))
    print(format_table(rows, left_align=(2,)))
    return int(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
