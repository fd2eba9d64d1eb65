"""Tests the stamp of prepared data, and tools/prepare_indices.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import prepare_indices
from megatron.config import DataConfig
from megatron.data import indices
from megatron.data.gpt_dataset import build_gpt_datasets, list_index_files, prepare_index_files
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import verify_token_files
from megatron.errors import UserError
from tests.end_to_end.flags import MODEL
from tests.unit.data.token_files import numbered_documents, write_documents

SEQ, SEED, WANTED = 32, 1234, (32, 8, 0)
FLAGS = [*MODEL, *"--max-position-embeddings 32 --vocab-size 100 --lr 1e-3 --eval-interval 5".split()]
FLAGS += "--micro-batch-size 1 --global-batch-size 4 --train-iters 8 --eval-iters 1 --split 80,20,0".split()
_opened: list[str] | None = None


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_on_event)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Yields the list of token files, index files and records that this process opens in the block."""
    global _opened
    everything: list[str] = []
    found: list[str] = []
    _opened = everything
    try:
        yield found
    finally:
        _opened = None
    found += [path for path in everything if path.endswith((".bin", ".idx", ".npy", ".tokenizer.json"))]


def write_sets(folder: Path, number: int) -> list[str]:
    """Returns the words of a blend of `number` data sets. Their documents differ, and have 30 to 49
    tokens."""
    words = []
    for index in range(number):
        sizes = [30 + (index + position) % 20 for position in range(20)]
        words += [str(1 + index % 3), write_documents(folder / f"set{index}", numbered_documents(sizes))]
    return words


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    words = tuple(write_sets(tmp_path, 4))
    cache = str(tmp_path / "cache")
    return DataConfig(data_path=words, split="80,20,0", data_order="megatron-core", data_cache_path=cache)


def prepare(data: DataConfig, *flags: str) -> None:
    """Runs the command that prepares WANTED samples of the data."""
    words = ["--data-path", *data.data_path, "--data-order", data.data_order]
    words += ["--data-cache-path", data.data_cache_path] if data.data_cache_path else []
    prepare_indices.main(["--world-size", "4", *FLAGS, *words, *flags])


def start(data: DataConfig, wanted: tuple[int, int, int] = WANTED) -> list[list[int]]:
    """Does what the first rank of a node does. Returns all samples."""
    verify_token_files(data).write()
    prepare_index_files(data, SEQ, SEED, wanted)
    datasets = build_gpt_datasets(data, SEQ, SEED, wanted)
    assert datasets.train is not None
    return [dataset[i].tolist() for dataset in (datasets.train, *datasets.valid) for i in range(len(dataset))]


def index_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_a_start_with_prepared_indices_opens_no_file_of_a_data_set(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = start(replace(data, data_cache_path=None))
    assert verify_token_files(data).write()  # into a folder that does not exist yet
    prepare(data)
    assert "4 data set(s), 9 indices: 9 built, 0 kept;" in capsys.readouterr().out
    with opened_files() as opened:
        verify_token_files(data).write()
        prepare_index_files(data, SEQ, SEED, WANTED)
        datasets = build_gpt_datasets(data, SEQ, SEED, WANTED)
    assert {os.path.basename(path)[:6] for path in opened} == {"blend-"}
    with opened_files() as opened:
        assert datasets.train is not None
        datasets.train[0]
    # The .idx file is opened twice: for its header and for its contents.
    assert len(opened) == 6 and len(set(opened)) == 5
    before = {path: path.stat().st_mtime_ns for path in Path(data.data_cache_path or "").iterdir()}
    assert start(data) == expected
    prepare(data)
    assert "0 built, 9 kept;" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path(data.data_cache_path or "").iterdir()} == before


