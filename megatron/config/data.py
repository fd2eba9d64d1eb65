"""The value of --split, blends of token files, and checks of the data flags.

Blends are given by --data-path, by --train-data-path and its siblings, by the groups of the
--*-weighted-split-paths flags, and by files with the values of these flags.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path

from megatron.config.batch import RunLength
from megatron.config.config import Config
from megatron.config.fields import option_name
from megatron.config.mistakes import mistakes_of_call
from megatron.config.registries import DATA_ORDERS, TOKENIZERS
from megatron.config.sections.data import DataConfig, data_option, fitting_tokenizer_types
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
    """The documents of one prefix between the fractions `start` and `end`, with their weight in a blend
    (None: no weight was given)."""

    weight: Fraction | None
    prefix: str
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class PathGroup:
    """A blend, and the name under which it is logged."""

    name: str
    paths: tuple[WeightedPath, ...]

    @property
    def is_by_size(self) -> bool:
        """Whether the data sets are read in proportion to their sizes, because they have no weights."""
        return len(self.paths) > 1 and self.paths[0].weight is None


def parse_data_path(words: Sequence[str], option: str = "--data-path") -> tuple[WeightedPath, ...]:
    """Parses prefixes, or alternating weights and prefixes: ('0.3', 'A', '0.7', 'B'). Raises ConfigError.

    Without weights, no word is a number.
    """
    if len(words) == 1 or not any(map(_is_number, words)):
        return tuple(WeightedPath(None, prefix) for prefix in words)
    form = "expected prefixes, or alternating weights and prefixes, such as 0.3 A 0.7 B"
    if len(words) % 2:
        raise ConfigError(f"{option} has {len(words)} values: {form}")
    where = f"{option} {_shortened(' '.join(words))}"
    return tuple(
        WeightedPath(_weight(weight, where, form), prefix)
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
    text = _read_text(option, file)
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


def read_data_args(option: str, file: str) -> tuple[str, ...]:
    """Returns the words of --data-path in a file. Raises ConfigError for an empty or unreadable file."""
    words = tuple(_read_text(option, file).split())
    if not words:
        raise ConfigError(f"{option}: {file} is empty: expected weights and prefixes, such as 0.3 A 0.7 B")
    return words


def read_per_split_data_args(option: str, file: str) -> dict[str, tuple[str, ...]]:
    """Returns split -> words of its --*-data-path, for the splits with data in a JSON file. Raises
    ConfigError for a file of another form."""
    form = 'expected JSON such as {"train": ["0.3", "A", "0.7", "B"], "valid": ["C"], "test": null}'
    try:
        content = json.loads(_read_text(option, file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {file} is not JSON ({error}): {form}") from None
    if not isinstance(content, dict) or not content.keys() <= set(SPLIT_NAMES):
        raise ConfigError(f"{option}: {file} has other keys than train, valid and test: {form}")
    splits = {}
    for name, value in content.items():
        words = value.split() if isinstance(value, str) else value or []
        if not isinstance(words, list) or not {type(word) for word in words} <= {str, int, float}:
            raise ConfigError(f"{option}: {file}: the value of '{name}' is no list of words: {form}")
        if words:
            splits[name] = tuple(str(word).strip() for word in words)
    if "train" not in splits:
        raise ConfigError(f"{option}: {file} names no training data: {form}")
    return splits


def _read_text(option: str, file: str) -> str:
    path = Path(file)
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES):
            raise ConfigError(
                f"{option}: {file} is not a regular file of {_MAX_FILE_BYTES:,} bytes at most: correct it"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{option}: there is no file {file}: correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({error})") from None


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


NO_EVALUATION_DATA = "no validation or test documents; change --split, or set --valid-data-path"


def available_eval_splits(data: DataConfig) -> tuple[bool, bool, str]:
    """Returns (has validation data, has test data, why validation settings have no effect without data)."""
    if given := splits_with_own_data(data):
        circumstance = f"without {option_name(_words_field(data, 'valid'))}"
        return "valid" in given, "test" in given, circumstance
    _, valid, test = parse_split(data.split)
    return valid > 0, test > 0, f"with --split {data.split}"


def data_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for data flags that contradict each other or cannot be parsed."""
    data = config.data
    yield from mistakes_of_call(parse_split, data.split)
    for split_name in SPLIT_NAMES:
        try:
            for group in split_groups(data, split_name):
                yield from _blend_mistakes(data, group, data_option(data, split_name))
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


