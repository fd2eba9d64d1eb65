"""Checks of the flags of data, tokenizer and evaluation, and of the files that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

from megatron.config.config import Config
from megatron.config.fields import option_name
from megatron.config.mistakes import mistakes_of_call
from megatron.config.registries import DATA_ORDERS, TOKENIZERS
from megatron.config.sections.data import DataConfig, data_option, fitting_tokenizer_types
from megatron.config.tool_parser import check_folder
from megatron.data.flags import (
    NO_EVALUATION_DATA,
    SPLIT_NAMES,
    available_eval_splits,
    missing_tokenizer_files,
    parse_split,
    shortened,
    split_groups,
    splits_with_own_data,
    token_files,
)
from megatron.errors import ConfigError
from megatron.optimizer.batch_schedule import RunLength


def data_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for data flags that contradict each other or cannot be parsed."""
    data = config.data
    yield from mistakes_of_call(parse_split, data.split)
    for split_name in SPLIT_NAMES:
        try:
            if any(group.is_by_size for group in split_groups(data, split_name)) and not (
                DATA_ORDERS[data.data_order].blends_by_size
            ):
                yield (
                    f"{data_option(data, split_name)} has no weights: --data-order {data.data_order} has no "
                    "blends without weights; set a weight before each prefix, or choose native or "
                    "megatron-core"
                )
        except ConfigError as error:
            yield str(error)
    if data.max_epochs_action == "renormalize" and data.data_order != "native":
        yield (
            f"--max-epochs-action renormalize with --data-order {data.data_order}: only the native order "
            "keeps exact shares; remove one of the two flags"
        )
    own = splits_with_own_data(data)
    if not (data.data_path or own or data.mock_data or config.training.dry_run):
        yield (
            "--data-path is missing: set it to the prefix of a .bin/.idx pair, or set --mock-data (optional "
            "with --dry-run)"
        )
    if own:
        yield from _own_data_mistakes(data)
    elif not config.training.no_train and not parse_split(data.split)[0]:
        yield f"--split {data.split} assigns no document to the train split: give it a larger weight"


def tokenizer_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for missing or ambiguous flags of the tokenizer."""
    data = config.data
    fitting = fitting_tokenizer_types(data)
    if data.tokenizer_type is None and len(fitting) > 1:
        yield (
            f"the tokenizer files fit {' and '.join(fitting)}: choose one with --tokenizer-type, or remove "
            "the files of the others"
        )
    if data.tokenizer_type is not None:
        if TOKENIZERS[data.tokenizer_type].takes_vocab_size and config.model.vocab_size is None:
            yield f"--tokenizer-type {data.tokenizer_type} without --vocab-size: set the number of its tokens"
        for name in TOKENIZERS[data.tokenizer_type].settings:
            if getattr(data, name) is None:
                yield (f"--tokenizer-type {data.tokenizer_type} without {option_name(name)}: set its path")
    if data.tokenizer_type is None and not config.training.dry_run:
        documents = [
            name
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(data, name)
        ]
        if documents:
            yield (f"{option_name(documents[0])} needs the end-of-document token: set --tokenizer-type")
        if config.model.vocab_size is None:
            yield "the size of the vocabulary is unknown: set --tokenizer-type or --vocab-size"


def _own_data_mistakes(data: DataConfig) -> Iterator[str]:
    given = splits_with_own_data(data)
    option = data_option(data, given[0])
    if data.data_path or data.data_args_path is not None:
        other = (
            "--data-args-path"
            if data.data_args_path
            else f"--data-path {shortened(' '.join(data.data_path))}"
        )
        yield (f"{option} with {other}: {option} names its own prefixes; remove one of the two flags")
    own = [name for name in SPLIT_NAMES if getattr(data, f"{name}_data_path")]
    if data.split != DataConfig.split:
        documents = (
            "all documents of its prefixes are read"
            if own
            else "the groups set the documents of each prefix as START:END"
        )
        yield f"{option} with --split {data.split}: {documents}; remove --split"
    ranges = [name for name in given if getattr(data, f"{name}_weighted_split_paths")]
    if ranges and (own or data.per_split_data_args_path is not None):
        yield (
            f"--{ranges[0]}-weighted-split-paths with "
            f"{data_option(data, own[0]) if own else '--per-split-data-args-path'}: a run names its data in "
            "one way; remove one of the two flags"
        )
    if given[0] != "train":
        train = "--train-data-path" if own else "--train-weighted-split-paths"
        yield f"{option} without {train}: set {train} too"
    groups = {name: split_groups(data, name) for name in SPLIT_NAMES}
    if len(groups["train"]) > 1:
        yield (
            f"{option} has {len(groups['train'])} groups: training uses one; put all prefixes into it, "
            "separated by commas"
        )
    both = {group.name for group in groups["valid"]} & {group.name for group in groups["test"]}
    if both:
        yield (
            f"{data_option(data, 'valid')} and {data_option(data, 'test')} both have a group named "
            f"'{min(both)}': groups are logged under their names; rename one of them"
        )


# Peak bytes per sample of the arrays in `data.indices.build_sample_index`.
_INDEX_BYTES_PER_SAMPLE = 32


def host_memory_bytes() -> int:
    """Returns the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_index_memory(config: Config, length: RunLength, memory_bytes: int) -> None:
    """Raises ConfigError if the sample index of the training or validation data cannot be built in memory."""
    training = config.training
    if config.data.mock_data:  # mock data have no index
        return
    train, valid, _ = length.samples_per_split(config)
    unit = "iters" if training.train_iters is not None else "samples"
    requests = {
        f"--train-{unit} {getattr(training, f'train_{unit}')}": train,
        f"--eval-iters {training.eval_iters} every --eval-interval {training.eval_interval}": (
            valid if any(available_eval_splits(config.data)[:2]) else 0
        ),
    }
    for flags, samples in requests.items():
        needed = samples * _INDEX_BYTES_PER_SAMPLE * _largest_share(config.data)
        if needed > memory_bytes:
            raise ConfigError(
                f"{flags} with --global-batch-size {config.batch.global_batch_size} reads {samples:,} "
                f"samples: building their index takes {needed / 1e9:,.0f} GB of memory, and this machine has "
                f"{memory_bytes / 1e9:,.0f} GB: reduce these values"
            )


