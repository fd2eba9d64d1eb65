"""The value of --split, blends of token files, and checks of the data flags.

Blends are given by --data-path, and by the groups of the --*-weighted-split-paths flags.
"""

from __future__ import annotations

import math
import operator
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path

from megatron.config.batch import BatchSchedule
from megatron.config.config import Config
from megatron.config.fields import option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import DataConfig, fitting_tokenizer_types, groups_option
from megatron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Returns the fractions of train, valid and test, which add up to 1, for '969, 30, 1', '949/50/1' or '1'.

    Missing weights are 0. Raises ConfigError for other values.
    """
    try:
        weights = [float(part) for part in split.split("," if "," in split else "/")]
    except ValueError:
        weights = []
    # One addition after the other, as in Megatron: from Python 3.12 on, sum() corrects the rounding.
    total = reduce(operator.add, weights, 0.0)
    if len(weights) > 3 or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise ConfigError(
            f"--split is '{split}': expected up to three weights for training, validation and test, none "
            "negative and not all 0, such as 969,30,1"
        )
    train, valid, test = weights + [0.0] * (3 - len(weights))
    return train / total, valid / total, test / total


GROUP_FORM = "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ...'"
_MAX_FILE_BYTES = 1 << 23


@dataclass(frozen=True)
class WeightedPath:
    """The documents of one prefix between the fractions `start` and `end`, with their weight in a blend."""

    weight: Fraction
    prefix: str
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class PathGroup:
    """A blend, and the name under which it is logged."""

    name: str
    paths: tuple[WeightedPath, ...]


def parse_data_path(words: Sequence[str]) -> tuple[WeightedPath, ...]:
    """Parses a prefix, or alternating weights and prefixes: ('0.3', 'A', '0.7', 'B'). Raises ConfigError."""
    if len(words) == 1:
        return (WeightedPath(Fraction(1), words[0]),)
    form = "expected one prefix, or alternating weights and prefixes, such as 0.3 A 0.7 B"
    if not words or len(words) % 2:
        raise ConfigError(f"--data-path has {len(words)} values: {form}")
    where = f"--data-path {' '.join(words)}"
    return tuple(
        WeightedPath(_weight(weight, where, form), prefix)
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )


def parse_groups(option: str, texts: Sequence[str]) -> tuple[PathGroup, ...]:
    """Parses the groups of one flag, each in the form GROUP_FORM. Raises ConfigError for an invalid group."""
    groups = tuple(_parse_group(option, text) for text in texts)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{option} has {names.count(name)} groups named '{name}': give each its own name"
            )
    return groups


def read_groups_file(option: str, file: str) -> tuple[str, ...]:
    """Returns the groups in a file, each in double quotes, unparsed. Raises ConfigError for an unreadable
    file."""
    path = Path(file)
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES):
            raise ConfigError(
                f"{option}: {file} is not a regular file of {_MAX_FILE_BYTES:,} bytes at most: correct it"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{option}: there is no file {file}: correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({error})") from None
    try:
        groups = tuple(shlex.split(text))
    except ValueError:
        groups = ()  # unbalanced quotes
    if not groups:
        raise ConfigError(
            f"{option}: {file} contains {_shortened(text.strip())}: expected groups, each in double "
            f"quotes, in the form {GROUP_FORM[1:-1]}"
        )
    return groups


def _parse_group(option: str, text: str) -> PathGroup:
    where = f"{option} {_shortened(text)}"
    name, colon, paths = text.partition(":")
    name = name.strip()
    if not colon or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"{where}: expected {GROUP_FORM}, with a name of letters, digits, '_', '-' and '.', in one "
            "pair of quotes"
        )
    return PathGroup(name, tuple(_parse_path(where, path.strip()) for path in paths.split(",")))


def _parse_path(where: str, text: str) -> WeightedPath:
    words = text.split()
    form = "expected WEIGHT START:END PREFIX, separated by commas"
    if len(words) != 3:
        raise ConfigError(f"{where}: '{text}' has {len(words)} words, {form}")
    weight = _weight(words[0], f"{where}: '{text}'", form)
    try:
        start, end = (float(bound) for bound in words[1].split(":"))
    except ValueError:
        start, end = 0.0, 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"{where}: the range '{words[1]}' of {words[2]}: expected START:END, fractions of its documents "
            "from 0 to 1 with START below END, such as 0:0.95"
        )
    return WeightedPath(weight, words[2], start, end)


def _weight(word: str, where: str, form: str) -> Fraction:
    try:
        weight = Fraction(word)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{where}: the weight '{word}' is not a number, {form}") from None
    if weight <= 0:
        raise ConfigError(f"{where}: the weight {word} is not above 0: remove data that is not used")
    return weight


def _shortened(text: str) -> str:
    """Returns the text in quotes, truncated if it is long (a blend of 50 languages)."""
    return f"'{text}'" if len(text) <= 120 else f"'{text[:117]}...'"


# Peak bytes per sample of the arrays in `data.indices.build_sample_index`.
_INDEX_BYTES_PER_SAMPLE = 32


def available_eval_splits(data: DataConfig) -> tuple[bool, bool, str]:
    """Returns (has validation data, has test data, why validation settings have no effect without data)."""
    if _groups_given(data):
        circumstance = "without --valid-weighted-split-paths"
        return "valid" in _groups_given(data), "test" in _groups_given(data), circumstance
    _, valid, test = parse_split(data.split)
    return valid > 0, test > 0, f"with --split {data.split}, which has no validation data"


def check_data(config: Config) -> None:
    """Raises ConfigError for data flags that contradict each other or cannot be parsed."""
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
    """Returns the splits that have groups, or a file of groups (which may be missing in a dry run)."""
    return [
        name
        for name in SPLIT_NAMES
        if getattr(data, f"{name}_weighted_split_paths")
        or getattr(data, f"{name}_weighted_split_paths_path") is not None
    ]


def _groups_of(data: DataConfig) -> dict[str, tuple[PathGroup, ...]]:
    """Returns split -> groups, for the splits that have groups."""
    return {
        name: parse_groups(groups_option(data, name), getattr(data, f"{name}_weighted_split_paths"))
        for name in _groups_given(data)
    }


def _check_groups(data: DataConfig) -> None:
    given = _groups_given(data)
    option = groups_option(data, given[0])
    if data.data_path:
        raise ConfigError(
            f"{option} with --data-path {' '.join(data.data_path)}: the groups contain their own prefixes; "
            "remove one of the two flags"
        )
    if data.split != DataConfig.split:
        raise ConfigError(
            f"{option} with --split {data.split}: the groups set the documents of each prefix as START:END; "
            "remove --split"
        )
    if given[0] != "train":
        raise ConfigError(
            f"{option} without --train-weighted-split-paths: set --train-weighted-split-paths too"
        )
    groups = _groups_of(data)
    if len(groups["train"]) > 1:
        raise ConfigError(
            f"{option} has {len(groups['train'])} groups: training uses one; put all prefixes into it, "
            "separated by commas"
        )
    both = {group.name for group in groups.get("valid", ())} & {
        group.name for group in groups.get("test", ())
    }
    if both:
        raise ConfigError(
            f"{groups_option(data, 'valid')} and {groups_option(data, 'test')} both have a group named "
            f"'{min(both)}': groups are logged under their names; rename one of them"
        )


def token_file_prefixes(data: DataConfig) -> list[tuple[str, str]]:
    """Returns (flag, prefix) of all pairs of token files."""
    if _groups_given(data):
        return [
            (groups_option(data, name), path.prefix)
            for name, groups in _groups_of(data).items()
            for group in groups
            for path in group.paths
        ]
    return (
        [("--data-path", path.prefix) for path in parse_data_path(data.data_path)] if data.data_path else []
    )


def token_files(data: DataConfig) -> list[tuple[str, str, str]]:
    """Returns (flag, prefix, file) of all token files."""
    prefixes = token_file_prefixes(data)
    return [(option, prefix, prefix + ending) for option, prefix in prefixes for ending in (".bin", ".idx")]


def host_memory_bytes() -> int:
    """Returns the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_index_memory(config: Config, memory_bytes: int) -> None:
    """Raises ConfigError if the sample index of the training or validation data cannot be built in memory."""
    training, batch = config.training, BatchSchedule.from_config(config.batch)
    iterations = batch.total_iterations(training, config.model.seq_length, config.curriculum)
    evaluations = (iterations // training.eval_interval + 1) * training.eval_iters
    unit = "iters" if training.train_iters is not None else "samples"
    requests = {
        f"--train-{unit} {getattr(training, f'train_{unit}')}": (
            0 if training.no_train else batch.consumed_after(iterations)
        ),
        f"--eval-iters {training.eval_iters} every --eval-interval {training.eval_interval}": (
            evaluations * batch.global_batch_size if any(available_eval_splits(config.data)[:2]) else 0
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
    """Returns the largest share of a prefix in the training data. Each prefix has its own index."""
    paths = (
        _groups_of(data)["train"][0].paths
        if data.train_weighted_split_paths
        else parse_data_path(data.data_path)
    )
    return max(path.weight for path in paths) / sum(path.weight for path in paths)


def check_files(data: DataConfig) -> None:
    """Raises ConfigError for the first missing file."""
    files = [(option, file) for option, _, file in token_files(data)]
    used = () if data.tokenizer_type is None else TOKENIZERS[data.tokenizer_type].settings
    files += [(option_name(name), getattr(data, name)) for name in used if name != "tokenizer_name_or_path"]
    for option, file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{option}: there is no file {file}: correct the path")
