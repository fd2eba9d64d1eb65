"""Tests blends of token files: order, documents and group names."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import ConfigError, DataConfig
from megatron.data.blended_dataset import BlendedDataset, integer_weights
from megatron.data.gpt_dataset import (
    GPTDataset,
    data_fingerprint,
    fingerprint_differences,
    prepare_index_files,
    requested_groups,
    same_data,
)
from megatron.data.sample import SampleDataset
from megatron.errors import UserError
from tests.unit.data import token_files
from tests.unit.data.token_files import data_config, missing_files, numbered_documents, write_documents

SEQ, SEED = 4, 7
# Tokens of B begin at 1000, so that each token identifies its data set.
SIZES_A, SIZES_B = [5, 7, 3, 9, 11, 2, 6, 8, 4, 5], [12, 4, 6, 6, 9, 3, 10, 8, 2, 7]


@pytest.fixture
def a(tmp_path: Path) -> str:
    return write_documents(tmp_path / "a", numbered_documents(SIZES_A))


@pytest.fixture
def b(tmp_path: Path) -> str:
    documents = [[token + 1000 for token in document] for document in numbered_documents(SIZES_B)]
    return write_documents(tmp_path / "b", documents)


def build(data: DataConfig, num_samples: tuple[int, int, int]) -> Any:
    return token_files.build(data, SEQ, SEED, num_samples)


def contents(dataset: SampleDataset | None, count: int | None = None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[i].tolist() for i in range(len(dataset) if count is None else count)]


def groups(train: str, *valid: str, test: tuple[str, ...] = ()) -> DataConfig:
    return DataConfig(
        train_weighted_split_paths=(train,),
        valid_weighted_split_paths=valid,
        test_weighted_split_paths=test,
    )


def test_a_blend_reads_each_dataset_in_its_own_order(a: str, b: str) -> None:
    blend = build(data_config("0.3", a, "0.7", b), (20, 0, 0)).train
    assert isinstance(blend, BlendedDataset) and len(blend) == 20
    samples = contents(blend)
    from_a = [sample for sample in samples if sample[0] < 1000]
    from_b = [sample for sample in samples if sample[0] >= 1000]
    assert (len(from_a), len(from_b)) == (6, 14)
    assert from_a == contents(build(data_config(a), (6, 0, 0)).train, 6)
    assert from_b == contents(build(data_config(b), (14, 0, 0)).train, 14)
    # With weights 3 and 7, A's times are 1.7, 5 and 8.3. Two or three samples of B are between them.
    assert [int(sample[0] < 1000) for sample in samples[:10]] == [0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    for outside in (-1, 20):
        with pytest.raises(IndexError):
            blend[outside]


def test_a_longer_run_begins_with_the_same_samples(a: str, b: str) -> None:
    data = data_config("2", a, "1", b)
    short, long = build(data, (9, 0, 0)).train, build(data, (14, 0, 0)).train
    assert contents(short) == contents(long, 9)
    same = data_fingerprint(data, SEQ, SEED, 9), data_fingerprint(data, SEQ, SEED, 14)
    assert fingerprint_differences(*same) == []
    assert fingerprint_differences(same[0], data_fingerprint(data, SEQ, SEED, 60)) != []


def test_split_applies_to_all_components(a: str, b: str) -> None:
    train, valid, test = build(data_config("1", a, "1", b, split="60,20,20"), (30, 6, 4))
    assert [dataset.name for dataset in (train, *valid, *test)] == ["train", "valid", "test"]
    ends_a, ends_b = np.cumsum(SIZES_A), np.cumsum(SIZES_B) + 1000
    for dataset, first, last in ((train, None, 5), (valid[0], 5, 7), (test[0], 7, 9)):
        tokens = np.array(contents(dataset)).ravel()
        for ends, mine in ((ends_a, tokens[tokens < 1000]), (ends_b, tokens[tokens >= 1000])):
            assert len(mine) and mine.max() < ends[last]
            assert first is None or mine.min() >= ends[first]


def test_a_single_weighted_prefix_equals_the_prefix(a: str) -> None:
    alone = build(data_config("0.5", a), (8, 0, 0)).train
    assert isinstance(alone, GPTDataset)
    assert contents(alone) == contents(build(data_config(a), (8, 0, 0)).train)


def notes_of(data: DataConfig, seq_length: int, num_samples: tuple[int, int, int]) -> list[str]:
    return [
        note
        for found in requested_groups(data, seq_length, num_samples)
        for group, _ in found
        for note in group.notes
    ]


def test_components_too_small_for_a_split_are_left_out_of_it_with_a_note(
    a: str, b: str, tmp_path: Path
) -> None:
    tiny = write_documents(tmp_path / "tiny", [[1, 2, 3, 4, 5, 6, 7]])
    short = write_documents(tmp_path / "short", [[1, 2], [3], [], [4]])
    data = data_config("1", a, "5", tiny, "2", short, "3", b, split="80,20,0")
    train, (valid,), _ = build(data, (30, 4, 0))
    # The data set `tiny` has no document in valid. `short` has 3 tokens in train and 1 in valid. A sample has
    # 5.
    assert contents(train) == contents(
        build(data_config("1", a, "5", tiny, "3", b, split="80,20,0"), (30, 0, 0)).train
    )
    assert contents(valid) == contents(
        build(data_config("1", a, "3", b, split="80,20,0"), (0, 4, 0)).valid[0]
    )
    notes = notes_of(data, SEQ, (30, 4, 0))
    few, none = "which have fewer tokens in it than a sample, 5", "which have no tokens in it"
    assert notes == [
        f"note: train leaves out 1 of 4 data sets, {few}: {short}",
        f"note: valid leaves out 1 of 4 data sets, {few}: {short}",
        f"note: valid leaves out 1 of 4 data sets, {none}: {tiny}",
    ]
    saved = data_fingerprint(data, SEQ, SEED, 30)
    assert saved["paths"] == [a, tiny, b] and saved["weights"] == [1, 5, 3]
    for words in (("1", short, "1", short), (short, short)):
        with pytest.raises(UserError, match="short: the train split has 3 tokens"):
            build(data_config(*words, split="80,20,0"), (8, 0, 0))


def test_without_weights_an_epoch_of_each_is_read_in_proportion_to_its_size(
    a: str, b: str, tmp_path: Path
) -> None:
    c = write_documents(tmp_path / "c", [[token + 5000 for token in range(60 * 7)]])
    data = data_config(a, b, c)
    sizes = [(60 - 1) // SEQ, (67 - 1) // SEQ, (420 - 1) // SEQ]
    blend = build(data, (2 * sum(sizes), 0, 0)).train
    samples = contents(blend)
    for epoch in (samples[: sum(sizes)], samples[sum(sizes) :]):
        firsts = np.array(epoch)[:, 0]
        assert [int(np.sum(firsts < 1000)), int(np.sum((firsts >= 1000) & (firsts < 5000)))] == sizes[:2]
    first = np.array(contents(build(data, (sum(sizes), 0, 0)).train))
    for tokens, size in ((first[first < 1000], sizes[0]), (first[first >= 5000], sizes[2])):
        assert len(np.unique(tokens)) == size * SEQ + 1  # samples share only the tokens at their ends
    assert data_fingerprint(data, SEQ, SEED, 9)["weights"] == list(
        integer_weights([Fraction(size) for size in sizes])
    )
    assert contents(build(data_config(a), (5, 0, 0)).train) == contents(
        build(data_config(a, split="1,0,0"), (5, 0, 0)).train
    )


@pytest.mark.parametrize(("limit", "samples"), [(2.0, 120), (0.5, 40), (3.7, 213)])
def test_renormalized_shares_equal_a_computation_by_bisection(
    a: str, b: str, tmp_path: Path, limit: float, samples: int
) -> None:
    """Water filling: bisection finds the common factor of the weights of the components below their limit."""
    c = write_documents(tmp_path / "c", [[7] * 9])
    d = write_documents(tmp_path / "d", [list(range(900))])
    paths, tokens, weights = [a, b, c, d], [60, 67, 9, 900], [5.0, 2.0, 0.7, 1.0]
    words = [word for weight, path in zip(weights, paths, strict=True) for word in (str(weight), path)]
    data = replace(data_config(*words), max_epochs_per_dataset=limit, max_epochs_action="renormalize")
    caps = [int(limit * count / SEQ) for count in tokens]
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(cap, middle * weight) for cap, weight in zip(caps, weights, strict=True))
        low, high = (middle, high) if filled < samples else (low, middle)
    ((group, _),) = requested_groups(data, SEQ, (samples, 0, 0))[0]
    counts = dict(
        zip(
            [part.dataset.prefix for part in group.components],
            group.samples_of_components(samples),
            strict=True,
        )
    )
    assert sum(counts.values()) == samples
    for path, cap, weight in zip(paths, caps, weights, strict=True):
        assert counts.get(path, 0) == cap if low * weight >= cap else abs(counts[path] - low * weight) <= 1
    blend = build(data, (samples, 0, 0)).train
    assert sum(sample[0] == 7 for sample in contents(blend)) >= counts.get(c, 0)
    (note,) = group.notes
    assert (
        f"renormalized over {samples} samples" in note
        and f"{a} (" in note
        and f"-> {caps[0]} samples)" in note
    )
    saved = data_fingerprint(data, SEQ, SEED, samples)
    assert saved["renormalized_over"] == samples
    longer = data_fingerprint(data, SEQ, SEED, samples + 8)
    assert fingerprint_differences(saved, longer) and same_data(saved, longer)
    below = replace(data, max_epochs_per_dataset=1000.0)
    assert "renormalized_over" not in data_fingerprint(below, SEQ, SEED, samples)
    with pytest.raises(ConfigError, match="all its data sets together have .* shorten the run"):
        data_fingerprint(data, SEQ, SEED, sum(caps) + 1)


def test_groups_read_their_ranges_under_their_names(a: str, b: str) -> None:
    data = groups(
        f"ALL: 1 0:0.6 {a}, 1 0:0.5 {b}", f"A: 1 0.6:0.8 {a}", f"B: 1 0.5:1 {b}", test=(f"T: 1 0.8:1 {a}",)
    )
    train, valid, test = build(data, (20, 4, 4))
    assert [dataset.name for dataset in (train, *valid, *test)] == ["ALL", "A", "B", "T"]
    ends_a, ends_b = np.cumsum(SIZES_A), np.cumsum(SIZES_B) + 1000
    tokens = np.array(contents(train)).ravel()
    assert tokens[tokens < 1000].max() < ends_a[5] and tokens[tokens >= 1000].max() < ends_b[4]
    assert ends_a[5] <= np.min(contents(valid[0])) <= np.max(contents(valid[0])) < ends_a[7]
    assert np.min(contents(valid[1])) >= ends_b[4]
    assert ends_a[7] <= np.min(contents(test[0])) and np.max(contents(test[0])) < 1000


def test_index_files_of_two_ranges_do_not_collide_and_equal_ones_are_shared(a: str, tmp_path: Path) -> None:
    data = groups(f"T: 1 0:0.5 {a}", f"V: 1 0.5:1 {a}", f"W: 1 0.5:1 {a}")
    missing = missing_files(data, SEQ, SEED, (4, 4, 0))
    build(data, (4, 4, 0))
    assert sorted(missing) == sorted(map(str, tmp_path.glob("*.npy"))) and len(missing) == 6
    assert missing_files(data, SEQ, SEED, (4, 4, 0)) == []
    found = sorted(path.name for path in tmp_path.glob("a_*_doc_idx.npy"))
    assert found == [f"a_documents{part}_indexmap_1epochs_4sl_7s_doc_idx.npy" for part in ("0-5", "5-10")]


def test_an_empty_range_is_refused(a: str) -> None:
    with pytest.raises(UserError, match=r"0.5:0.51 of .* in the group 'V' .* 10 documents"):
        prepare_index_files(groups(f"T: 1 0:1 {a}", f"V: 1 0.5:0.51 {a}"), SEQ, SEED, (4, 4, 0))


def test_a_damaged_component_is_named_with_the_flag_that_gave_it(a: str, b: str) -> None:
    os.truncate(f"{b}.bin", 10)
    for data in (data_config("1", a, "1", b), groups(f"T: 1 0:1 {a}, 1 0:1 {b}")):
        with pytest.raises(UserError, match=re.escape(f"{b}.bin: truncated")):
            data_fingerprint(data, SEQ, SEED, 5)
    os.remove(f"{b}.idx")
    with pytest.raises(UserError, match=f"--train-weighted-split-paths {b}: the file .* does not exist"):
        data_fingerprint(groups(f"T: 1 0:1 {a}, 1 0:1 {b}"), SEQ, SEED, 5)


def test_the_fingerprint_contains_components_weights_and_ranges(a: str, b: str) -> None:
    data = data_config("0.3", a, "0.7", b)
    saved = data_fingerprint(data, SEQ, SEED, 20)
    assert saved == {
        "paths": [a, b],
        "weights": [3, 7],
        "split": [1.0, 0.0, 0.0],
        "seed": SEED,
        "seq_length": SEQ,
        "documents": [10, 10],
        "tokens": [60, 67],
        "epochs": [1, 1],
        "last_epoch_apart": [False, False],
    }
    differing = {
        "weights": data_config("0.4", a, "0.6", b),
        "paths": data_config("0.3", b, "0.7", a),
        "split": groups(f"T: 3 0:1 {a}, 7 0:1 {b}"),
    }
    for name, other in differing.items():
        now = data_fingerprint(other, SEQ, SEED, 20)
        assert name in [text.split(":")[0] for text in fingerprint_differences(saved, now)]
    assert fingerprint_differences(saved, data_fingerprint(data_config("3", a, "7", b), SEQ, SEED, 20)) == []
