"""Writes archives of `torch.save`, for runs and conversions.

`save_archive` writes without checksums, and without a second copy of a device's tensors in host memory.
torch.save writes everything except the bytes of tensors (`torch.serialization.skip_data`). Where the bytes of
a storage belong, torch.save calls `seek` of the file, and this module writes the bytes. Bytes in host memory
go to the file without a copy. Bytes on a device are copied in pieces through two pinned buffers. (torch.save
would copy a whole storage, which may be the state of all parameters, to a pinned buffer of its size.) The
bytes of fake tensors are not written: the caller writes them later.

`write_archive` writes a value with at most one tensor, with checksums. The tensor's bytes may arrive in
blocks.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.serialization import skip_data
from torch.utils.serialization import config as serialization

# Size of each of the two pinned buffers.
PIECE_BYTES = 1 << 26
# torch aligns storages in an archive to this many bytes.
ALIGNMENT = 64


def is_staged(device: torch.device) -> bool:
    """Returns whether tensors on this device are copied to host memory before they are written."""
    return device.type != "cpu"


def save_archive(value: Any, file: Any) -> Callable[[Tensor], int]:
    """Writes the archive of torch.save, without checksums, to a file-like object. Returns a function that
    maps a fake tensor in the value to the offset of its bytes from the beginning of the archive."""
    pickling = _Pickling()
    archive: Any = _ArchiveFile(file, pickling.storages)  # has only the methods that torch.save calls
    try:
        no_checksums = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
        with skip_data(materialize_fake_tensors=True), no_checksums:
            torch.save(value, archive, pickle_module=pickling)
    except RuntimeError as error:  # torch's writer raises an error of its own instead of the file's error
        raise archive.error or error from None
    if archive.num_written != len(pickling.storages):
        raise RuntimeError(f"torch.save wrote {archive.num_written} of {len(pickling.storages)} storages")
    offsets: Mapping[int, int] = archive.offsets
    return lambda tensor: offsets[tensor.untyped_storage()._cdata]


class _Pickling:
    """Replaces the module `pickle` in torch.save. storages: (storage, whether it is fake) of all pickled
    tensors, in the order in which torch writes the storages."""

    __name__ = "pickle"

    def __init__(self) -> None:
        self.storages: list[tuple[torch.UntypedStorage, bool]] = []
        seen = set[int]()  # addresses of the storages in C++, by which torch.save identifies them

        def note_storage(_: pickle.Pickler, value: Any) -> Any:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    self.storages.append((storage, isinstance(value, FakeTensor)))
            return NotImplemented  # pickled as usual

        self.Pickler = type("Pickler", (pickle.Pickler,), {"reducer_override": note_storage})


class _ArchiveFile:
    """The file-like object that torch.save writes to."""

    def __init__(self, file: Any, storages: Sequence[tuple[torch.UntypedStorage, bool]]) -> None:
        """storages: the list that torch.save fills before it writes the first storage."""
        self._file, self._storages = file, storages
        self.offsets: dict[int, int] = {}
        """Storage (its address in C++) -> offset of its bytes in the archive."""
        self._position = 0
        self.flush: Callable[[], None] = getattr(file, "flush", lambda: None)
        self.num_written = 0
        self.error: Exception | None = None
        """The first error of `write` or `seek`."""

    def write(self, data: Any) -> int:
        with self._keep_error():
            written: int = self._file.write(data)
        self._position += written
        return written

    def seek(self, num_bytes: int, _: int) -> None:
        """Writes the bytes of the next storage. torch.save calls this method to leave room for them."""
        with self._keep_error():
            storage, is_fake = self._storages[self.num_written]
            if storage.nbytes() != num_bytes:
                raise RuntimeError(f"torch.save writes {num_bytes:,} bytes, expected {storage.nbytes():,}")
            self.offsets[storage._cdata] = self._position
            if is_fake:
                self._file.seek(num_bytes, os.SEEK_CUR)
            else:
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for piece in _buffers().pieces(content) if is_staged(storage.device) else [content]:
                    self._file.write(piece.numpy().data)
        self.num_written += 1
        self._position += num_bytes

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            raise


class StagingBuffers:
    """Two buffers in pinned host memory. While the host takes a piece from one, the device copies the next
    piece to the other."""

    def __init__(self, piece_bytes: int) -> None:
        # The import is late: tools need no device, and the import takes seconds.
        from deepspeed.accelerator import get_accelerator

        self._accelerator = get_accelerator()
        pin = self._accelerator.pin_memory
        self._buffers = [pin(torch.empty(piece_bytes, dtype=torch.uint8)) for _ in range(2)]
        self._lock = threading.Lock()

    def pieces(self, content: Tensor) -> Iterator[Tensor]:
        """Yields the bytes of a flat tensor in host memory, in order. A piece is valid until the next is
        read."""
        accelerator, copying = self._accelerator, deque[tuple[Tensor, Any]]()
        stream = None if accelerator.Stream is None else accelerator.Stream()
        if stream is not None:
            stream.wait_stream(accelerator.current_stream())

        def oldest() -> Tensor:
            piece, event = copying.popleft()
            if event is not None:
                event.synchronize()
            return piece

        with self._lock:
            try:
                for index, source in enumerate(content.split(len(self._buffers[0]))):
                    target = self._buffers[index % 2][: len(source)]
                    with accelerator.stream(stream):
                        target.copy_(source, non_blocking=True)
                        event = None if stream is None else accelerator.Event()
                        if event is not None:
                            event.record()
                    copying.append((target, event))
                    if len(copying) == 2:
                        yield oldest()
                yield oldest()
            finally:
                while copying:  # after an error: unfinished copies must not write into a reused buffer
                    oldest()


@cache
def _buffers() -> StagingBuffers:
    """Returns the two buffers, which all saves share: the host's allocator would not return freed ones."""
    return StagingBuffers(PIECE_BYTES)


