"""The report says how much a run reads of each data set, and how often the token files are verified."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.config import ConfigError, DataConfig
from megatron.data.gpt_dataset import (
    build_gpt_datasets,
    data_fingerprint,
    prepare_index_files,
    requested_groups,
)
from megatron.data.index_stamp import IndexStamp
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import verify_token_files
from megatron.data.vocabulary import Vocabulary
from megatron.errors import UserError
from megatron.run import Run
from megatron.training import data as run_data
from megatron.training.data import DatasetUsage, empty_split_notes, index_notes, usage_table
from tests.support.layouts import VOCAB, Row, config_of
from tests.unit.config.command_lines import SMALL
from tests.unit.data.token_files import data_config, missing_files, numbered_documents, write_documents


@pytest.fixture
def a(tmp_path: Path) -> str:
    """Writes 10 documents of 6 tokens. Returns their prefix."""
    return write_documents(tmp_path / "a", numbered_documents([6] * 10))


@pytest.fixture
def b(tmp_path: Path) -> str:
    """Writes 20 documents of 50 tokens. Returns their prefix."""
    return write_documents(tmp_path / "b", numbered_documents([50] * 20))


def dataset_usage(
    data: DataConfig, seq_length: int, seed: int, samples: tuple[int, int, int]
) -> list[DatasetUsage]:
    return run_data.dataset_usage(requested_groups(data, seq_length, samples), seq_length, seed)


def test_every_split_is_counted(a: str) -> None:
    usages = dataset_usage(data_config(a, split="80,20,0"), 4, 1234, (30, 2, 2))
    found = [(x.group, x.documents, x.tokens, x.samples, x.share, x.is_training) for x in usages]
    assert found == [("train", 8, 48, 30, 1.0, True), ("valid", 2, 12, 2, 1.0, False)]
    assert [usage.epochs for usage in usages] == [30 * 4 / 48, 2 * 4 / 12]


def test_a_blend_is_counted_per_data_set(a: str, b: str) -> None:
    one, other = dataset_usage(data_config("0.3", a, "0.7", b), 4, 1234, (100, 0, 0))
    assert (one.prefix, one.samples, one.share) == (a, 30, 0.3)
    assert (other.prefix, other.samples, other.share) == (b, 70, 0.7)
    assert (one.epochs, other.epochs) == (30 * 4 / 60, 70 * 4 / 1000)


@pytest.mark.parametrize(
    ("split", "samples", "expected"),
    [
        ("969,30,1", (30, 2, 2), ["valid", "test"]),  # of 10 documents
        ("80,20,1", (30, 2, 2), ["test"]),
        ("80,20,0", (30, 2, 2), []),
        ("80,20,1", (30, 2, 0), []),
    ],
)
def test_splits_with_a_weight_and_without_documents_are_named(a: str, split, samples, expected) -> None:
    data = data_config(a, split=split)
    notes = empty_split_notes(data, samples, requested_groups(data, 4, samples))
    lines = usage_table(dataset_usage(data, 4, 1234, samples), 9, notes).splitlines()
    assert [line.split(":")[0] for line in lines if "no documents" in line] == expected


def test_only_training_data_above_the_limit_is_warned_of(a: str, b: str) -> None:
    data = DataConfig(
        train_weighted_split_paths=(f"T: 1 0:1 {a}, 1 0:1 {b}",),
        valid_weighted_split_paths=(f"V: 1 0:1 {a}",),
    )
    usages = dataset_usage(data, 4, 1234, (100, 1000, 0))
    # Training reads 50 samples of 4 tokens from each: a has 60 tokens, b has 1000. The validation data is
    # read 66 times.
    assert [line for line in usage_table(usages, 3.4).splitlines() if "warning" in line] == []
    (warning,) = (line for line in usage_table(usages, 3.3).splitlines() if "warning" in line)
    assert a in warning and "3.33 times" in warning and "--max-epochs-per-dataset 3.3" in warning
    assert len(usage_table(usages, 10).splitlines()) == 1 + 3


def test_the_limit_counts_the_reads_of_a_document_by_all_that_name_it(a: str, b: str) -> None:
    data = DataConfig(
        train_weighted_split_paths=(f"T: 1 0:0.5 {a}, 1 0.3:1 {a}, 2 0.5:1 {a}, 4 0:1 {b}",),
        valid_weighted_split_paths=(f"V: 1 0:1 {a}",),
    )
    usages = dataset_usage(data, 4, 1234, (80, 3, 0))
    # There are 10 documents of 6 tokens. 10 samples read documents 0 to 4, 10 read 3 to 9, and 20 read 5 to
    # 9.
    first, second, third = 10 * 4 / 30, 10 * 4 / 42, 20 * 4 / 30
    assert [usage.epochs for usage in usages] == pytest.approx(
        [first + second, second + third, second + third, 40 * 4 / 1000, 3 * 4 / 60]
    )
    named_twice = dataset_usage(data_config("1", a, "1", a, "2", b), 4, 1234, (60, 0, 0))
    assert [usage.epochs for usage in named_twice] == [30 * 4 / 60, 30 * 4 / 60, 30 * 4 / 1000]
    (warning,) = (line for line in usage_table(named_twice, 1.5).splitlines() if "warning" in line)
    assert f"training reads {a} 2.00 times" in warning
    spelled = dataset_usage(data_config("1", a, "1", os.path.relpath(a), "2", b), 4, 1234, (60, 0, 0))
    assert [usage.epochs for usage in spelled] == [usage.epochs for usage in named_twice]
    renormalized = DataConfig(
        train_weighted_split_paths=(f"T: 1 0.5:1 {a}, 1 0:0.5 {a}",), max_epochs_action="renormalize"
    )
    dataset_usage(renormalized, 4, 1234, (40, 0, 0))
    for name in (a, os.path.relpath(a)):
        overlapping = replace(renormalized, train_weighted_split_paths=(f"T: 1 0.4:1 {a}, 1 0:0.5 {name}",))
        with pytest.raises(ConfigError, match=f"the T data name documents of {a} more than once: name them"):
            dataset_usage(overlapping, 4, 1234, (40, 0, 0))


def test_a_run_above_the_limit_stops_before_it_starts_if_asked(a: str, b: str) -> None:
    flags = [
        *SMALL,
        "--data-path",
        "1",
        a,
        "1",
        b,
        "--seq-length",
        "4",
        "--split",
        "1",
        "--vocab-size",
        "100",
    ]
    for action, stops in (("repeat", False), ("stop", True)):
        config = parse_args([*flags, "--max-epochs-action", action, "--max-epochs-per-dataset", "20"], {})
        if stops:  # 400 samples of 4 tokens from 60
            with pytest.raises(ConfigError, match=f"stop: training reads {a} 26.67 times"):
                run_data.planned_data_report(Run.from_config(config))
        else:
            assert f"warning: training reads {a} 26.67 times" in run_data.planned_data_report(
                Run.from_config(config)
            )


@pytest.mark.parametrize(
    ("split", "evaluates"), [("999,0.5,0.5", False), ("50,50,0", True), ("50,0,50", True)]
)
def test_an_evaluation_for_which_a_split_has_no_document_is_an_error(
    a: str, split: str, evaluates: bool
) -> None:
    flags = [*SMALL, "--data-path", a, "--seq-length", "4", "--vocab-size", "100", "--split", split]
    config = parse_args([*flags, "--eval-only", "--load", "c"], {})
    if evaluates:
        assert "training" not in run_data.planned_data_report(Run.from_config(config))
    else:
        with pytest.raises(ConfigError, match="--eval-only finds no validation or test documents"):
            run_data.planned_data_report(Run.from_config(config))


def test_a_split_without_the_tokens_of_a_sample_is_refused(a: str) -> None:
    with pytest.raises(UserError, match="valid split has 6 tokens"):
        dataset_usage(data_config(a, split="90,10,0"), 8, 1234, (1, 1, 0))


def test_the_full_index_is_read_by_verify_token_files_only(
    a: str, b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = []
    verify_index = IndexedDataset._verify_index

    def recorded(self: IndexedDataset, files: Any) -> None:
        verified.append(self.prefix)
        verify_index(self, files)

    monkeypatch.setattr(IndexedDataset, "_verify_index", recorded)
    data = data_config("1", a, "1", b, "1", a, split="80,20,0")
    arguments: Any = (data, 4, 1234, (10, 2, 0))
    verify_token_files(data)
    assert verified == [a, b]
    data_fingerprint(data, 4, 1234, 10)
    missing_files(*arguments)
    prepare_index_files(*arguments)
    build_gpt_datasets(*arguments)
    dataset_usage(*arguments)
    assert verified == [a, b]


def test_missing_indices_are_reported_with_the_command_that_prepares_them(
    a: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(Row(dp=4), data={"data_path": (a,), "split": "1"})
    run = Run.from_config(config, Vocabulary(VOCAB, None))
    run = replace(run, stamp=IndexStamp(config.data))
    assert index_notes(run) == ["rank 0 builds 1 indices of the data order (0 MB)"]
    monkeypatch.setattr(run_data, "_LARGE_INDEX_BYTES", 0)
    (note,) = index_notes(run)
    assert note.endswith("4 ranks wait for it. To build them before a job, run tools/prepare_indices.py "
                         "--world-size 4 with the flags of this run")  # fmt: skip
    prepare_index_files(config.data, 32, config.training.seed, run.length.samples_per_split(config))
    assert index_notes(run) == []
    strict = replace(config, data=replace(config.data, require_prepared_indices=True))
    with pytest.raises(UserError, match="1 of 1 indices are not prepared"):  # there is no stamp
        index_notes(replace(run, config=strict))


def test_hostile_evaluations_that_repeat_their_data_without_end_are_refused(a: str) -> None:
    data = data_config(a, split="80,20,0")
    with pytest.raises(UserError, match="valid read 400,000,000 samples, .* reduce --eval-iters"):
        dataset_usage(data, 4, 1234, (30, 400_000_000, 2))
    with pytest.raises(UserError, match="the run reads 1,000,000,.* samples of the valid data, expected"):
        dataset_usage(data, 4, 1234, (30, 10**30, 2))
    dataset_usage(data, 4, 1234, (400_000_000, 10_000_000, 2))  # a published length with a little data
