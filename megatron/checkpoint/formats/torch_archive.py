"""Reads files of `torch.save`, without running code from them.

Such a file is an uncompressed zip archive. `<name>/data.pkl` is a pickle in which each tensor names a
storage; the storage's bytes are the member `<name>/data/<key>`. torch's `weights_only` loader reads the
pickle. It calls only functions that make tensors, and the names that `_safe_globals` allows. Tensors are
first loaded on the meta device, without memory. Their sizes are compared with the file, and then they are
memory-mapped. (torch's own `mmap=True` reserves memory for the whole file, so it fails for files larger than
the memory.)
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron.checkpoint.files import read_with_retries
from megatron.checkpoint.names import is_plain, shown
from megatron.errors import UserError, is_access_error, one_line
from megatron.files import HostileFileError, open_regular
from megatron.mapped_file import map_open_file

if TYPE_CHECKING:
    from torch import Tensor

# For tens of thousands of parameters, the pickle and the archive's list of members have a few MB each.
_MAX_PICKLE_BYTES = 1 << 26
_MAX_DIMS = 16
# What torch's loader calls for a name in a pickle: a class or function, or (class or function, name).
_SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
# torch keeps the allowed names in one set for all threads, so only one thread may load at a time.
_LOAD_LOCK = threading.Lock()


def read_file(path: Path, span: tuple[int, int] | None = None) -> Any:
    """Returns the saved value. Its tensors are memory-mapped; writing to them does not change the file.
    Objects of other frameworks' classes become `Stub`s, and torch's dtypes and devices become their names.

    span: (offset, length) in bytes of the archive in a file with several archives; None: the whole file.
    Raises UserError if the file is damaged, OSError if it cannot be read now, and HostileFileError if it
    names a class or function that checkpoints do not use.
    """
    try:
        return read_with_retries(path, lambda: _read_archive(path, span))
    except HostileFileError:
        raise
    except Exception as error:  # a damaged file can raise any error
        if is_access_error(error):
            raise
        raise UserError(
            f"checkpoint file {path} cannot be read ({one_line(error)}): use an older checkpoint"
        ) from error


def is_intact(path: Path, shape: tuple[int, ...]) -> bool:
    """Returns whether the file holds a tensor of this shape, alone or under 'param', and its content matches
    its checksums. Reads the whole file. Raises UserError if torch.save did not write the file."""
    content = read_file(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    return getattr(tensor, "shape", None) == shape and bool(matches_checksums(path))


def matches_checksums(path: Path) -> bool | None:
    """Reads the whole file and returns whether each member of the archive matches its CRC-32; None if the
    archive has no checksums. Raises UserError if torch.save did not write the file."""
    read_file(path)

    def compare() -> bool | None:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.testzip() is None if _has_checksums(archive) else None

    try:
        return read_with_retries(path, compare)
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def _has_checksums(archive: zipfile.ZipFile) -> bool:
    """Returns False if all checksums are 0, as after torch.serialization.set_crc32_options(False)."""
    return any(info.CRC for info in archive.infolist())


# --- names that a pickle may use ---


class Stub:
    """Stands for an object whose class is not imported. constructor_args: the arguments of the constructor.
    All other attributes are the attributes that were saved."""

    # A slot takes precedence over attributes from the file.
    __slots__ = ("constructor_args", "__dict__", "__weakref__")
    constructor_args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Stub:
        """Creates a stub with the arguments of the constructor."""
        stub = super().__new__(cls)
        stub.constructor_args = args
        return stub

    def __setstate__(self, state: Any) -> None:
        """Sets the saved attributes. state: a dict, or (attributes, slots) if the class has slots."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        is_text = (isinstance(key, str) for part in parts if isinstance(part, dict) for key in part)
        if all(part is None or isinstance(part, dict) for part in parts) and all(is_text):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.__dict__["state"] = state


# Classes of the standard library that torch's loader does not allow by default.
_BUILTINS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": Namespace,
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
    "builtins.range": range,
    "collections.defaultdict": lambda *_: {},
}
# Classes that become stubs: Megatron programs save such objects beside tensors.
_STUBBED = {
    *("types.SimpleNamespace", "signal.Signals", "_io.BytesIO"),
    *(f"megatron.core.rerun_state_machine.Rerun{name}" for name in ("Diagnostic", "Mode", "State")),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.ndarray",
    "numpy.dtype",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
}
# Modules that contain only enumerations (of Megatron and its forks) or types (of numpy). They become stubs.
_STUBBED_MODULES = re.compile(r"(megatron\.(model\.|core\.|core\.transformer\.)?enums|numpy\.dtypes)\.\w+")


def _safe_globals(names: Iterable[str], path: Path) -> list[_SafeGlobal]:
    """Returns the replacements for the names in a pickle, in torch's form. Raises HostileFileError for a name
    that checkpoints do not use."""
    found: list[_SafeGlobal] = []
    for name in sorted(names):
        if name in _BUILTINS:
            found.append((_BUILTINS[name], name))
        elif name in _STUBBED or _STUBBED_MODULES.fullmatch(name):
            found.append((type(name, (Stub,), {"__slots__": ()}), name))
        else:
            raise HostileFileError(
                f"checkpoint file {path} cannot be read: it names {name if is_plain(name) else shown(name)}, "
                "which checkpoints do not use. None of its code was run; it may be malicious: check where it "
                "comes from"
            )
    return found


