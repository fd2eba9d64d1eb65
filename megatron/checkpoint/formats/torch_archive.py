"""Reads and writes files of `torch.save` without torch, and without running code from them.

Such a file is an uncompressed zip archive. `<name>/data.pkl` is a pickle in which each tensor names a
storage; the storage's bytes are the member `<name>/data/<key>`. A pickle can name any function and call it.
Here it can only name what is listed in the tables below, all of it harmless. Other programs' classes become
`Stub` objects, which hold the arguments and attributes. See `pickles`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.formats.pickles import (
    Function,
    HostilePickle,
    PickleError,
    StubType,
    check_key,
    read_pickle,
)
from megatron.checkpoint.integrity.access import read_with_retries
from megatron.checkpoint.integrity.names import is_plain, shown
from megatron.config.errors import ConfigError, is_access_error, one_line
from megatron.files import HostileFileError, open_regular
from megatron.mapped_file import map_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

# Bytes per element of torch's types, and the type of the elements of its storage classes.
_ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1},
}
_STORAGES = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16"},
    **{"BFloat16Storage": "bfloat16", "BoolStorage": "bool", "LongStorage": "int64", "IntStorage": "int32"},
    **{"ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8"},
}
# A pickle with tens of thousands of parameters has a few MB.
_MAX_PICKLE_BYTES = 1 << 26
# Limit for one read, such as the list of the archive's members.
_MAX_READ_BYTES = 1 << 27
_MAX_DIMS = 16
# torch aligns storages in the file to this many bytes.
_ALIGNMENT = 64


class StoredFile:
    """A file of torch.save, mapped into memory when a tensor of it is first used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def mapping(self) -> npt.NDArray[np.uint8]:
        # Copy on write: torch wants memory that could be written to; the file stays as it is.
        return map_file(self.path, copy_on_write=True)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    dtype: torch's name. begin: offset in bytes of element 0 in the file. stride: in elements, as torch's.
    """

    file: StoredFile
    dtype: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        return self.numel < 2 or self.stride == contiguous_stride(self.shape)

    def part(self, start: int, length: int) -> StoredTensor:
        """Elements start to start + length - 1 of a flat tensor; ConfigError if it has fewer."""
        if not (type(start) is type(length) is int and 0 <= start <= start + length <= self.numel):
            raise ConfigError(
                f"checkpoint file {self.file.path} names {length} elements from {start} on in a tensor of "
                f"{self.numel:,}: it is damaged"
            )
        return replace(self, begin=self.begin + start * self.item_bytes, shape=(length,))

    def item(self) -> float:
        """The number in a tensor of one element."""
        formats = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i"}
        if self.numel != 1 or self.dtype not in formats:
            raise ConfigError(
                f"checkpoint file {self.file.path} holds a {self.dtype} tensor of {self.numel:,} elements, "
                "expected a number: it is damaged"
            )
        with open_regular(self.file.path) as file:
            file.seek(self.begin)
            (number,) = struct.unpack(formats[self.dtype], file.read(self.item_bytes))
        return number

    def tensor(self) -> Tensor:
        """The torch tensor, which shares memory with the mapped file."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.numel == 0:
            return torch.empty(self.shape, dtype=dtype)
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.frombuffer(self.file.mapping, dtype=dtype, count=extent, offset=self.begin)
        return flat.as_strided(self.shape, self.stride)


def concat_pieces(pieces: Sequence[StoredTensor]) -> Tensor:
    """The flat tensor that consecutive pieces make; a single piece shares memory with its file."""
    import torch

    return pieces[0].tensor() if len(pieces) == 1 else torch.cat([piece.tensor() for piece in pieces])


