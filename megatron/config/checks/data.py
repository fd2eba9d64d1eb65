"""Checks of the data flags: blends, groups, tokenizer and files."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

from megatron.config.batch import BatchSchedule
from megatron.config.config import Config
from megatron.config.fields import option_name
from megatron.config.parsing.split import SPLIT_NAMES, parse_split
from megatron.config.parsing.weighted_paths import parse_data_path, parse_groups
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import DataConfig, fitting_tokenizer_types, groups_option
from megatron.errors import ConfigError

# Bytes per sample of the arrays that `data.indices.build_sample_index` holds at once.
_INDEX_BYTES_PER_SAMPLE = 32


def what_is_evaluated(data: DataConfig) -> tuple[bool, bool, str]:
    """(has validation data, has test data, why validation settings have no effect without data)."""
    if _groups_given(data):
        circumstance = "without --valid-weighted-split-paths"
        return "valid" in _groups_given(data), "test" in _groups_given(data), circumstance
    _, valid, test = parse_split(data.split)
    return valid > 0, test > 0, f"with --split {data.split}, which has no validation data"


def check_data(config: Config) -> None:
    """Raise ConfigError for data flags that contradict each other or cannot be parsed."""
    data = config.data
    parse_split(data.split)
    if _groups_given(data):
        _check_groups(data)
    elif data.data_path:
        parse_data_path(data.data_path)
    fitting = fitting_tokenizer_types(data)
    if data.tokenizer_type is None and len(fitting) > 1:
        raise ConfigError(
            f"the tokenizer files fit {' and '.join(fitting)}: choose one with --tokenizer-type, or remove "
            "the files of the others"
        )
    if data.tokenizer_type is not None:
        for name in TOKENIZERS[data.tokenizer_type].settings:
            if getattr(data, name) is None:
                raise ConfigError(
                    f"--tokenizer-type {data.tokenizer_type} without {option_name(name)}: set its path"
                )
    if config.training.dry_run:
        return
    if not data.data_path and not _groups_given(data):
        raise ConfigError(
            "--data-path is missing: set it to the prefix of a .bin/.idx pair (optional with --dry-run)"
        )
    if data.tokenizer_type is None:
        documents = [
            name
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(data, name)
        ]
        if documents:
            raise ConfigError(
                f"{option_name(documents[0])} needs the end-of-document token: set --tokenizer-type"
            )
        if config.model.vocab_size is None:
            raise ConfigError("the size of the vocabulary is unknown: set --tokenizer-type or --vocab-size")


def _groups_given(data: DataConfig) -> list[str]:
    """The splits that have groups, or a file of groups (which may be missing in a dry run)."""
    return [
        name
        for name in SPLIT_NAMES
        if getattr(data, f"{name}_weighted_split_paths")
        or getattr(data, f"{name}_weighted_split_paths_path") is not None
    ]


def _check_groups(data: DataConfig) -> None:
    given = _groups_given(data)
    option = groups_option(data, given[0])
    if data.data_path:
        raise ConfigError(
            f"{option} with --data-path {' '.join(data.data_path)}: the groups contain their own prefixes, "
            "remove one of the two"
        )
    if data.split != DataConfig.split:
        raise ConfigError(
            f"{option} with --split {data.split}: the groups set the documents of each prefix as START:END, "
            "remove --split"
        )
    if given[0] != "train":
        raise ConfigError(
            f"{option} without --train-weighted-split-paths: set the training data in the same way"
        )
    groups = {
        name: parse_groups(groups_option(data, name), getattr(data, f"{name}_weighted_split_paths"))
        for name in given
    }
    if len(groups["train"]) > 1:
        raise ConfigError(
            f"{option} has {len(groups['train'])} groups: training uses one, put all prefixes into it, "
            "separated by commas"
        )
    both = {group.name for group in groups.get("valid", ())} & {
        group.name for group in groups.get("test", ())
    }
    if both:
        raise ConfigError(
            f"{groups_option(data, 'valid')} and {groups_option(data, 'test')} both have a group named "
            f"'{min(both)}': rename one of them, they are logged under their names"
        )


def token_file_prefixes(data: DataConfig) -> list[tuple[str, str]]:
    """(flag, prefix) of all token files."""
    if not _groups_given(data) and not data.data_path:
        return []
    if not _groups_given(data):
        return [("--data-path", path.prefix) for path in parse_data_path(data.data_path)]
    found = []
    for name in _groups_given(data):
        option = groups_option(data, name)
        for group in parse_groups(option, getattr(data, f"{name}_weighted_split_paths")):
            found += [(option, path.prefix) for path in group.paths]
    return found


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_index_memory(config: Config, memory_bytes: int) -> None:
    """Raise ConfigError if the sample index of the training or validation data cannot be built in memory."""
    training, batch = config.training, BatchSchedule.from_config(config.batch)
    iterations = batch.total_iterations(training, config.model.seq_length, config.curriculum)
    evaluations = (iterations // training.eval_interval + 1) * training.eval_iters
    unit = "iters" if training.train_iters is not None else "samples"
    requests = {
        f"--train-{unit} {getattr(training, f'train_{unit}')}": (
            0 if training.no_train else batch.consumed_after(iterations)
        ),
        f"--eval-iters {training.eval_iters} every --eval-interval {training.eval_interval}": (
            evaluations * batch.global_batch_size if any(what_is_evaluated(config.data)[:2]) else 0
        ),
    }
    for flags, samples in requests.items():
        needed = samples * _INDEX_BYTES_PER_SAMPLE * _largest_share(config.data)
        if needed > memory_bytes:
            raise ConfigError(
                f"{flags} with --global-batch-size {batch.global_batch_size} reads {samples:,} samples: "
                f"building their index takes {needed / 1e9:,.0f} GB of memory, and this machine has "
                f"{memory_bytes / 1e9:,.0f} GB: reduce these values"
            )


def _largest_share(data: DataConfig) -> Fraction:
    """The largest share of a prefix in the training data; each prefix has its own index."""
    paths = (
        parse_groups(groups_option(data, "train"), data.train_weighted_split_paths)[0].paths
        if data.train_weighted_split_paths
        else parse_data_path(data.data_path)
    )
    return max(path.weight for path in paths) / sum(path.weight for path in paths)


def check_files(data: DataConfig) -> None:
    """Raise ConfigError for the first missing file."""
    files = [
        (option, f"{prefix}{ending}")
        for option, prefix in token_file_prefixes(data)
        for ending in (".bin", ".idx")
    ]
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(data, name)
        if (
            path is not None
            and data.tokenizer_type is not None
            and name in TOKENIZERS[data.tokenizer_type].settings
        ):
            files.append((option_name(name), path))
    for option, file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{option}: there is no file {file}: correct the path")