class _FileSpan(io.RawIOBase):
    """A seekable file that consists of at most `length` bytes of another file, from `offset` on."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset = file, offset
        self.length = max(min(length, os.fstat(file.fileno()).st_size - offset), 0)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self.length - self._position), 0)
        content = os.pread(self._file.fileno(), size, self._offset + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _read_archive(path: Path, span: tuple[int, int] | None) -> Any:
    from torch import load
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    with open_regular(path) as whole_file:
        start = span[0] if span is not None else 0
        file: Any = io.BufferedReader(_FileSpan(whole_file, *span)) if span is not None else whole_file
        with zipfile.ZipFile(file) as archive:
            _check_members(archive)
            sizes = {info.file_size for info in archive.infolist()}
        try:
            with _LOAD_LOCK:
                file.seek(0)
                allowed = _safe_globals(get_unsafe_globals_in_checkpoint(file), path)
                file.seek(0)
                with safe_globals(allowed), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings about pickles that torch cannot read
                    value = load(file, map_location="meta", weights_only=True)
        except SystemError as error:  # torch raises this if reading the file fails
            raise error.__cause__ or error from None
        return _TensorMapper(path, whole_file, sizes, start).map_tensors(value)


def _check_members(archive: zipfile.ZipFile) -> None:
    """Raises ValueError if torch.save would not write such an archive, or if its pickle is damaged."""
    (pickled,) = (info for info in archive.infolist() if re.fullmatch(r"[^/]*/data\.pkl", info.filename))
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{one_line(info.filename)} is compressed, which torch never does")
    if pickled.file_size > _MAX_PICKLE_BYTES:
        raise ValueError(
            f"its data.pkl has {pickled.file_size:,} bytes, expected {_MAX_PICKLE_BYTES:,} at most"
        )
    if not _has_checksums(archive):
        for info in archive.infolist():
            del info.CRC  # otherwise zipfile compares the content with a checksum that was not computed
    archive.read(pickled)
    byte_order = pickled.filename.removesuffix("data.pkl") + "byteorder"
    if byte_order in archive.namelist() and archive.open(byte_order).read(16) != sys.byteorder.encode():
        raise ValueError(f"it is of another byte order, expected {sys.byteorder}-endian")


class _TensorMapper:
    """Replaces the meta tensors in a loaded value with tensors that are mapped from the file.

    file: the open file of `path`. storage_sizes: sizes in bytes that the storages may have. start: offset of
    the archive in the file, in bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, storage_sizes: set[int], start: int) -> None:
        self._path, self._file, self._sizes, self._start = path, file, storage_sizes, start
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._bytes: Any = None
        # id of a value -> (the value, which is thus kept alive, its replacement). Several values may share a
        # value, and a value may contain itself.
        self._done: dict[int, tuple[Any, Any]] = {}

    def map_tensors(self, value: Any) -> Any:
        """Returns the value with mapped tensors. Dicts, lists and objects are changed in place."""
        if id(value) not in self._done:
            self._done[id(value)] = (value, value)
            self._done[id(value)] = (value, self._replaced(value))
        return self._done[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            value.update({key: self.map_tensors(entry) for key, entry in value.items()})
        elif isinstance(value, list):
            value[:] = map(self.map_tensors, value)
        elif isinstance(value, tuple):  # also torch.Size
            return tuple(map(self.map_tensors, value))
        elif isinstance(value, (Stub, Namespace)):
            self.map_tensors(vars(value))
        elif isinstance(value, (torch.dtype, torch.device)):
            return str(value).removeprefix("torch.")
        elif isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            raise ValueError("a storage without a tensor")
        return value

    def _tensor(self, meta: Tensor) -> Tensor:
        import torch

        is_plain_kind = type(meta) in (torch.Tensor, torch.nn.Parameter) and meta.layout == torch.strided
        if not is_plain_kind or meta.dim() > _MAX_DIMS:
            raise ValueError(f"a {type(meta).__name__} of a kind that checkpoints do not use")
        storage, item_bytes = meta.untyped_storage(), meta.element_size()
        begin = getattr(storage, "_checkpoint_offset", None)
        if type(begin) is not int or begin < 0 or storage.nbytes() not in self._sizes:
            raise ValueError(f"a tensor of shape {tuple(meta.shape)} does not fit its storage")
        begin += self._start
        if not meta.numel():
            return torch.empty(meta.shape, dtype=meta.dtype)
        extent = 1 + sum((size - 1) * step for size, step in zip(meta.shape, meta.stride(), strict=True))
        # No element may occur twice: a copy of such a tensor could need more memory than the whole file.
        last_byte = (meta.storage_offset() + max(extent, meta.numel())) * item_bytes
        if last_byte > storage.nbytes() or begin + storage.nbytes() > self._file_bytes:
            raise ValueError(f"a tensor of shape {tuple(meta.shape)} does not fit its storage")
        if self._bytes is None:
            # Copy on write, because torch expects writable memory.
            self._bytes = map_open_file(self._file, self._path, copy_on_write=True)
        offset = begin + int(meta.storage_offset()) * item_bytes
        flat = torch.frombuffer(self._bytes, dtype=meta.dtype, count=extent, offset=offset)
        return flat.as_strided(meta.shape, meta.stride())
