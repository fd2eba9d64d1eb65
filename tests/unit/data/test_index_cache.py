"""Tests the names, verification and repair of index files."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import resource
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import files
from megatron.data import indices
from megatron.data.dataset_builder import IndexedDatasetBuilder, _remove_leftovers
from megatron.data.index_files import remove_leftovers, write_array
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import IndexRequest, load_sample_index, prepare_sample_index
from megatron.errors import UserError
from tests.unit.data.token_files import index_request, numbered_documents, write_documents

SIZES = [5, 0, 7, 3, 9, 11, 2, 6]
KINDS = ["doc", "sample", "shuffle"]
STEM = "documents0-8_indexmap_3epochs-last-apart_4sl_1234s"


@pytest.fixture
def request_(tmp_path: Path) -> IndexRequest:
    return index_request(tmp_path)


def arrays(request: IndexRequest) -> list[Any]:
    index = load_sample_index(request)
    return [index.documents.tolist(), index.samples.tolist(), index.shuffle.tolist()]


def index_file(request: IndexRequest, kind: str) -> str:
    return f"{request.dataset.prefix}_{STEM}_{kind}_idx.npy"


def test_files_have_names_of_what_determines_them_and_no_temporary_file_remains(
    request_: IndexRequest, tmp_path: Path
) -> None:
    prepare_sample_index(request_)
    names = [f"data_{STEM}_{kind}_idx.npy" for kind in KINDS]
    assert sorted(os.listdir(tmp_path)) == sorted(["data.bin", "data.idx", *names])


def test_valid_files_are_kept(request_: IndexRequest) -> None:
    prepare_sample_index(request_)
    before = [os.stat(path).st_ino for path in request_.paths()]
    prepare_sample_index(request_)
    assert [os.stat(path).st_ino for path in request_.paths()] == before


def descriptors_of(files: Iterable[str]) -> list[int]:
    """Returns this process's descriptors of these files. Objects of earlier tests have further
    descriptors."""
    inodes = {os.stat(path).st_ino for path in files}
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += [int(name)] if os.fstat(int(name)).st_ino in inodes else []
    return found


def take_all_descriptors(taken: list[int]) -> None:
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))


def test_mapped_files_hold_no_descriptors_and_an_exhausted_limit_is_raised_or_named(
    request_: IndexRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_sample_index(request_)
    expected = arrays(request_)
    inodes = [os.stat(path).st_ino for path in request_.paths()]
    data = [IndexedDataset(request_.dataset.prefix) for _ in range(20)]
    loaded = [load_sample_index(replace(request_, dataset=dataset)) for dataset in data]
    mapped = [*request_.paths(), f"{request_.dataset.prefix}.bin", f"{request_.dataset.prefix}.idx"]
    assert descriptors_of(mapped) == []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit = files._raise_descriptor_limit
    monkeypatch.setattr(files, "_raise_descriptor_limit", lambda: False)
    taken = [os.dup(0) for _ in range(64)]  # a limit below the highest descriptor would not be reached
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, limits[1]))
    gc.disable()  # a collection closes descriptors of earlier tests
    try:
        for read in (
            lambda: IndexedDataset(request_.dataset.prefix),
            lambda: prepare_sample_index(request_),
            lambda: load_sample_index(request_),
        ):
            take_all_descriptors(taken)
            with pytest.raises(UserError) as caught:
                read()
            sentence = str(caught.value)
            assert "(Too many open files: raise the limit with ulimit -n)" in sentence
            assert request_.dataset.prefix in sentence and "damaged" not in sentence
        monkeypatch.setattr(files, "_raise_descriptor_limit", raise_limit)
        take_all_descriptors(taken)
        assert len(IndexedDataset(request_.dataset.prefix)) == 8
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert arrays(request_) == expected and loaded[-1].shuffle.tolist() == expected[2]
    assert [os.stat(path).st_ino for path in request_.paths()] == inodes  # they were not built again


DAMAGES: dict[str, Callable[[str], object]] = {
    "truncated": lambda path: os.truncate(path, os.path.getsize(path) - 3),
    "empty": lambda path: os.truncate(path, 0),
    "shorter": lambda path: np.save(path, np.load(path)[:-1]),
    "zeros": lambda path: np.save(path, np.zeros_like(np.load(path))),
    "removed": os.remove,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_reader_names_a_damaged_file_and_the_builder_replaces_it(
    request_: IndexRequest, kind: str, damage: str
) -> None:
    prepare_sample_index(request_)
    good = arrays(request_)
    DAMAGES[damage](index_file(request_, kind))
    if damage != "zeros":  # a reader does not read the contents
        with pytest.raises(UserError, match=re.escape(index_file(request_, kind))):
            load_sample_index(request_)
    prepare_sample_index(request_)
    assert arrays(request_) == good


def test_the_builder_notices_other_data_of_the_same_size(request_: IndexRequest, tmp_path: Path) -> None:
    prepare_sample_index(request_)
    good = arrays(request_)
    write_documents(tmp_path / "data", numbered_documents(SIZES[::-1]))
    other = IndexRequest(IndexedDataset(tmp_path / "data"), "train", range(0, 8), 25, 4, 1234)
    prepare_sample_index(other)
    assert arrays(other)[0] == good[0]
    assert arrays(other)[1] != good[1]


def test_the_builder_replaces_an_order_with_another_last_epoch_threshold(request_: IndexRequest) -> None:
    prepare_sample_index(request_)
    good = arrays(request_)
    assert request_.plan().separate_last_epoch
    mixed = np.random.RandomState(0).permutation(request_.plan().total_samples).astype(np.uint32)
    np.save(index_file(request_, "shuffle"), mixed)
    prepare_sample_index(request_)
    assert arrays(request_) == good


def test_the_builder_replaces_an_order_with_other_samples_of_the_same_sum(request_: IndexRequest) -> None:
    prepare_sample_index(request_)
    good = arrays(request_)
    file = index_file(request_, "shuffle")
    shuffle = np.load(file)
    first, second = np.flatnonzero((shuffle == 5) | (shuffle == 8))
    shuffle[first], shuffle[second] = 6, 7
    np.save(file, shuffle)
    prepare_sample_index(request_)
    assert arrays(request_) == good


def test_a_folder_that_cannot_be_written_is_named(
    request_: IndexRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(indices.np, "save", refuse)
    with pytest.raises(UserError, match=rf"cannot write index files into {tmp_path} \(Permission denied\)"):
        prepare_sample_index(request_)
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_data_sets_of_the_same_name_share_no_file_in_a_cache_folder(
    request_: IndexRequest, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    dataset = IndexedDataset(write_documents(tmp_path / "other" / "data", numbered_documents(SIZES)))
    one, other = (
        replace(request, cache_folder=str(tmp_path / "cache"))
        for request in (request_, replace(request_, dataset=dataset))
    )
    assert not set(one.paths()) & set(other.paths())


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_flag(
    request_: IndexRequest, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cached = replace(request_, cache_folder=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=rf"{tmp_path}/file/cache \(Not a directory\).*--data-cache-path"):
        prepare_sample_index(cached)


def test_too_few_tokens_are_refused_with_numbers(request_: IndexRequest) -> None:
    short = IndexRequest(request_.dataset, "valid", range(0, 2), 1, 5, 1234)
    with pytest.raises(UserError, match=r"valid split has 5 tokens in 2 documents.* 6 .*--seq-length"):
        prepare_sample_index(short)


def test_a_file_that_is_removed_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.npy.tmp"
    lock, removed = fcntl.flock, []

    def remove_and_lock(file: Any, operation: int) -> None:
        if not removed:
            removed.append(path.unlink())
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with files.create_locked(str(path)) as file:
        assert len(removed) == 1 and os.path.samestat(os.fstat(file.fileno()), path.stat())
        with pytest.raises(BlockingIOError), files.locked_leftover(str(path)):
            pass


def test_no_file_that_a_process_writes_is_removed_as_a_leftover(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for value in range(150):
            write_array(str(tmp_path / f"{number}.npy"), np.arange(value))
            with IndexedDatasetBuilder(tmp_path / f"set{number}", np.uint16) as builder:
                builder.add_documents(np.arange(4, dtype=np.uint16), [4])
                builder.finalize()

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        while not all(writer.done() for writer in writers):
            remove_leftovers(str(tmp_path))
            _remove_leftovers(str(tmp_path / "set0"))
        for writer in writers:
            writer.result()
    assert sorted(os.listdir(tmp_path)) == [
        "0.npy",
        "1.npy",
        *(f"set{n}.{end}" for n in (0, 1) for end in ("bin", "idx")),
    ]
