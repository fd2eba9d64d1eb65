"""Damaged or malicious token files, index files and texts are rejected with one sentence."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from megatron.data import text_files
from megatron.data.batch_encoder import parse_line
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import IndexRequest, load_sample_index, prepare_sample_index
from megatron.data.text_files import MAX_LINE_BYTES, read_batches
from tests.unit.data.token_files import index_request
from tests.unit.hostile import MUTATIONS, bounds, fuzz, mutated


def test_a_hostile_gz_file_of_one_endless_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(300):
            file.write(bytes(1 << 20))
        file.write(b'"}\n{"text": "last"}\n')
    assert path.stat().st_size < 1 << 20
    with bounds(memory_mib=400):
        lines = [line for batch in read_batches([str(path)]) for line in batch.lines]
        found = [parse_line(line, ["text"]) for line in lines]
    reason = f"longer than {MAX_LINE_BYTES:,} bytes, split the document into several lines"
    assert found == [["first"], reason, ["last"]]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_of_the_maximum_length_is_accepted(
    end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 20)
    lines = [b"a" * 19 + b"\n", b"b" * 60 + b"\n", b"c" * 41 + b"\n", b"d\n", b"e" * 50 + end]
    (tmp_path / "f").write_bytes(b"".join(lines))
    found = [line for batch in read_batches([str(tmp_path / "f")]) for line in batch.lines]
    assert found == [lines[0], b"b" * 21, b"c" * 21, b"d\n", b"e" * 21]


def test_only_its_batch_holds_a_long_line(tmp_path: Path) -> None:
    """A worker or the encoder removes the line from its batch, and so frees the line's memory while it
    tokenizes."""
    (tmp_path / "f").write_bytes(b"a" * text_files.BATCH_BYTES + b"\nb\n")
    batches = read_batches([str(tmp_path / "f")])
    line = next(batches).lines.pop()
    assert len(line) == text_files.BATCH_BYTES + 1
    assert sys.getrefcount(line) == 2  # the variable and the argument
    assert [batch.lines for batch in batches] == [[b"b\n"]]


def test_hostile_json_in_a_line_is_refused() -> None:
    with bounds():
        for line in (b"[" * 1_000_000, b'{"a":' * 200_000, b'{"text": ' + b"9" * 1_000_000 + b"}"):
            assert str(parse_line(line, ["text"])).startswith("not valid JSON")


@pytest.fixture
def request_(tmp_path: Path) -> IndexRequest:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "f").write_text("dear")
    return index_request(tmp_path)


@pytest.mark.parametrize("examples", MUTATIONS)
@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_hostile_mutations_of_token_files(
    examples: int, ending: str, request_: IndexRequest, tmp_path: Path
) -> None:
    path = tmp_path / f"data.{ending}"
    good = path.read_bytes()

    def read() -> None:
        dataset = IndexedDataset(tmp_path / "data")
        for index in range(len(dataset)):
            dataset[index].sum()

    # Each change makes a new file, since a map of the old file would change under its reader.
    def change(_: st.DataObject, changes: list) -> None:
        path.unlink()
        path.write_bytes(mutated(good, changes))

    fuzz(examples, read, change, tmp_path / "victim")


@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_index_files(examples: int, request_: IndexRequest, tmp_path: Path) -> None:
    prepare_sample_index(request_)
    good = {path: Path(path).read_bytes() for path in request_.paths()}
    expected = load_sample_index(request_)

    def read() -> None:
        load_sample_index(request_)
        # The process that prepares index files finds damage, and builds the files again.
        prepare_sample_index(request_)
        index = load_sample_index(request_)
        for name in ("documents", "samples", "shuffle"):
            assert np.array_equal(getattr(index, name), getattr(expected, name))

    def change(data: st.DataObject, changes: list) -> None:
        for path, content in good.items():
            os.unlink(path)
            Path(path).write_bytes(content)
        path = data.draw(st.sampled_from(sorted(good)))
        os.unlink(path)
        Path(path).write_bytes(mutated(good[path], changes))

    fuzz(examples, read, change, tmp_path / "victim")


@pytest.mark.parametrize(
    "header", ["(" * 5000, "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", "9" * 9000]
)
def test_a_hostile_header_of_an_index_file_is_refused(header: str, request_: IndexRequest) -> None:
    prepare_sample_index(request_)
    path = Path(request_.paths()[0])
    path.unlink()
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(100))
    with bounds():
        prepare_sample_index(request_)
    assert len(load_sample_index(request_).documents) == 8 * 3