def read_file(path: Path) -> Any:
    """Reads what was saved, with a `StoredTensor` for each tensor. Reads the structure only.

    Raises ConfigError, which names the file, if it is damaged, OSError if it cannot be read now, and
    HostileFileError if it is a bomb or names a function that checkpoints do not use (none was run).
    """
    try:
        return read_with_retries(path, lambda: _read_archive(path))
    except _Refused as error:
        raise HostileFileError(
            f"checkpoint file {path} cannot be read: it names {error}, which checkpoints do not use. "
            "No code of it was run; it may be malicious: check where it comes from"
        ) from None
    except HostilePickle as error:
        raise HostileFileError(
            f"checkpoint file {path} cannot be read: {error}, which checkpoints do not use. It may be "
            "malicious: check where it comes from"
        ) from None
    except Exception as error:  # a damaged file can fail anywhere
        if is_access_error(error):
            raise
        raise ConfigError(
            f"checkpoint file {path} cannot be read ({one_line(error)}): use an older checkpoint"
        ) from error


def _read_archive(path: Path) -> Any:
    with open_regular(path) as file, zipfile.ZipFile(_Bounded(file)) as archive:  # type: ignore[arg-type]
        (pickled,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]*/data\.pkl", name))
        return _Archive(path, file, archive, pickled.removesuffix("data.pkl")).read()


