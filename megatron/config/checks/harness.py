"""Checks of the flags for lm-evaluation-harness in training."""

from __future__ import annotations

import os
from importlib.util import find_spec

from megatron.config.config import Config
from megatron.errors import ConfigError


def check_harness(config: Config) -> None:
    """Raise ConfigError for a part of the flags without the others, and without a tokenizer."""
    training, data = config.training, config.data
    if not training.eval_harness_tasks:
        return
    tasks = " ".join(training.eval_harness_tasks)
    if training.eval_harness_interval is None:
        raise ConfigError(
            f"--eval-harness-tasks {tasks} without --eval-harness-interval: set the iterations between "
            "two runs"
        )
    if training.no_train:
        raise ConfigError(
            f"--eval-harness-tasks {tasks} with --eval-only, which trains nothing: remove it; "
            "tools/evaluate.py --tasks runs tasks on a checkpoint"
        )
    files = (data.vocab_file, data.merge_file, data.tokenizer_model, data.tokenizer_name_or_path)
    if not any(files):
        raise ConfigError(
            f"--eval-harness-tasks {tasks} without a tokenizer, and tasks are texts: set the flags of the "
            "tokenizer"
        )


def no_harness(option: str, reason: str) -> ConfigError:
    """The error of a flag that needs the package lm_eval, which cannot be imported."""
    return ConfigError(
        f"{option} needs EleutherAI's lm-evaluation-harness ({reason}): install it with 'pip install lm_eval'"
    )


def check_harness_installed(config: Config) -> None:
    """Raise ConfigError without the package lm_eval, and for a folder of tasks that does not exist."""
    training = config.training
    if not training.eval_harness_tasks:
        return
    if find_spec("lm_eval") is None:
        raise no_harness("--eval-harness-tasks", "there is no module lm_eval")
    folder = training.eval_harness_tasks_path
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"--eval-harness-tasks-path {folder}: there is no such folder")
