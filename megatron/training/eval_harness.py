"""EleutherAI's lm-evaluation-harness (package lm_eval, optional) on a single-process model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.config import ConfigError
from megatron.model.generation import Sampling, generate
from megatron.model.single_process import GPTModel
from megatron.tokenizer import Tokenizer

# Of tasks that generate and do not say how much.
MAX_GENERATED_TOKENS = 256


class HarnessModel(TemplateLM):
    """A model as the harness calls it. Texts longer than `max_length` tokens lose their beginning."""

    def __init__(self, model: GPTModel, tokenizer: Tokenizer, max_length: int, batch_size: int) -> None:
        """max_length: tokens of the model's input. batch_size: number of texts computed together."""
        super().__init__()
        self.model, self.texts = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token, which also precedes a text without context."""
        return self.texts.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; special tokens are never added, as in training."""
        return self.texts.tokenize(string)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each (_, context, continuation): the log-likelihood of the continuation, and whether each of
        its tokens is the most likely one."""
        found: dict[int, tuple[float, bool]] = {}
        # Long ones first: memory is known at the start, and texts of a batch have about the same length.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][1] + requests[index][2]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            texts = [(requests[index][1] + requests[index][2])[-self.max_length - 1 :] for index in batch]
            logits = self._logits([text[:-1] for text in texts])
            for row, (index, text) in enumerate(zip(batch, texts, strict=True)):
                scored = min(len(requests[index][2]), len(text) - 1)
                targets = torch.tensor(text[len(text) - scored :], device=logits.device)
                log_probs = logits[row, len(text) - 1 - scored : len(text) - 1].float().log_softmax(-1)
                total = log_probs.gather(1, targets[:, None]).double().sum().item()
                found[index] = (total, bool((log_probs.argmax(-1) == targets).all()))
        return [found[index] for index in range(len(requests))]

    def _logits(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """[texts, longest, vocab]. Padding comes last, where no token attends to it."""
        longest = max(map(len, texts))
        rows = [text + [self.eot_token_id] * (longest - len(text)) for text in texts]
        return self.model(torch.tensor(rows, device=next(self.model.parameters()).device))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of `max_length` tokens that do not overlap."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.eot_token_id, self.max_length, 1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return totals

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first of the task's end texts. ConfigError for a task that
        samples."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or settings.get("temperature", 0) not in (0, None):
            raise ConfigError(
                f"--tasks: a task samples its answers ({settings}): only greedy ones are computed"
            )
        until = settings.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        count = settings.get("max_gen_toks", MAX_GENERATED_TOKENS)
        tokens: list[int] = []
        for token in generate(
            self.model,
            self.tok_encode(context),
            count,
            Sampling(temperature=0),
            window=self.max_length,
            eod=self.eot_token_id,
            seed=0,
        ):
            tokens.append(token)
            text = self.texts.detokenize(tokens)
            if found := [text.index(end) for end in ends if end in text]:
                return text[: min(found)]
        return self.texts.detokenize(tokens)


def run_tasks(
    model: HarnessModel, names: Sequence[str], folder: Path | None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Task -> metric -> value. folder: of tasks beside the harness's own. limit: use the first documents of
    each task only. ConfigError for an unknown task."""
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(
            f"--tasks {unknown[0]}: the harness has no such task (lm_eval ls tasks lists them); --tasks-path "
            "adds a folder of tasks"
        )
    results = simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, limit=limit, log_samples=False
    )["results"]
    return {
        task: {
            metric.removesuffix(",none"): value
            for metric, value in values.items()
            if isinstance(value, (int, float)) and metric != "sample_len"
        }
        for task, values in results.items()
    }
