"""Tests blends and groups of weighted paths on the command line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.arguments import parse_args, read_command_line
from megatron.config import Config, ConfigError
from megatron.data.flags import (
    PathGroup,
    WeightedPath,
    available_eval_splits,
    parse_data_path,
    parse_groups,
    read_groups_file,
    split_groups,
    token_file_prefixes,
)
from tests.unit.config.command_lines import RUN, SMALL, check_refused, refusal

TRAIN, VALID, TEST = (f"--{name}-weighted-split-paths" for name in ("train", "valid", "test"))


def test_a_data_path_is_one_prefix_or_a_blend() -> None:
    assert parse_data_path(["A"]) == (WeightedPath(None, "A"),)
    assert parse_data_path(["0.3", "A", "7e-1", "B"]) == (
        WeightedPath(Fraction(3, 10), "A"),
        WeightedPath(Fraction(7, 10), "B"),
    )
    without = parse_data_path(["2024/01", "2024/02", "C"])
    assert [(path.weight, path.prefix) for path in without] == [
        (None, "2024/01"),
        (None, "2024/02"),
        (None, "C"),
    ]


def test_the_files_of_megatron_lm_equal_the_flags(tmp_path: Path) -> None:
    """The files have the formats of Megatron-LM's get_blend_and_blend_per_split."""
    (tmp_path / "blend.txt").write_text("0.25 a\n0.75\tb\n")
    (tmp_path / "splits.json").write_text('{"train": [0.25, "a", "0.75", "b"], "valid": "a b", "test": null}')
    config = parse_args([*SMALL, "--data-args-path", str(tmp_path / "blend.txt"), "--split", "9,1"], {})
    assert config.data.data_path == ("0.25", "a", "0.75", "b")
    assert token_file_prefixes(config.data) == [("--data-args-path", "a"), ("--data-args-path", "b")]
    by_file = parse_args([*SMALL, "--per-split-data-args-path", str(tmp_path / "splits.json")], {}).data
    words = ["--train-data-path", "0.25", "a", "0.75", "b", "--valid-data-path", "a", "b"]
    by_flags = parse_args([*SMALL, *words], {}).data
    assert by_flags == replace(by_file, per_split_data_args_path=None)
    for data in (by_file, by_flags):
        assert [len(split_groups(data, name)) for name in ("train", "valid", "test")] == [1, 1, 0]
        assert available_eval_splits(data) == (True, False, "without --valid-data-path")
    # A checkpoint records the content of the file, and the file may be deleted later.
    (tmp_path / "splits.json").unlink()
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))).data == config.data
    parse_args([*SMALL, "--per-split-data-args-path", str(tmp_path / "splits.json")], {})  # a dry run


@pytest.mark.parametrize(
    "text",
    [
        "ALL: 0.3 0:0.95 /a/b, 1 0.5:1 c",
        "ALL:0.3 0:0.95 /a/b,1 0.5:1 c",
        " ALL : 0.3  0.0:.95 /a/b ,1 .5:1.0 c ",
    ],
)
def test_a_group_is_a_name_and_weighted_ranges(text: str) -> None:
    paths = (WeightedPath(Fraction(3, 10), "/a/b", 0.0, 0.95), WeightedPath(Fraction(1), "c", 0.5, 1.0))
    assert parse_groups(TRAIN, [text]) == (PathGroup("ALL", paths),)