def test_mock_data_have_no_indices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prepare_indices.main(["--world-size", "4", *FLAGS, "--mock-data"])
    assert "--mock-data: mock data have no indices" in capsys.readouterr().err


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace_documents(prefix: Path) -> None:
    """Exchanges the first two documents: the files keep their size, and their contents change."""
    documents = [document.tolist() for document in map(IndexedDataset(prefix).get, range(20))]
    write_documents(prefix, [*documents[1::-1], *documents[2:]])


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "touched .bin": (lambda folder: touch(folder / "set1.bin"), "set1.bin"),
    "other documents": (lambda folder: replace_documents(folder / "set1"), "set1.idx"),
    "touched index": (
        lambda folder: touch(next((folder / "cache").glob("set1*_doc_idx.npy"))),
        "doc_idx.npy",
    ),
    "removed index": (
        lambda folder: next((folder / "cache").glob("set1*_shuffle_idx.npy")).unlink(),
        "shuffle_idx.npy",
    ),
    "damaged table": (
        lambda folder: os.truncate(next((folder / "cache").glob("blend*_sample_index.npy")), 4000),
        "sample_index.npy",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_verified_and_built_again(
    data: DataConfig, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(data)
    apply, named = CHANGES[change]
    apply(tmp_path)
    found = start(data)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert named in warning and "is verified or built again, since it has changed since" in warning
    assert found == start(replace(data, data_cache_path=str(tmp_path / "other")))
    caplog.clear()
    with opened_files() as opened:  # the start has renewed the stamp
        verify_token_files(data).write()
        prepare_index_files(data, SEQ, SEED, WANTED)
    assert not caplog.records and {os.path.basename(path)[:6] for path in opened} == {"blend-"}


def test_other_tokens_under_a_record_are_refused_although_the_size_is_equal(
    data: DataConfig, tmp_path: Path
) -> None:
    digest = "0" * 64
    record = {
        "tokenizer_type": "x",
        "vocab_size": 10,
        "vocabulary_sha256": digest,
        "bin_sample_sha256": digest,
    }
    prepare(data)
    (tmp_path / "set2.tokenizer.json").write_text(json.dumps(record))
    verify_token_files(data)
    touch(tmp_path / "set2.bin")
    with pytest.raises(UserError, match="set2: the tokens of the .bin file differ from"):
        verify_token_files(data)


def test_an_index_that_is_not_valid_when_read_back_gets_no_stamp(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = indices.build_sample_index
    monkeypatch.setattr(indices, "build_sample_index", lambda *arguments: build(*arguments) + 1)
    with pytest.raises(SystemExit):
        prepare(data)
    assert "_doc_idx.npy is damaged after it was written" in capsys.readouterr().err
    assert not list(Path(data.data_cache_path or "").glob("prepared-*"))


def test_moved_data_are_verified_once(tmp_path: Path, data: DataConfig) -> None:
    (tmp_path / "old").mkdir()
    words = write_sets(tmp_path / "old", 2)
    expected = start(replace(data, data_path=tuple(words), data_cache_path=None))
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved = replace(
        data, data_path=tuple(word.replace("/old/", "/new/") for word in words), data_cache_path=None
    )
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "new").glob("*.npy")}
    with opened_files() as opened:
        assert start(moved) == expected
    assert len(opened) > 10
    assert {path.name: path.stat().st_ino for path in (tmp_path / "new").glob("*.npy")} == inodes


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1, "data_sets": {"a": {}}, "blends": {}}', "[" * 100_000]
)
def test_a_damaged_stamp_is_replaced(data: DataConfig, text: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare(data)
    (stamp,) = Path(data.data_cache_path or "").glob("prepared-*.json")
    content = stamp.read_text()
    stamp.write_text(text)
    start(data)
    assert f"{stamp} is not used" in caplog.text and json.loads(stamp.read_text()) == json.loads(content)


def test_three_shards_together_write_what_one_process_writes(data: DataConfig, tmp_path: Path) -> None:
    prepare(data)
    one, cache = index_contents(tmp_path / "cache"), tmp_path / "sharded"
    sharded = replace(data, data_cache_path=str(cache))
    for shard in ("2/3", "0/3"):
        prepare(sharded, "--shard", shard)
    # A shard builds only its own data sets. Two of three shards do not make a stamp.
    assert len(one) > len(index_contents(cache)) > 2 and len(list(cache.glob("prepared-*"))) == 2
    prepare(sharded, "--shard", "1/3")
    assert index_contents(cache) == one and len(list(cache.glob("prepared-*"))) == 4
    assert all(index.is_prepared for index in list_index_files(sharded, SEQ, SEED, WANTED))
    longer = (4 * 60, WANTED[1], 0)
    for shard in ("0/3", "1/3", "2/3"):
        assert not all(index.is_prepared for index in list_index_files(sharded, SEQ, SEED, longer))
        prepare(sharded, "--shard", shard, "--train-iters", "60", "--eval-interval", "60")
    assert all(index.is_prepared for index in list_index_files(sharded, SEQ, SEED, longer))
    # The first shard builds a lost table again. The parts of the other shards do not restore the table's old
    # entry.
    for path in cache.glob("blend-*"):
        path.unlink()
    for shard in ("0/3", "1/3", "2/3"):
        prepare(sharded, "--shard", shard)
    assert all(index.is_prepared for index in list_index_files(sharded, SEQ, SEED, WANTED))
    more = replace(data, data_cache_path=str(tmp_path / "more_shards"))
    for index in range(5):  # of 4 data sets
        prepare(more, "--shard", f"{index}/5")
    assert all(index.is_prepared for index in list_index_files(more, SEQ, SEED, WANTED))


def killed_at_sync(data: DataConfig, number: int) -> bool:
    """Prepares the data in a process that kills itself when it flushes file number `number`. Returns whether
    it was killed."""
    if (pid := os.fork()) == 0:
        count = 0

        def fsync(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        try:
            prepare_index_files(data, SEQ, SEED, WANTED, verify_token_files(data))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_after_a_kill_at_any_file_the_repeated_command_ends_with_equal_files(
    data: DataConfig, tmp_path: Path
) -> None:
    expected = start(data)
    contents = index_contents(tmp_path / "cache")
    number = 0
    killed = True
    while killed:
        number += 1
        cache = tmp_path / f"killed{number}"
        cut = replace(data, data_cache_path=str(cache))
        killed = killed_at_sync(cut, number)
        left = {path.name for path in cache.glob("*.tmp")}
        assert len(left) == killed
        partly = index_contents(cache)
        assert all(partly[name] == contents[name] for name in partly)
        if number % 5 == 1:
            assert start(cut) == expected
            assert index_contents(cache) == contents and not list(cache.glob("*.npy.*.tmp"))
    assert number == len(contents) + 2  # and the stamp


def test_a_longer_run_with_equal_epochs_finds_the_indices(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data)
    prepare(data, "--train-iters", "9")
    assert ": 9 built, 0 kept;" in (printed := capsys.readouterr().out)
    assert re.search(r" 9 indices: 0 built, 9 kept;", printed)
    assert all(index.is_prepared for index in list_index_files(data, SEQ, SEED, (36, 8, 0)))
    prepare(data, "--train-iters", "100", "--eval-interval", "100")
    # More epochs have a different order, so only the training indices are new.
    assert " 9 indices: 4 built, 5 kept;" in capsys.readouterr().out


@pytest.mark.parametrize("shards", [1, 2])
def test_a_stamp_that_is_written_again_forgets_files_that_were_deleted(
    data: DataConfig, shards: int, tmp_path: Path
) -> None:
    def names() -> set[str]:
        (path,) = (path for path in tmp_path.glob("cache/prepared-*.json") if "-of-" not in path.name)
        content = json.loads(path.read_text())
        files = {name for entry in content["data_sets"].values() for name in entry["files"]}
        return files | {os.path.basename(path) for path in content["blends"]}

    def prepare_shards(*flags: str) -> None:
        for shard in range(shards):
            prepare(data, "--shard", f"{shard}/{shards}", *flags)

    prepare_shards()
    short = names()
    for path in tmp_path.glob("cache/*.npy"):
        path.unlink()
    prepare_shards("--train-iters", "100", "--eval-interval", "100")
    long = names()
    assert len(long) == len(short) == 4 + 8 + 1  # token files, indices of two splits, a table
    of_split = {name for name in short if "_documents0-" in name}
    assert len(of_split) == 4 and not of_split & long
    prepare_shards()
    assert long < names() and short < names()  # files that exist are remembered


def test_a_stamp_that_cannot_be_written_is_an_error_of_the_tool_and_a_line_of_a_start(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = start(data)
    for path in (tmp_path / "cache").glob("prepared-*"):
        path.unlink()
    opened = open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if "prepared-" in str(path):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    assert start(data) == expected
    assert "cannot be written (Read-only file system): the next start verifies again" in caplog.text
    with pytest.raises(SystemExit):
        prepare(data)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "3/3"], "--shard 3/3: expected I/N"),
        (["--threads", "0"], "--threads is 0"),
        (["--data-path", "nowhere"], "the file nowhere.idx does not exist"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--data-cache-path", __file__], "set --data-cache-path to a different folder"),
    ],
)
def test_mistakes_are_sentences(
    data: DataConfig, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare(data, *flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err
