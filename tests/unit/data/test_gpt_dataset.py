"""Tests the samples of each split, and the fingerprint of their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.config.registries import DATA_ORDERS
from megatron.data.gpt_dataset import (
    build_gpt_datasets,
    data_fingerprint,
    fingerprint_differences,
    one_epoch,
    prepare_index_files,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import split_documents
from megatron.errors import UserError
from tests.unit.data.token_files import build, data_config, missing_files, numbered_documents, write_documents

SIZES = [5, 0, 7, 3, 9, 11, 2, 6, 1, 1, 1, 30, 0, 8, 4, 4, 4, 10, 12, 13]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "data", numbered_documents(SIZES))


def test_a_sample_is_seq_length_plus_1_tokens_of_the_concatenated_documents(prefix: str) -> None:
    data = data_config(prefix)
    train, valid, test = build(data, 6, 7, (60, 0, 0))
    assert train is not None and valid == () and test == ()
    assert len(train) >= 60
    stem = f"{prefix}_documents0-20_indexmap_3epochs-last-apart_6sl_7s"
    documents = numbered_documents(SIZES)
    stream = np.concatenate([documents[i] for i in np.load(f"{stem}_doc_idx.npy")])
    for i, row in enumerate(np.load(f"{stem}_shuffle_idx.npy")):
        sample = train[i]
        assert sample.dtype == np.int64
        assert sample.tolist() == stream[row * 6 : row * 6 + 7].tolist()
    for outside in (-1, len(train)):
        with pytest.raises(IndexError):
            train[outside]


def test_with_a_cache_path_nothing_is_written_next_to_the_data(prefix: str, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    data = replace(data_config(prefix, split="60,40,0"), data_cache_path=str(tmp_path / "new" / "cache"))
    assert len(missing_files(data, 4, 7, (9, 2, 0))) == 6
    cached = build(data, 4, 7, (9, 2, 0)).train
    assert missing_files(data, 4, 7, (9, 2, 0)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "new"])
    assert len(list((tmp_path / "new" / "cache").glob("*.npy"))) == 6
    uncached = build(replace(data, data_cache_path=None), 4, 7, (9, 2, 0)).train
    assert [cached[i].tolist() for i in range(9)] == [uncached[i].tolist() for i in range(9)]


def test_one_epoch_has_the_order_of_a_run_that_reads_less(prefix: str) -> None:
    data = data_config(prefix, split="60,40,0")
    (valid,) = build(data, 4, 7, (0, 2, 0)).valid
    dataset = IndexedDataset(prefix)
    documents = split_documents("60,40,0", len(dataset), DATA_ORDERS["native"])[1]
    epoch = one_epoch(dataset, "valid", documents, 4, 7)
    assert len(epoch) == (sum(dataset.sizes[documents.start : documents.stop]) - 1) // 4
    assert [epoch[i].tolist() for i in range(len(epoch))] == [valid[i].tolist() for i in range(len(valid))]


def test_splits_without_weight_documents_or_samples_are_none(prefix: str) -> None:
    data = data_config(prefix, split="999,1,0")
    train, valid, test = build(data, 3, 7, (5, 5, 5))
    assert train is not None and valid == () and test == ()
    assert build_gpt_datasets(data, 3, 7, (0, 0, 0)) == (None, (), ())


def test_a_prefix_or_pairs_are_expected(prefix: str) -> None:
    with pytest.raises(UserError, match="--data-path has 3 values"):
        prepare_index_files(data_config("0.5", prefix, "0.5"), 3, 7, (5, 0, 0))


def test_fingerprint_is_equal_exactly_when_the_order_is(prefix: str, tmp_path: Path) -> None:
    def order(seed: int, seq_length: int, samples: int) -> list[list[int]]:
        train = build(data_config(prefix), seq_length, seed, (samples, 0, 0)).train
        assert train is not None
        return [train[i].tolist() for i in range(20)]

    saved = data_fingerprint(data_config(prefix), 4, 1, 20)
    longer_in_the_same_epoch = data_fingerprint(data_config(prefix), 4, 1, 25)
    assert fingerprint_differences(saved, longer_in_the_same_epoch) == []
    assert order(1, 4, 20) == order(1, 4, 25)
    for seed, seq_length, samples, name in [
        (2, 4, 20, "seed"),
        (1, 5, 20, "seq_length"),
        (1, 4, 90, "epochs"),
    ]:
        other = data_fingerprint(data_config(prefix), seq_length, seed, samples)
        assert any(difference.startswith(f"{name}: ") for difference in fingerprint_differences(saved, other))
        assert order(1, 4, 20) != order(seed, seq_length, samples)


def test_a_fingerprint_from_before_blends_is_compatible(prefix: str) -> None:
    now = data_fingerprint(data_config(prefix), 4, 1, 20)
    assert (now["epochs"], now["last_epoch_apart"], now["weights"]) == ([1], [False], [1])
    before = {**now, "epochs": 1, "last_epoch_apart": False, "weights": [1.0]}
    assert fingerprint_differences(before, now) == []
    assert fingerprint_differences({**before, "epochs": 2}, now) == ["epochs: 2 in the checkpoint, [1] now"]


def test_fingerprint_names_other_data_but_not_another_folder(prefix: str, tmp_path: Path) -> None:
    saved = data_fingerprint(data_config(prefix), 4, 1, 20)
    (tmp_path / "moved").mkdir()
    moved = write_documents(tmp_path / "moved" / "data", numbered_documents(SIZES))
    assert fingerprint_differences(saved, data_fingerprint(data_config(moved), 4, 1, 20)) == []
    other = write_documents(tmp_path / "other", numbered_documents([*SIZES, 3]))
    differences = fingerprint_differences(saved, data_fingerprint(data_config(other, split="9,1"), 4, 1, 20))
    assert [difference.split(":")[0] for difference in differences] == [
        "documents",
        "paths",
        "split",
        "tokens",
    ]