def test_groups_come_from_flags_or_from_one_line_files(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text('"TRAIN: 0.25 0:0.9 a, 0.75 0:0.9 b"\n')
    (tmp_path / "valid.txt").write_text('"VALID_A: 1 0.9:1 a" "VALID_B: 1 0.9:1 b"\n')
    by_files = [f"{TRAIN}-path", str(tmp_path / "train.txt"), f"{VALID}-path", str(tmp_path / "valid.txt")]
    by_flags = [TRAIN, "TRAIN: 0.25 0:0.9 a, 0.75 0:0.9 b", VALID, "VALID_A: 1 0.9:1 a", "VALID_B: 1 0.9:1 b"]
    for words in (by_files, by_flags):
        data = parse_args([*SMALL, *words], {}).data
        assert data.train_weighted_split_paths == (by_flags[1],)
        assert data.valid_weighted_split_paths == tuple(by_flags[3:])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ("'a'", "NAME: WEIGHT START:END PREFIX", "quotes")),
        ("1 0:1 a", ("'1 0:1 a'", "NAME: WEIGHT START:END PREFIX")),
        ("my data: 1 0:1 a", ("my data", "letters, digits")),
        ("T: 1 a", ("'1 a' has 2 words", "WEIGHT START:END PREFIX")),
        ("T: 1 0:1 a 1 0:1 b", ("'1 0:1 a 1 0:1 b' has 6 words", "comma")),
        ("T: 1 0:1 a,", ("'' has 0 words",)),
        ("T: x 0:1 a", ("the weight 'x'",)),
        ("T: nan 0:1 a", ("the weight 'nan'",)),
        ("T: -1 0:1 a", ("the weight -1 is not above 0",)),
        ("T: 1 0:95 a", ("the range '0:95' of a", "0:0.95")),
        ("T: 1 0.5:0.5 a", ("the range '0.5:0.5' of a", "START below END")),
        ("T: 1 0.5 a", ("the range '0.5' of a",)),
        ("T: 1 0:nan a", ("the range '0:nan' of a",)),
    ],
)
def test_a_group_of_another_form_is_quoted_with_what_was_expected(text: str, parts: tuple[str, ...]) -> None:
    check_refused([TRAIN, text], [f"{TRAIN} ", *parts])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([TRAIN, "T: 1 0:1 a", "--data-path", "a"], (TRAIN, "--data-path 'a'", "remove one")),
        ([TRAIN, "T: 1 0:1 a", "--split", "9,1"], (TRAIN, "--split 9,1", "START:END")),
        ([VALID, "V: 1 0:1 a"], (VALID, f"without {TRAIN}")),
        ([TRAIN, "T: 1 0:1 a", "U: 1 0:1 b"], (TRAIN, "2 groups", "commas")),
        ([TRAIN, "T: 1 0:1 a", VALID, "V: 1 0:1 a", "V: 1 0:1 b"], (VALID, "2 groups named 'V'")),
        ([TRAIN, "T: 1 0:1 a", VALID, "V: 1 0:1 a", TEST, "V: 1 0:1 b"], (VALID, TEST, "named 'V'")),
        (
            ["--train-data-path", "a", "--data-path", "a"],
            ("--train-data-path", "--data-path 'a'", "remove one"),
        ),
        (["--train-data-path", "a", "--split", "9,1"], ("--split 9,1: all documents",)),
        (["--valid-data-path", "a"], ("--valid-data-path without --train-data-path",)),
        (["--train-data-path", "a", VALID, "V: 1 0:1 a"], (VALID, "--train-data-path", "one way")),
        (["--data-path", "0.3", "a", "b"], ("--data-path has 3 values", "0.3 A 0.7 B")),
        (["--train-data-path", "a", "0.3"], ("--train-data-path 'a 0.3': the weight 'a'",)),
        (["--data-path", "a", "b", "--data-order", "megatron-deepspeed"], ("has no weights", "native")),
        (
            ["--data-path", "a", "--data-order", "megatron-core", "--max-epochs-action", "renormalize"],
            ("renormalize with --data-order megatron-core",),
        ),
    ],
)
def test_contradictions_are_refused(words: list[str], parts: tuple[str, ...]) -> None:
    check_refused(words, parts)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    option = f"{TRAIN}-path"
    assert f"{option}: {file} does not exist" in refusal(option, str(file), base=RUN)
    parse_args([*SMALL, option, str(file)], {})  # a dry run reads no data
    for text in ("", '"T: 1 0:1 a'):
        file.write_text(text)
        sentence = refusal(option, str(file))
        assert str(file) in sentence and "each in double quotes" in sentence
    file.write_text('"T: 1 0:1"')
    assert f"{option} 'T: 1 0:1': '1 0:1' has 2 words" in refusal(option, str(file))
    assert "both given" in refusal(option, str(file), TRAIN, "T: 1 0:1 a")


@pytest.mark.parametrize(
    ("flag", "content", "part"),
    [
        ("--data-args-path", " \n", "is empty"),
        ("--data-args-path", "0.3 a b", "--data-args-path has 3 values"),
        ("--per-split-data-args-path", "0.3 a", "is not JSON"),
        ("--per-split-data-args-path", '{"training": ["a"]}', "other keys"),
        ("--per-split-data-args-path", '{"train": {"a": 1}}', "'train' is no list of words"),
        ("--per-split-data-args-path", '{"train": [["a"]]}', "'train' is no list of words"),
        ("--per-split-data-args-path", '{"valid": ["a"]}', "names no training data"),
    ],
)
def test_a_data_file_of_another_form_is_named(tmp_path: Path, flag: str, content: str, part: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    assert part in refusal(flag, str(file))
    assert "both given" in refusal(
        flag, str(file), flag.replace("args-path", "path").replace("per-split", "train"), "a"
    )


def test_a_run_needs_the_files_of_every_group(tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").touch()
    words = ["--vocab-size", "100", TRAIN, f"T: 1 0:1 {tmp_path}/a", VALID, f"V: 1 0:1 {tmp_path}/b"]
    assert f"{VALID}: {tmp_path}/b.bin does not exist" in refusal(*words, base=RUN)


def test_evaluation_flags_without_groups_to_evaluate_are_noted() -> None:
    words = [*SMALL, "--eval-iters", "5", TRAIN, "T: 1 0:1 a"]
    note = "--eval-iters has no effect without --valid-weighted-split-paths"
    assert note in read_command_line(words, {}).notes
    assert note not in read_command_line([*words, VALID, "V: 1 0:1 a"], {}).notes


def test_a_hostile_pipe_device_or_endless_file_of_groups_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 1 << 40)
    for name in ("pipe", "zero", "endless"):
        with pytest.raises(ConfigError, match="--x: .* is not a regular file"):
            read_groups_file("--x", str(tmp_path / name))
