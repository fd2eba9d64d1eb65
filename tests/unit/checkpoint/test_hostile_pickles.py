"""Damaged or malicious files of torch.save: each is rejected with one sentence, and no code runs."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.torch_archive import read_file
from megatron.errors import UserError
from megatron.files import HostileFileError
from tests.unit.hostile import refusal

NEW = b"\x80\x02"


def file_of(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(64))
        archive.writestr("a/version", "3\n")
    return path


def call(function: str, *arguments: bytes) -> bytes:
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


# torch's own tests cover its loader. These tests show that its errors become one sentence.
DAMAGED = {
    "deep lists": NEW + b"]" * 200_000 + b"N" + b"a" * 200_000 + b".",
    "mark alone": NEW + b"(.",
    "nothing": b".",
    "pop of nothing": b"0.",
    "extension": NEW + b"\x82\x01.",
    "instance of a function": b"(cbuiltins\nset\no.",
    "other protocol": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "memory": NEW + call("builtins.bytearray", number(1 << 36)) + b".",
    "storage alone": NEW + b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\x10tQ.",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_pickle_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f.pt", DAMAGED[kind])
    with pytest.raises(UserError) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"checkpoint file {path} cannot be read (")
    assert str(caught.value).isprintable()


def test_a_value_that_contains_itself_is_read(tmp_path: Path) -> None:
    read = read_file(file_of(tmp_path / "f.pt", NEW + b"]q\x00h\x00a."))
    assert read[0] is read


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], length: int = 16) -> bytes:
    """Returns a pickle that makes a tensor of storage 0, which has 64 bytes."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpu" + number(length) + b"tQ"
    sizes = b"".join(b"(" + b"".join(map(number, part)) + b"t" for part in (shape, stride))
    return NEW + call("torch._utils._rebuild_tensor_v2", storage, b"K\0", sizes, b"\x89N") + b"."


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 40,), (0,)),  # a copy of it would have 4 TB
        ((17,), (1,)),
        ((4, 1 << 61), (0, 0)),
        ((0, 1 << 61, 1 << 61), (0, 0, 0)),
        ((1,) * 2000, (1,) * 2000),
        ((-1,), (1,)),
    ],
)
def test_a_hostile_shape_of_a_tensor_is_refused(
    shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    read_file(file_of(tmp_path / "honest.pt", tensor((4, 4), (4, 1))))
    path = file_of(tmp_path / "f.pt", tensor(shape, stride))
    assert str(path) in refusal(lambda: read_file(path))


def test_a_storage_beyond_the_end_of_a_hostile_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save(torch.ones(1000), path)
    content = path.read_bytes()
    # Both the archive's directory and the pickle claim that the storage has a hundred times as many bytes.
    long = content.replace((4000).to_bytes(4, "little"), (400_000).to_bytes(4, "little"))
    long = long.replace(number(1000), number(100_000)[:1] + (100_000).to_bytes(4, "little")[:2])
    path.write_bytes(long)
    assert str(path) in refusal(lambda: read_file(path))


def test_a_hostile_name_of_a_class_is_shown_in_one_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "f.pt", NEW + b"cos\r\x1b[\nevil\n.")
    sentence = refusal(lambda: read_file(path), HostileFileError)
    assert r"'os\r\x1b[.evil'" in sentence and "None of its code was run" in sentence


def test_a_hostile_attribute_does_not_replace_the_arguments(tmp_path: Path) -> None:
    state = pickle.dumps({"constructor_args": 5}, protocol=2)[2:-1]
    read = read_file(file_of(tmp_path / "f.pt", NEW + b"cpathlib\nPath\n)\x81" + state + b"b."))
    assert read.constructor_args == () and vars(read) == {"constructor_args": 5}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_hostile_file_that_is_not_regular_is_not_opened(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "f.pt")
    assert "f.pt cannot be read" in refusal(lambda: read_file(tmp_path / "f.pt"))


def test_a_link_to_a_regular_file_is_not_hostile(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "elsewhere.pt")
    (tmp_path / "f.pt").symlink_to("elsewhere.pt")
    assert read_file(tmp_path / "f.pt") == [1]
    with pytest.raises(UserError):
        read_file(tmp_path / "missing.pt")