def splits_with_own_data(data: DataConfig) -> list[str]:
    """Returns the splits whose data a flag of their own names, or a file (which may be missing in a dry run);
    [] with --data-path, of which every split is a part."""
    if data.per_split_data_args_path is not None and not data.train_data_path:
        return list(SPLIT_NAMES)
    return [
        name
        for name in SPLIT_NAMES
        if getattr(data, f"{name}_data_path")
        or getattr(data, f"{name}_weighted_split_paths")
        or getattr(data, f"{name}_weighted_split_paths_path") is not None
    ]


def split_groups(data: DataConfig, split_name: str) -> tuple[PathGroup, ...]:
    """Returns the data of the split 'train', 'valid' or 'test': the weighted groups, or one group with the
    name of the split; () if the flags name none. Raises ConfigError for flags that cannot be parsed."""
    option = data_option(data, split_name)
    if texts := getattr(data, f"{split_name}_weighted_split_paths"):
        return parse_groups(option, texts)
    words = getattr(data, f"{split_name}_data_path") if splits_with_own_data(data) else data.data_path
    return (PathGroup(split_name, parse_data_path(words, option)),) if words else ()


def _words_field(data: DataConfig, split_name: str) -> str:
    """Returns the field for the data of a split, in a run whose splits have their own data."""
    per_split = data.train_data_path or data.per_split_data_args_path is not None
    return f"{split_name}_data_path" if per_split else f"{split_name}_weighted_split_paths"


def _own_data_mistakes(data: DataConfig) -> Iterator[str]:
    given = splits_with_own_data(data)
    option = data_option(data, given[0])
    if data.data_path or data.data_args_path is not None:
        other = (
            "--data-args-path"
            if data.data_args_path
            else f"--data-path {_shortened(' '.join(data.data_path))}"
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


def _blend_mistakes(data: DataConfig, group: PathGroup, option: str) -> Iterator[str]:
    if group.is_by_size and not DATA_ORDERS[data.data_order].blends_by_size:
        yield (
            f"{option} has no weights: --data-order {data.data_order} has no blends without weights; set a "
            "weight before each prefix, or choose native or megatron-core"
        )


def token_file_prefixes(data: DataConfig) -> list[tuple[str, str]]:
    """Returns (flag, prefix) of all pairs of token files."""
    # With --data-path, all splits have one group.
    return [
        (data_option(data, name), path.prefix)
        for name in splits_with_own_data(data) or ["train"]
        for group in split_groups(data, name)
        for path in group.paths
    ]


def token_files(data: DataConfig) -> list[tuple[str, str, str]]:
    """Returns (flag, prefix, file) of all token files."""
    prefixes = token_file_prefixes(data)
    return [(option, prefix, prefix + ending) for option, prefix in prefixes for ending in (".bin", ".idx")]


def host_memory_bytes() -> int:
    """Returns the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_index_memory(config: Config, length: RunLength, memory_bytes: int) -> None:
    """Raises ConfigError if the sample index of the training or validation data cannot be built in memory."""
    training = config.training
    if config.data.mock_data:  # its samples have no index
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
    """Returns the largest share of a prefix in the training data. Each prefix has its own index."""
    groups = split_groups(data, "train")
    weights = [path.weight for path in groups[0].paths if path.weight is not None] if groups else []
    if not weights:  # the sizes are not known yet: at least the mean
        return Fraction(1, len(groups[0].paths) if groups else 1)
    return max(weights) / sum(weights)


def missing_file_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for each missing file, one for the two files of a prefix."""
    data, reported = config.data, set[str]()
    yield from missing_tokenizer_files(data)
    for option, prefix, file in token_files(data):
        if prefix not in reported and not Path(file).is_file():
            reported.add(prefix)
            yield f"{option}: there is no file {file}: correct the path"


def missing_tokenizer_files(data: DataConfig) -> Iterator[str]:
    """Yields a sentence for each missing file of the tokenizer."""
    used = () if data.tokenizer_type is None else TOKENIZERS[data.tokenizer_type].settings
    for name in used:
        file = getattr(data, name)
        if file is not None and name != "tokenizer_name_or_path" and not Path(file).is_file():
            yield f"{option_name(name)}: there is no file {file}: correct the path"
