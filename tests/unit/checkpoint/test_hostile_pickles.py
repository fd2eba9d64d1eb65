"""Pickles that ask for memory, time or stack: each is refused by one sentence, within bounds."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.torch_archive import load_file, read_file
from megatron.config import ConfigError
from megatron.files import HostileFileError
from tests.unit.hostile import bounds, refusal

NEW = b"\x80\x02"


def file_of(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(64))
    return path


def call(function: str, *arguments: bytes) -> bytes:
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"N" + closing * depth


def doubled(levels: int, last: bytes = b"") -> bytes:
    """Tuples of twice the same tuple: 2^levels leaves in a few bytes."""
    return b"N" + b"2\x86" * levels + last


BOMBS = {
    "bytearray": NEW + call("builtins.bytearray", number(1 << 36)) + b".",
    "set of a range": NEW + call("builtins.set", call("builtins.range", number(1 << 33))) + b".",
    "tuple of a range": NEW + b"ctorch\nSize\n(" + call("builtins.range", number(1 << 33)) + b"tR.",
    "dict of a range": NEW + call("collections.OrderedDict", call("builtins.range", number(1 << 33))) + b".",
    "memo index": NEW + b"Nr" + (1 << 31).to_bytes(4, "little") + b".",
    "large memo index of text": b"Np4000000000000\n.",
    "frame": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "length of bytes": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"N.",
    "long integer": NEW + b"\x8b" + (1 << 16).to_bytes(4, "little") + b"\x7f" * (1 << 16) + b".",
    "decimal integer": b"L" + b"9" * 200_000 + b"L\n.",
    "deep lists": NEW + nested(b"]", b"a", 200_000) + b".",
    "deep tuples": NEW + nested(b"", b"\x85", 200_000) + b".",
    "hash of deep tuples": NEW + b"}" + nested(b"", b"\x85", 200_000) + b"Ns.",
    "set of deep tuples": NEW + call("builtins.set", b"](" + nested(b"", b"\x85", 200_000) + b"e") + b".",
    "deep objects": NEW + nested(b"cargparse\nNamespace\n)\x81}X\1\0\0\0a", b"sb", 20_000) + b".",
    "shared tuples": NEW + doubled(60) + b".",
    "hash of shared tuples": NEW + b"}" + doubled(60) + b"Ns.",
    "text of shared tuples": NEW + call("torch.device", doubled(60)) + b".",
    "shared lists": NEW + b"](NNe" + b"q\x00]q\x01(h\x00h\x00eh\x01" * 60 + b".",
    "contains itself": NEW + b"]q\x00h\x00a.",
    "contains itself in an object": NEW + b"cargparse\nNamespace\n)\x81q\x00}X\1\0\0\0ah\x00sb.",
    "many instructions": NEW + b"N0" * (1 << 21) + b"N.",
    "copies of one text": NEW
    + pickle.dumps("x" * 100_000, protocol=2)[2:-1]
    + b"q\x010"
    + b"(" + call("_codecs.encode", b"h\x01", b"X\6\0\0\0latin1") * 3000 + b"t.",
    "a million sets": NEW + b"(" + b"\x8f" * 1_000_000 + b"t.",
    "mark alone": NEW + b"(.",
    "nothing": b".",
    "pop of nothing": b"0.",
    "extension": NEW + b"\x82\x01.",
    "instance of a function": b"(cbuiltins\nset\no.",
    "attribute names": NEW + b"cargparse\nNamespace\n)\x81}K\x01K\x02sb.",
}  # fmt: skip
HARMLESS = {"a million sets", "memo index", "large memo index of text", "frame", "attribute names"}


@pytest.mark.gate(rows=10)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_hostile_pickle_is_refused_within_bounds(kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f.pt", BOMBS[kind])
    if kind in HARMLESS:  # they take what their bytes explain
        with bounds():
            read_file(path)
    else:
        assert str(path) in refusal(lambda: load_file(path))


@pytest.mark.parametrize("kind", ["shared tuples", "deep lists", "many instructions"])
def test_the_error_about_a_hostile_pickle_names_the_reason(kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f.pt", BOMBS[kind])
    sentence = refusal(lambda: read_file(path), HostileFileError)
    assert "It may be malicious: check where it comes from" in sentence


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], length: int = 16) -> bytes:
    """A call that makes a tensor of storage 0, which has 64 bytes."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpu" + number(length) + b"tQ"
    sizes = b"".join(b"(" + b"".join(map(number, part)) + b"t" for part in (shape, stride))
    return NEW + call("torch._utils._rebuild_tensor_v2", storage, b"K\0", sizes, b"\x89N") + b"."


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 40,), (0,)),  # which a copy would make 4 TB of
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
    assert str(path) in refusal(lambda: load_file(path))


def test_a_storage_beyond_the_end_of_a_hostile_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save(torch.ones(1000), path)
    content = path.read_bytes()
    # The archive's directory says that the storage has a hundred times as many bytes, and so does the pickle.
    long = content.replace((4000).to_bytes(4, "little"), (400_000).to_bytes(4, "little"))
    long = long.replace(number(1000), number(100_000)[:1] + (100_000).to_bytes(4, "little")[:2])
    path.write_bytes(long)
    assert str(path) in refusal(lambda: load_file(path))


def test_a_hostile_name_of_a_class_is_shown_in_one_line(tmp_path: Path) -> None:
    path = file_of(tmp_path / "f.pt", NEW + b"\x8c\x05os\r\x1b[\x8c\x04evil\x93.")
    sentence = refusal(lambda: read_file(path), HostileFileError)
    assert r"'os\r\x1b[.evil'" in sentence and "No code of it was run" in sentence


def test_a_hostile_attribute_does_not_replace_the_origin(tmp_path: Path) -> None:
    state = pickle.dumps({"origin": "torch.Tensor", "constructor_args": 5}, protocol=2)[2:-1]
    read = read_file(file_of(tmp_path / "f.pt", NEW + b"cargparse\nNamespace\n)\x81" + state + b"b."))
    assert (read.origin, read.constructor_args) == ("argparse.Namespace", ())


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_pipe, link_to_zero, make_folder])
def test_a_hostile_file_that_is_not_regular_is_not_opened(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "f.pt")
    assert "f.pt cannot be read" in refusal(lambda: read_file(tmp_path / "f.pt"))


def test_a_link_to_a_regular_file_is_not_hostile(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "elsewhere.pt")
    (tmp_path / "f.pt").symlink_to("elsewhere.pt")
    assert read_file(tmp_path / "f.pt") == [1]
    with pytest.raises(ConfigError):
        read_file(tmp_path / "missing.pt")