def _largest_share(data: DataConfig) -> Fraction:
    """Returns the largest share that one prefix has in the training data. (Each prefix has its own index.)"""
    groups = split_groups(data, "train")
    weights = [path.weight for path in groups[0].paths if path.weight is not None] if groups else []
    if not weights:  # the sizes are not known yet, but the largest share is at least the mean
        return Fraction(1, len(groups[0].paths) if groups else 1)
    return max(weights) / sum(weights)


def missing_file_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for each missing file; for the two files of a prefix only one."""
    data, reported = config.data, set[str]()
    yield from missing_tokenizer_files(data)
    for option, prefix, file in token_files(data):
        if prefix not in reported and not Path(file).is_file():
            reported.add(prefix)
            yield f"{option}: {file} does not exist: correct the path"


def harness_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for tasks in a run without a tokenizer."""
    tasks = " ".join(config.training.eval_harness_tasks)
    if tasks and not fitting_tokenizer_types(config.data):
        yield (
            f"--eval-harness-tasks {tasks} without a tokenizer: set --tokenizer-name-or-path, "
            "--tokenizer-model, or --vocab-file and --merge-file"
        )


def evaluation_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for an evaluation without a checkpoint, and for one that evaluates nothing."""
    if not config.training.no_train:
        return
    if config.training.eval_iters == 0:
        yield "--eval-only with --eval-iters 0, which evaluates nothing: set 1 or more batches"
    if config.checkpoint.load is None:
        yield "--eval-only without --load would evaluate the initial weights: set --load to the checkpoints"
    valid, test, reason = available_eval_splits(config.data)
    if not (valid or test):
        yield f"--eval-only {reason}: there are {NO_EVALUATION_DATA}"


def no_harness(option: str, reason: str) -> ConfigError:
    """Returns the error about a flag that needs the package lm_eval, if the package cannot be imported."""
    return ConfigError(
        f"{option} needs EleutherAI's lm-evaluation-harness ({reason}): install it with 'pip install lm_eval'"
    )


def harness_package_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if the package lm_eval does not exist. Raises ConfigError if the folder of tasks does
    not exist."""
    training = config.training
    if not training.eval_harness_tasks:
        return
    if find_spec("lm_eval") is None:
        yield str(no_harness("--eval-harness-tasks", "there is no module lm_eval"))
    if training.eval_harness_tasks_path is not None:
        check_folder("--eval-harness-tasks-path", training.eval_harness_tasks_path)
