"""Compares the .bin and .idx files with handwritten bytes."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.indexed_dataset import MAGIC, IndexedDataset, smallest_dtype
from megatron.errors import UserError
from tests.unit.data.token_files import write_documents

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6]]


def index_bytes(
    code: int = 8,
    sizes: tuple[int, ...] = (3, 0, 1, 2),
    pointers: tuple[int, ...] = (0, 6, 6, 8),
    doc_idx: tuple[int, ...] = (0, 1, 2, 3, 4),
    magic: bytes = MAGIC,
    version: int = 1,
) -> bytes:
    return (
        magic
        + struct.pack("<QBQQ", version, code, len(sizes), len(doc_idx))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(doc_idx)}q", *doc_idx)
    )


DATA_BYTES = struct.pack("<6H", 1, 2, 3, 4, 5, 6)


def write_raw(folder: Path, index: bytes, data: bytes = DATA_BYTES) -> str:
    (folder / "data.idx").write_bytes(index)
    (folder / "data.bin").write_bytes(data)
    return str(folder / "data")


def test_builder_writes_the_documented_bytes(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", DOCUMENTS)
    assert (tmp_path / "data.idx").read_bytes() == index_bytes()
    assert (tmp_path / "data.bin").read_bytes() == DATA_BYTES
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_reader_reads_the_documented_bytes(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_raw(tmp_path, index_bytes()))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.sizes.tolist() == [3, 0, 1, 2]
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3, 4]
    assert dataset.num_tokens == 6


@pytest.mark.parametrize(
    "dtype, code", [("uint8", 1), ("int8", 2), ("int16", 3), ("int32", 4), ("int64", 5), ("uint16", 8)]
)
def test_every_integer_type_survives_the_round_trip(tmp_path: Path, dtype: str, code: int) -> None:
    limits = np.iinfo(dtype)
    documents = [[limits.min, 0, limits.max], [7]]
    dataset = IndexedDataset(write_documents(tmp_path / "data", documents, dtype))
    assert (tmp_path / "data.idx").read_bytes()[17] == code
    assert dataset.dtype == np.dtype(dtype)
    assert [dataset[i].tolist() for i in range(2)] == documents


def test_get_returns_a_part_of_a_document(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "data", DOCUMENTS))
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(3, 2).tolist() == []
    for index, offset, length in [(4, 0, None), (-1, 0, None), (0, 2, 2), (0, -1, 1), (2, 0, 3)]:
        with pytest.raises(IndexError):
            dataset.get(index, offset, length)


def test_the_system_reads_only_the_pages_of_a_sample(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents(np.arange(9000), [4000, 5000])
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "data")
    flags, name = {}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *fields = line.split()
        if not first.endswith(":"):  # the addresses of the next mapping
            name = fields[-1]
        elif first == "VmFlags:":
            flags[name] = fields
    # "rr" means random reads: the system does not read megabytes around a page.
    assert "rr" in flags[f"{tmp_path}/data.bin"] and "rr" not in flags[f"{tmp_path}/data.idx"]
    assert dataset.get(1, 4990, 0).tolist() == [] and dataset.get(1, 4990).tolist() == [*range(8990, 9000)]


def test_documents_are_read_only(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "data", DOCUMENTS))
    with pytest.raises(ValueError):
        dataset[0][0] = 9


def test_pickled_dataset_reads_the_same(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "data", DOCUMENTS))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000  # the path, not the data
    assert pickle.loads(pickled)[0].tolist() == [1, 2, 3]


def test_many_documents_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    write_documents(tmp_path / "one", DOCUMENTS)
    with IndexedDatasetBuilder(tmp_path / "many", "uint16") as builder:
        builder.add_documents(np.array([1, 2, 3, 4], dtype=np.uint16), [3, 0, 1])
        builder.add_documents([], [])
        builder.add_documents([5, 6], [2])
        builder.finalize()
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "many.bin").read_bytes()


@pytest.mark.parametrize(
    "index, data, expected",
    [
        (index_bytes()[:-1], DATA_BYTES, r"data\.idx: truncated, it has 121 bytes"),
        (index_bytes() + b"\0", DATA_BYTES, r"data\.idx: too long"),
        (index_bytes()[:20], DATA_BYTES, r"data\.idx: truncated, its header has 20 of 34"),
        (MAGIC + struct.pack("<QBQQ", 1, 8, 2**63, 2**62), DATA_BYTES, r"data\.idx: truncated"),
        (b"", DATA_BYTES, r"data\.idx: is empty"),
        (index_bytes(magic=b"MMIDIDY\x00\x00"), DATA_BYTES, r"data\.idx: not a Megatron index file"),
        (index_bytes(magic=b"TNTIDX\x00\x00\x00"), DATA_BYTES, r"data\.idx: .*--dataset-impl mmap"),
        (index_bytes(version=2), DATA_BYTES, r"data\.idx: has format version 2, expected 1"),
        (index_bytes(code=9), DATA_BYTES, r"data\.idx: damaged, its dtype code 9"),
        (index_bytes(code=6), DATA_BYTES, r"data\.idx: contains floating-point numbers"),
        (
            index_bytes(pointers=(0, 6, 6, 99)),
            DATA_BYTES,
            r"data\.idx: damaged, document 3 begins at byte 99",
        ),
        (
            index_bytes(pointers=(0, 6, 6, -8)),
            DATA_BYTES,
            r"data\.idx: damaged, document 3 begins at byte -8",
        ),
        (index_bytes(sizes=(3, 0, -1, 4)), DATA_BYTES, r"data\.idx: damaged, document 2 has -1 tokens"),
        (index_bytes(doc_idx=(0, 2, 1, 3, 4)), DATA_BYTES, r"data\.idx: damaged, its document index"),
        (index_bytes(doc_idx=(0, 1, 2, 3, 5)), DATA_BYTES, r"data\.idx: damaged, its document index"),
        (index_bytes(), DATA_BYTES[:-1], r"data\.bin: truncated, it has 11 bytes"),
        (index_bytes(), DATA_BYTES + b"\0\0", r"data\.bin: too long, it has 14 bytes"),
        (index_bytes(), b"", r"data\.bin: truncated, it has 0 bytes"),
        (index_bytes(sizes=(), pointers=(), doc_idx=(0,)), b"", r"data\.idx: contains no documents"),
        (index_bytes(sizes=(0,), pointers=(0,), doc_idx=(0, 1)), b"", r"data\.bin: contains no tokens"),
    ],
)
def test_a_bad_file_is_named_when_opened(tmp_path: Path, index: bytes, data: bytes, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        IndexedDataset(write_raw(tmp_path, index, data))


@pytest.mark.parametrize("missing", ["data.idx", "data.bin"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    prefix = write_raw(tmp_path, index_bytes())
    os.remove(tmp_path / missing)
    with pytest.raises(UserError, match=rf"--data-path .*{missing} does not exist"):
        IndexedDataset(prefix)


def test_a_prefix_with_an_extension_gets_a_hint(tmp_path: Path) -> None:
    prefix = write_raw(tmp_path, index_bytes())
    with pytest.raises(UserError, match=rf"give the prefix {prefix} without the extension"):
        IndexedDataset(prefix + ".bin")


def test_an_unfinished_builder_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "data", "uint16") as builder:
        builder.add_documents([1], [1])
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_old_files_stay_until_finalize(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", DOCUMENTS)
    with IndexedDatasetBuilder(prefix, "int32") as builder:
        builder.add_documents([70000], [1])
        assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
        builder.finalize()
    assert IndexedDataset(prefix)[0].tolist() == [70000]


@pytest.mark.parametrize("dtype, token", [("uint16", 65536), ("uint16", -1), ("int8", 128)])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, dtype: str, token: int) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
        with pytest.raises(ValueError, match="do not fit"):
            builder.add_documents([token], [1])


def test_the_dtype_is_megatrons_smallest() -> None:
    assert smallest_dtype(65499) == np.uint16
    assert smallest_dtype(65500) == np.int32
