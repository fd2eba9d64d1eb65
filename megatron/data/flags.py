"""The data that the flags name: the value of --split, blends of token files, and files that contain these
values.

Blends are given by --data-path, by --train-data-path, --valid-data-path and --test-data-path, by the groups
of the --*-weighted-split-paths flags, and by files that contain the values of these flags.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path

from megatron.config.fields import option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import DataConfig, data_option
from megatron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Returns the fractions of train, valid and test for a value such as '969, 30, 1', '949/50/1' or '1'.
    They add up to 1.

    Weights that are not given are 0. Raises ConfigError for other values.
    """
    try:
        weights = [float(part) for part in split.split("," if "," in split else "/")]
    except ValueError:
        weights = []
    # The weights are added one by one, as in Megatron: from Python 3.12 on, sum() corrects rounding errors.
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
    """The documents of one prefix between the fractions `start` and `end`. weight: the weight in a blend;
    None if none was given."""

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
        """Whether the data sets have no weights, so that each is read in proportion to its size."""
        return len(self.paths) > 1 and self.paths[0].weight is None


def parse_data_path(words: Sequence[str], option: str = "--data-path") -> tuple[WeightedPath, ...]:
    """Returns the prefixes with their weights. words: prefixes, or alternating weights and prefixes, such as
    ('0.3', 'A', '0.7', 'B'). Raises ConfigError for other words.

    If no weights are given, no word may be a number.
    """
    if len(words) == 1 or not any(map(_is_number, words)):
        return tuple(WeightedPath(None, prefix) for prefix in words)
    form = "expected prefixes, or alternating weights and prefixes, such as 0.3 A 0.7 B"
    if len(words) % 2:
        raise ConfigError(f"{option} has {len(words)} values: {form}")
    where = f"{option} {shortened(' '.join(words))}"
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
    """Returns the groups of a flag. Each text has the form GROUP_FORM. Raises ConfigError for an invalid
    group."""
    groups = tuple(_parse_group(option, text) for text in texts)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{option} has {names.count(name)} groups named '{name}': give each its own name"
            )
    return groups


def read_groups_file(option: str, file: str) -> tuple[str, ...]:
    """Returns the groups in a file, unparsed. Each group is in double quotes in the file. Raises ConfigError
    for a file that cannot be read."""
    text = _read_text(option, file)
    try:
        groups = tuple(shlex.split(text))
    except ValueError:
        groups = ()  # the quotes are unbalanced
    if not groups:
        raise ConfigError(
            f"{option}: {file} contains {shortened(text.strip())}: expected groups, each in double "
            f"quotes, in the form {GROUP_FORM[1:-1]}"
        )
    return groups


def read_data_args(option: str, file: str) -> tuple[str, ...]:
    """Returns the words of --data-path in a file. Raises ConfigError for a file that is empty or cannot be
    read."""
    words = tuple(_read_text(option, file).split())
    if not words:
        raise ConfigError(f"{option}: {file} is empty: expected weights and prefixes, such as 0.3 A 0.7 B")
    return words


def read_per_split_data_args(option: str, file: str) -> dict[str, tuple[str, ...]]:
    """Returns split -> words of its data-path flag, for the splits that have data in a JSON file. Raises
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
        raise ConfigError(f"{option}: {file} does not exist: correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({error})") from None


def _parse_group(option: str, text: str) -> PathGroup:
    where = f"{option} {shortened(text)}"
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


def shortened(text: str) -> str:
    """Returns the text in quotes. A long text (such as a blend of 50 languages) is truncated."""
    return f"'{text}'" if len(text) <= 120 else f"'{text[:117]}...'"


NO_EVALUATION_DATA = "no validation or test documents; change --split, or set --valid-data-path"


def available_eval_splits(data: DataConfig) -> tuple[bool, bool, str]:
    """Returns (whether there is validation data, whether there is test data, why settings of an evaluation
    without data have no effect)."""
    if given := splits_with_own_data(data):
        per_split = data.train_data_path or data.per_split_data_args_path is not None
        field = "valid_data_path" if per_split else "valid_weighted_split_paths"
        return "valid" in given, "test" in given, f"without {option_name(field)}"
    _, valid, test = parse_split(data.split)
    return valid > 0, test > 0, f"with --split {data.split}"


def splits_with_own_data(data: DataConfig) -> list[str]:
    """Returns the splits whose data a flag or a file names for this split alone (in a dry run the file may be
    missing). Returns [] with --data-path, because it names the data of all splits."""
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
    name of the split. Returns () if the flags name no data for it. Raises ConfigError for flags that cannot
    be parsed."""
    option = data_option(data, split_name)
    if texts := getattr(data, f"{split_name}_weighted_split_paths"):
        return parse_groups(option, texts)
    words = getattr(data, f"{split_name}_data_path") if splits_with_own_data(data) else data.data_path
    return (PathGroup(split_name, parse_data_path(words, option)),) if words else ()


def token_file_prefixes(data: DataConfig) -> list[tuple[str, str]]:
    """Returns (flag, prefix) of all pairs of token files."""
    # With --data-path, all splits have the same group, so the first split's suffices.
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


def missing_tokenizer_files(data: DataConfig) -> Iterator[str]:
    """Yields a sentence for each missing file of the tokenizer."""
    used = () if data.tokenizer_type is None else TOKENIZERS[data.tokenizer_type].settings
    for name in used:
        file = getattr(data, name)
        if file is not None and name != "tokenizer_name_or_path" and not Path(file).is_file():
            yield f"{option_name(name)}: {file} does not exist: correct the path"
