"""Adapts a model to EleutherAI's lm-evaluation-harness (optional package lm_eval), and loads and runs its
tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.cluster.launch import temporary_environment
from megatron.config import ConfigError
from megatron.model.inference.generation import Continuation, Sampling, generate
from megatron.model.inference.growing_texts import padded
from megatron.model.inference.scoring import LanguageModel
from megatron.tokenizer import Tokenizer

# Results of tasks: task -> metric -> value.
Results = dict[str, dict[str, float]]
# Folder of the tasks that are part of this package.
OWN_TASKS = Path(__file__).parent
# Number of bootstrap samples for the standard errors of metrics that are not means.
_BOOTSTRAP_DRAWS = 1000
# Maximum number of generated tokens for tasks that do not set it.
MAX_GENERATED_TOKENS = 256
# Names under which a task may set its maximum number of generated tokens.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """A model with the harness's interface. Texts longer than `max_length` tokens are truncated on the
    left."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, max_length: int, batch_size: int) -> None:
        """Makes the adapter. max_length: maximum number of tokens in the model's input. batch_size: number of
        texts per call of the model."""
        super().__init__()
        self.model, self.texts = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @property
    def eot_token_id(self) -> int:
        """Returns the end-of-document token."""
        return self.texts.eod

    @property
    def prefix_token_id(self) -> int:
        """Returns the token in front of a text without context."""
        return self.texts.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text. As the harness's models do, adds the tokenizer's
        beginning-of-sequence token, unless the text begins with it."""
        tokens = self.texts.tokenize(string)
        bos = [self.texts.bos]
        if add_special_tokens is False or not self.texts.adds_bos or tokens[:1] == bos:
            return tokens
        return bos + tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns, for each (_, context, continuation), the log-likelihood of the continuation, and whether
        greedy decoding would generate it."""
        found: dict[int, tuple[float, bool]] = {}
        # Long texts come first, so that the first batch needs the peak memory and texts of a batch have
        # similar lengths.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][1] + requests[index][2]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            texts = [(requests[index][1] + requests[index][2])[-self.max_length - 1 :] for index in batch]
            # Padding is on the right, where no token attends to it.
            rows = padded(texts, self.eot_token_id)
            log_probs, is_greedy = (x.cpu() for x in self.model.score(rows[:, :-1], rows[:, 1:]))
            for row, (index, text) in enumerate(zip(batch, texts, strict=True)):
                scored = min(len(requests[index][2]), len(text) - 1)
                part = slice(len(text) - 1 - scored, len(text) - 1)
                total = log_probs[row, part].double().sum().item()
                found[index] = (total, bool(is_greedy[row, part].all()))
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, computed in windows of `max_length` tokens that do not
        overlap."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns greedy continuations, up to the first of the task's end texts. A context is truncated on
        the left to leave room for the continuation. Raises the errors of `generated_tokens`."""
        texts = [self._continuation(*request.args) for request in requests]
        greedy = Sampling(temperature=0)
        for _ in generate(self.model, texts, greedy, window=self.max_length, eod=self.eot_token_id, seed=0):
            pass
        return [text.text for text in texts]

    def _continuation(self, context: str, settings: dict[str, Any]) -> Continuation:
        count = generated_tokens(settings, self.max_length)
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        prompt = self.tok_encode(context)[count - self.max_length :]
        return Continuation(self.texts.detokenize, prompt, count, stop)


class Tasks:
    """Tasks of the harness, loaded once and run any number of times."""

    def __init__(
        self,
        names: Sequence[str],
        folder: str | None,
        limit: int | None,
        tokenizer: Tokenizer,
        max_length: int,
    ) -> None:
        """Loads the tasks. folder: folder of tasks in addition to the harness's own tasks. limit: number of
        first documents of each task that are used; None for all. max_length: maximum tokens in the model's
        input. Raises ConfigError for unknown tasks, for data that cannot be loaded, for tasks that request
        sampling, and for answers that are too long."""
        self._limit, self._tokenizer, self._max_length = limit, tokenizer, max_length
        self._manager, loaded = _load(
            list(names), [str(OWN_TASKS)] if folder is None else [str(OWN_TASKS), folder]
        )
        self._tasks = self._outermost(loaded)

    def _outermost(self, loaded: dict[str, Any]) -> list[Any]:
        """Returns the groups that are not part of another group, and the tasks that are not part of a
        group."""
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise ConfigError(f"task {name} runs generated code or reads images: remove it")
            if task.OUTPUT_TYPE == "generate_until":
                generated_tokens(task.config.generation_kwargs or {}, self._max_length)
        groups = loaded["groups"].values()
        inner = {group.name for outer in groups for group in outer.get_all_groups()}
        in_group = {task.task_name for group in groups for task in group.get_all_tasks()}
        return [
            *(group for group in groups if group.name not in inner),
            *(task for name, task in loaded["tasks"].items() if name not in in_group),
        ]

    def run(self, model: LanguageModel, batch_size: int) -> Results:
        """Runs the tasks and returns their metrics. batch_size: see `HarnessModel`."""
        # The bootstrap must not fork this process, which holds a GPU and process groups.
        with temporary_environment({"DISABLE_MULTIPROC": "1"}):
            evaluated = simple_evaluate(
                model=HarnessModel(model, self._tokenizer, self._max_length, batch_size),
                tasks=self._tasks,
                task_manager=self._manager,
                limit=self._limit,
                bootstrap_iters=_BOOTSTRAP_DRAWS,
                log_samples=False,
            )
        return {
            task: {
                metric.removesuffix(",none"): value
                for metric, value in values.items()
                if isinstance(value, (int, float)) and metric != "sample_len"
            }
            for task, values in evaluated["results"].items()
        }


def _load(names: list[str], folders: list[str]) -> tuple[TaskManager, dict[str, Any]]:
    """Returns the tasks and groups of these names. The harness's own tasks are searched only if needed,
    because the search in thousands of files takes 20 s. Groups and tags need this search: without it, their
    members among the harness's own tasks would be missing without an error."""
    manager = TaskManager(include_path=folders, include_defaults=False)
    if set(names) <= set(manager.all_subtasks):
        # Fails if a task refers to files of the harness.
        with suppress(Exception):
            return manager, manager.load(names)
    manager = TaskManager(include_path=folders)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(
            f"unknown task {unknown[0]} (lm_eval ls tasks lists the harness's tasks); "
            "--tasks-path (in training --eval-harness-tasks-path) adds a folder of tasks"
        )
    try:
        return manager, manager.load(names)
    # Tasks load their data with any library, which can raise any error.
    except Exception as error:
        raise ConfigError(
            f"tasks {' '.join(names)} cannot be loaded ({type(error).__name__}: {error})"
        ) from error


def generated_tokens(settings: dict[str, Any], max_length: int) -> int:
    """Returns the maximum number of tokens that a task generates. Raises ConfigError for a task that requests
    sampling, and for answers that leave no room for a prompt in an input of `max_length` tokens."""
    if settings.get("do_sample", settings.get("temperature", 0) not in (0, None)):
        raise ConfigError(f"a task requests sampling ({settings}): only greedy decoding is supported")
    count = next(
        (settings[name] for name in _LENGTHS if settings.get(name) is not None), MAX_GENERATED_TOKENS
    )
    if count >= max_length:
        raise ConfigError(
            f"a task generates up to {count} tokens, expected fewer than the model's input of {max_length}: "
            "raise --seq-length, or remove the task"
        )
    return int(count)