class _Bounded:
    """A file with a limit on the size of one read."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(min(size, _MAX_READ_BYTES + 1) if size >= 0 else _MAX_READ_BYTES + 1)
        if len(content) > _MAX_READ_BYTES:
            raise HostilePickle(f"its structure has more than {_MAX_READ_BYTES:,} bytes")
        return content

    def close(self) -> None:
        """Its owner closes the file."""


def load_file(path: Path) -> Any:
    """As `read_file`, with memory-mapped torch tensors in dicts, lists and tuples."""
    return _with_tensors(read_file(path))


def is_intact(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether the file holds a tensor of this shape, alone or under 'param', and matches its checksums. Reads
    the whole file. ConfigError if torch.save did not write it."""
    content = read_file(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    return isinstance(tensor, StoredTensor) and tensor.shape == shape and bool(matches_checksums(path))


def matches_checksums(path: Path) -> bool | None:
    """Reads the whole file and compares each member of the archive with its CRC-32; None if the archive has
    no checksums. ConfigError if torch.save did not write it."""
    read_file(path)
    try:
        return read_with_retries(path, lambda: _compared(path))
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def _compared(path: Path) -> bool | None:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        return archive.testzip() is None if _has_checksums(archive) else None


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """torch.save writes 0 as every checksum after torch.serialization.set_crc32_options(False)."""
    return any(info.CRC for info in archive.infolist())


def _with_tensors(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.tensor()
    if isinstance(value, dict):
        return type(value)((key, _with_tensors(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(entry) for entry in value)
    return value


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride, in elements, of a tensor without gaps, its last dimension the fastest."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


# --- names that a pickle may use ---


class _Refused(PickleError):
    """A class or function that is not in a table."""


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Storage:
    file: StoredFile
    dtype: str
    begin: int
    length: int

    def tensor(self, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        shape, stride = _plain_tuple(shape), _plain_tuple(stride)
        if len(shape) > _MAX_DIMS or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in (offset, *shape, *stride)
        ):
            raise PickleError("the sizes of a tensor are not integers")
        # Elements may be in any order, but none may occur twice: a copy of such a tensor could need more
        # memory than its file has bytes.
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        fits = prod(shape) <= self.length and last < self.length
        if not (fits if all(shape) else prod(filter(None, shape)) < 1 << 62):
            raise PickleError(f"a tensor of shape {shape} does not fit its storage")
        begin = self.begin + offset * _ITEM_BYTES[self.dtype] if all(shape) else self.begin
        return StoredTensor(self.file, self.dtype, begin, shape, stride)


def _rebuilt(storage: Any = None, *where: Any) -> StoredTensor:
    if not isinstance(storage, _Storage) or len(where) < 3:
        raise PickleError("a tensor without a storage")
    return storage.tensor(*where)


def _parameter(tensor: Any = None, *_: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise PickleError("a parameter without a tensor")
    return tensor


def _plain_tuple(values: Any = (), *more: Any) -> tuple[Any, ...]:
    if type(values) not in (list, tuple) or more:
        raise PickleError("a list of sizes that is not a list")
    return tuple(values)


def _encoded(text: Any = None, *_: Any) -> bytes:
    if type(text) is not str:
        raise PickleError("bytes that are not encoded as text")
    return text.encode("latin1")


def _scalars(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a few numbers or short words."""

    def call(*args: Any) -> Any:
        if len(args) > 3 or not all(
            arg is None or type(arg) in (int, float) or (type(arg) is str and len(arg) < 100) for arg in args
        ):
            raise PickleError("a function with arguments that it does not take")
        return make(*args)

    return call


def _collection(make: Callable[..., Any]) -> Callable[..., Any]:
    """A set of the elements of a list, or a dict of pairs."""

    def call(*args: Any) -> Any:
        values = _plain_tuple(*args)
        if make is OrderedDict:
            values = tuple(map(_plain_tuple, values))
            if any(len(pair) != 2 for pair in values):
                raise PickleError("a dict of elements that are not pairs")
            return OrderedDict((check_key(key), value) for key, value in values)
        return make(map(check_key, values))

    return call


# Functions that a pickle may call.
_FUNCTIONS: dict[tuple[str, str], Function] = {
    key: Function(function)
    for key, function in {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch", "Size"): _plain_tuple,
        ("torch", "device"): _scalars(lambda *args: ":".join(map(str, args))),
        ("collections", "OrderedDict"): _collection(OrderedDict),
        ("collections", "defaultdict"): lambda *_: {},
        # Protocol 2 writes bytes with these.
        ("_codecs", "encode"): _encoded,
        ("__builtin__", "bytearray"): _encoded,
        ("builtins", "bytearray"): _encoded,
        **{
            (module, kind.__name__): wrapped(kind)
            for module in ("builtins", "__builtin__")
            for kind, wrapped in (
                *((kind, _collection) for kind in (set, frozenset)),
                *((kind, _scalars) for kind in (complex, slice, range)),
            )
        },
    }.items()
}
# Replaced by stubs: objects that Megatron programs save beside tensors.
_STUBBED = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *(
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
}
# Modules of Megatron and its forks that contain only enumerations.
_STUBBED_MODULES = (
    *(f"megatron.{part}enums" for part in ("", "model.", "core.", "core.transformer.")),
    "numpy.dtypes",
)


class _Archive:
    """An open archive. root: the common prefix of its members' names."""

    def __init__(self, path: Path, file: io.BufferedIOBase, archive: zipfile.ZipFile, root: str) -> None:
        self._file, self._archive, self._root = file, archive, root
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._stored_file = StoredFile(path)
        self._storages: dict[str, _Storage] = {}
        self._has_checksums = _has_checksums(archive)
        if f"{root}byteorder" in archive.namelist() and self._content("byteorder", 16) != b"little":
            raise PickleError("it is big-endian, expected little-endian")

    def read(self) -> Any:
        """The value in the pickle."""
        return read_pickle(self._content("data.pkl", _MAX_PICKLE_BYTES), self._find, self._storage)

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and name in _ITEM_BYTES:
            return name
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _StorageType("uint8")
        if (module, name) in _STUBBED or (module in _STUBBED_MODULES and "." not in name):
            return StubType(f"{module}.{name}")
        full_name = f"{module}.{name}"
        raise _Refused(full_name if is_plain(full_name) else shown(full_name))

    def _storage(self, pid: Any) -> _Storage:
        if type(pid) is not tuple or len(pid) != 5:
            raise PickleError("a storage of an unknown kind")
        kind, storage_type, key, _location, length = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType):
            raise PickleError("a storage of an unknown kind")
        if type(key) is not str or type(length) is not int or length < 0:
            raise PickleError("a storage without a key or a length")
        item_bytes = _ITEM_BYTES[storage_type.dtype]
        if key not in self._storages:
            begin, size_bytes = self._place(f"{self._root}data/{key}")
            if length * item_bytes > size_bytes or begin + size_bytes > self._file_bytes:
                raise PickleError(f"its storage {shown(key)} has {size_bytes:,} bytes, which is too few")
            self._storages[key] = _Storage(self._stored_file, storage_type.dtype, begin, length)
        return self._storages[key]

    def _info(self, member: str) -> zipfile.ZipInfo:
        """The entry of an uncompressed member."""
        info = self._archive.getinfo(member)
        if not self._has_checksums and hasattr(info, "CRC"):
            del info.CRC  # else zipfile compares the content with a checksum that was never computed
        if info.compress_type != zipfile.ZIP_STORED:
            raise PickleError(f"{member} is compressed, which torch never does")
        return info

    def _content(self, name: str, limit: int) -> bytes:
        info = self._info(f"{self._root}{name}")
        if info.file_size > limit:
            raise HostilePickle(f"its {name} has {info.file_size:,} bytes, expected {limit:,} at most")
        return self._archive.read(info)

    def _place(self, member: str) -> tuple[int, int]:
        """(offset in the file, size in bytes) of a member."""
        info = self._info(member)
        # The header before the data has 30 bytes, with the lengths of the name and the extra field that
        # follow.
        self._file.seek(info.header_offset)
        header = self._file.read(30)
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        return info.header_offset + 30 + name_length + extra_length, info.file_size


# --- writing ---


def write_plain(path: Path, value: Any) -> None:
    """Writes a value without tensors: numbers, strings, dicts, lists and tuples."""
    _write_archive(path, pickle.dumps(value, protocol=2), 0, ())


def write_tensor(
    path: Path, shape: tuple[int, ...], blocks: Iterable[Any], entry: dict[str, Any] | None = None
) -> None:
    """Writes an fp32 tensor, either alone or under the key 'param' of `entry`. blocks: its bytes, in
    order."""
    pickled = b"\x80\x02" + _pickled_tensor(shape) + b"."
    if entry is not None:
        members = b"".join(_pickled(key) + _pickled(value) for key, value in entry.items())
        pickled = b"\x80\x02}(" + members + _pickled("param") + _pickled_tensor(shape) + b"u."
    _write_archive(path, pickled, 4 * prod(shape), blocks)


def _pickled(value: Any) -> bytes:
    """A pickle to embed in another one: without the first opcode (protocol) and the last (stop)."""
    return pickle.dumps(value, protocol=2)[2:-1]


def _pickled_tensor(shape: tuple[int, ...]) -> bytes:
    """The call that builds a contiguous fp32 tensor from storage 0. The opcodes: c global, ( mark, t tuple, Q
    persistent id, R call."""
    storage = b"(" + _pickled("storage") + b"ctorch\nFloatStorage\n"
    storage += b"".join(_pickled(value) for value in ("0", "cpu", prod(shape))) + b"tQ"
    place = b"".join(_pickled(value) for value in (0, shape, contiguous_stride(shape), False))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + place + _pickled(OrderedDict()) + b"tR"


def _write_archive(path: Path, pickled: bytes, storage_bytes: int, blocks: Iterable[Any]) -> None:
    """Member names, order and alignment are those of torch.save."""
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:

        def member(name: str) -> zipfile.ZipInfo:
            return zipfile.ZipInfo(f"{path.stem}/{name}")  # dated 1980: equal content makes equal files

        archive.writestr(member("data.pkl"), pickled)
        archive.writestr(member("byteorder"), b"little")
        if storage_bytes:
            info = member("data/0")
            info.file_size = storage_bytes
            zip64 = storage_bytes >= zipfile.ZIP64_LIMIT
            header_bytes = 30 + len(info.filename) + 4 + (20 if zip64 else 0)
            padding = -(file.tell() + header_bytes) % _ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=zip64) as storage:
                for block in blocks:
                    storage.write(block)
        archive.writestr(member("version"), b"3\n")
