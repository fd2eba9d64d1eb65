"""Files of `torch.save`: what is in them and where, read without running anything, and without torch.

Such a file is a zip archive, stored without compression. `<name>/data.pkl` is a pickle in which each tensor
names a storage; the storage's bytes are the member `<name>/data/<key>`. A pickle can name any function and
have it called. Here it can name only what stands in the tables below, all of it harmless, and what is a class
elsewhere becomes an `Inert` object that has its arguments and attributes and does nothing.
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.errors import ConfigError

if TYPE_CHECKING:
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
# A pickle of a file with tens of thousands of parameters has a few MB.
_MAX_PICKLE_BYTES = 1 << 28
# torch begins a storage at a multiple of this many bytes of the file.
_ALIGNMENT = 64


class StoredFile:
    """A file of torch.save, mapped into memory when a tensor of it is first used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def mapping(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            # Copy on write: torch wants memory that could be written to; the file stays as it is.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class _Sealed:
    """What a pickle handles and cannot change. Without a `__dict__`, in its subclasses too, there is nothing
    that its BUILD could fill; and it calls `__setstate__` if there is one."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"it would change a {type(self).__name__}")


@dataclass(frozen=True)
class StoredTensor(_Sealed):
    """A tensor that lies in a file.

    dtype: torch's name of it. begin: byte of the file where element 0 lies. stride: in elements, as torch's.
    """

    file: StoredFile
    dtype: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    # Written out: dataclass(slots=True) makes a __setstate__ of its own, which changes what is frozen.
    __slots__ = ("file", "dtype", "begin", "shape", "stride")

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
                f"checkpoint file {self.file.path} tells of {length} elements from {start} on in a tensor of "
                f"{self.numel:,}: it is damaged"
            )
        return replace(self, begin=self.begin + start * self.item_bytes, shape=(length,))

    def item(self) -> float:
        """The number in a tensor of one element."""
        formats = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i"}
        with open(self.file.path, "rb") as file:
            file.seek(self.begin)
            (number,) = struct.unpack(formats[self.dtype], file.read(self.item_bytes))
        return number

    def tensor(self) -> Tensor:
        """It as torch's, sharing memory with the mapped file."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.numel == 0:
            return torch.empty(self.shape, dtype=dtype)
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.frombuffer(self.file.mapping, dtype=dtype, count=extent, offset=self.begin)
        return flat.as_strided(self.shape, self.stride)


class Inert:
    """Stands for an object of a class that is not loaded. `origin`: the class's full name; `made_from`: its
    arguments; attributes: those that were saved."""

    origin = ""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        self = object.__new__(cls)
        self.made_from = args
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def read_file(path: Path) -> Any:
    """What was saved, with a `StoredTensor` for each tensor. Reads the structure only.

    Raises ConfigError naming the file: where it is damaged, and where it names a class or function that no
    checkpoint has use for; nothing of it has run then.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            (pickled,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]*/data\.pkl", name))
            return _Unpickler(path, file, archive, pickled.removesuffix("data.pkl")).load()
    except _Refused as error:
        raise ConfigError(
            f"checkpoint file {path} cannot be read: it names {error}, for which a checkpoint has no use. "
            "Nothing of it was run; it may be meant to do harm: ask where it comes from"
        ) from None
    except Exception as error:  # a damaged file can fail anywhere
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"checkpoint file {path} cannot be read ({reason}): take an older checkpoint"
        ) from error


def load_file(path: Path) -> Any:
    """As `read_file`, with torch's tensors, memory-mapped, in dicts, lists and tuples."""
    return _with_tensors(read_file(path))


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


# --- what a pickle may name ---


class _Refused(pickle.UnpicklingError):
    """A class or function that is in no table."""


class _Function:
    """A function for a pickle to call: without attributes that it could change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


@dataclass(frozen=True)
class _StorageType(_Sealed):
    dtype: str

    __slots__ = ("dtype",)


@dataclass(frozen=True)
class _Storage(_Sealed):
    file: StoredFile
    dtype: str
    begin: int
    length: int

    __slots__ = ("file", "dtype", "begin", "length")

    def tensor(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> StoredTensor:
        shape, stride = tuple(shape), tuple(stride)
        if not all(type(number) is int for number in (offset, *shape, *stride)):
            raise pickle.UnpicklingError("a tensor's shape is not of whole numbers")
        sizes = zip(shape, stride, strict=True)
        last = offset + sum((size - 1) * step for size, step in sizes)
        if prod(shape) and not (offset >= 0 and min(shape + stride, default=0) >= 0 and last < self.length):
            raise pickle.UnpicklingError(f"a tensor of shape {shape} does not fit its storage")
        return StoredTensor(
            self.file, self.dtype, self.begin + offset * _ITEM_BYTES[self.dtype], shape, stride
        )


def _rebuilt(storage: Any, *where: Any) -> StoredTensor:
    # Not whatever has such a method: an `Inert` may have any attribute.
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return storage.tensor(*where)


# Called for their result.
_FUNCTIONS: dict[tuple[str, str], Callable] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *args: ":".join(map(str, args)),
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    # In which protocol 2 writes bytes.
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, complex, bytearray, slice, range)
    },
}
# Replaced by inert objects: what the programs of this family keep beside tensors.
_INERT = {
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
# Enumerations of Megatron and its forks, by the modules that hold nothing else.
_INERT_MODULES = (
    *(f"megatron.{part}enums" for part in ("", "model.", "core.", "core.transformer.")),
    "numpy.dtypes",
)


class _Unpickler(pickle.Unpickler):
    """Of one file, whose members begin with `root`."""

    def __init__(self, path: Path, file: io.BufferedReader, archive: zipfile.ZipFile, root: str) -> None:
        self._file, self._archive, self._root = file, archive, root
        super().__init__(io.BytesIO(self._content("data.pkl", _MAX_PICKLE_BYTES)), encoding="latin1")
        self._stored_file = StoredFile(path)
        self._storages: dict[str, _Storage] = {}
        if f"{root}byteorder" in archive.namelist() and self._content("byteorder", 16) != b"little":
            raise pickle.UnpicklingError("its numbers have the bytes in another order than this machine's")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _Function(_FUNCTIONS[module, name])
        if module == "torch" and name in _ITEM_BYTES:
            return name
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _StorageType("uint8")
        if (module, name) in _INERT or (module in _INERT_MODULES and "." not in name):
            # A class of its own: what a pickle might do to it ends with this file.
            return type("Inert", (Inert,), {"origin": f"{module}.{name}"})
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, length = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType):
            raise pickle.UnpicklingError(f"a storage of an unknown kind, {kind}")
        if key not in self._storages:
            begin, size_bytes = self._place(f"{self._root}data/{key}")
            if length * _ITEM_BYTES[storage_type.dtype] > size_bytes:
                raise pickle.UnpicklingError(f"its storage {key} has {size_bytes:,} bytes, which is too few")
            self._storages[key] = _Storage(self._stored_file, storage_type.dtype, begin, length)
        return self._storages[key]

    def _info(self, member: str) -> zipfile.ZipInfo:
        """Of a member that takes no more memory than it has bytes in the file."""
        info = self._archive.getinfo(member)
        if info.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"{member} is compressed, which torch never does")
        return info

    def _content(self, name: str, limit: int) -> bytes:
        info = self._info(f"{self._root}{name}")
        if info.file_size > limit:
            raise pickle.UnpicklingError(
                f"its {name} has {info.file_size:,} bytes, expected {limit:,} at most"
            )
        return self._archive.read(info)

    def _place(self, member: str) -> tuple[int, int]:
        """First byte and number of bytes of a member."""
        info = self._info(member)
        # The header before the data has 30 bytes, the name and an extra field, whose lengths stand in it.
        self._file.seek(info.header_offset)
        header = self._file.read(30)
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        return info.header_offset + 30 + name_length + extra_length, info.file_size


# --- writing ---


def write_plain(path: Path, value: Any) -> None:
    """Writes a value without tensors: of numbers, strings, dicts, lists and tuples."""
    _write_archive(path, pickle.dumps(value, protocol=2), 0, ())


def write_tensor(
    path: Path, shape: tuple[int, ...], blocks: Iterable[Any], entry: dict[str, Any] | None = None
) -> None:
    """Writes an fp32 tensor, whose bytes `blocks` gives one after the other: `entry` with it under the key
    'param', or it alone."""
    pickled = b"\x80\x02" + _pickled_tensor(shape) + b"."
    if entry is not None:
        members = b"".join(_pickled(key) + _pickled(value) for key, value in entry.items())
        pickled = b"\x80\x02}(" + members + _pickled("param") + _pickled_tensor(shape) + b"u."
    _write_archive(path, pickled, 4 * prod(shape), blocks)


def _pickled(value: Any) -> bytes:
    """To stand inside another pickle: without its first opcode, the protocol, and its last, the stop."""
    return pickle.dumps(value, protocol=2)[2:-1]


def _pickled_tensor(shape: tuple[int, ...]) -> bytes:
    """The call that makes a contiguous fp32 tensor of storage 0. The opcodes: c global, ( mark, t tuple,
    Q persistent id, R call."""
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