# --- with checksums ---


class _ValuePickler(pickle.Pickler):
    """Pickles a tensor on the meta device as torch.save pickles a contiguous tensor in the archive's storage
    '0'. num_bytes: size of this storage."""

    num_bytes = 0

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "meta":
            return NotImplemented  # a tensor that has values is pickled with them
        self.num_bytes = value.nbytes
        hooks: OrderedDict[str, Any] = OrderedDict()
        place = (_Storage(value.numel()), 0, tuple(value.shape), value.stride(), False, hooks)
        return torch._utils._rebuild_tensor_v2, place

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", torch.FloatStorage, "0", "cpu", value.num_elements


@dataclass(frozen=True)
class _Storage:
    """Stands for the storage of the tensor in the pickle."""

    num_elements: int


def write_archive(path: Path, value: Any, blocks: Iterable[Any] = ()) -> None:
    """Writes a value with the member names, order and alignment of torch.save. Equal contents give equal
    files. The value may contain one fp32 tensor on the meta device. blocks: the bytes of this tensor, in
    order.
    """
    pickled = BytesIO()
    pickler = _ValuePickler(pickled, protocol=2)
    pickler.dump(value)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:

        def member(name: str) -> zipfile.ZipInfo:
            return zipfile.ZipInfo(f"{path.stem}/{name}")  # dated 1980, so that files are reproducible

        archive.writestr(member("data.pkl"), pickled.getbuffer())
        archive.writestr(member("byteorder"), b"little")
        if pickler.num_bytes:
            info = member("data/0")
            info.file_size = pickler.num_bytes
            zip64 = pickler.num_bytes >= zipfile.ZIP64_LIMIT
            header_bytes = 30 + len(info.filename) + 4 + (20 if zip64 else 0)
            padding = -(file.tell() + header_bytes) % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=zip64) as storage:
                for block in blocks:
                    storage.write(block)
        archive.writestr(member("version"), b"3\n")
