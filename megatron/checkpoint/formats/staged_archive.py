"""Writes archives of `torch.save` without a second copy of a device's tensors in host memory.

torch.save writes everything except the bytes of tensors (`torch.serialization.skip_data`). Where a storage's
bytes belong, it calls `seek` of the file, and this module writes them. Bytes in host memory are passed to the
file as they are. Bytes on a device are copied in pieces through two pinned buffers: torch.save would copy a
whole storage, which may be the state of all parameters, to a pinned buffer of its size.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.serialization import skip_data
from torch.utils.serialization import config as serialization

# Size of each of the two pinned buffers.
PIECE_BYTES = 1 << 26


def is_staged(device: torch.device) -> bool:
    """Returns whether the bytes of tensors on this device are copied before they are written."""
    return device.type != "cpu"


def without_checksums() -> AbstractContextManager[None]:
    """Makes torch.save, in this thread, write no CRC-32 of its own."""
    found: AbstractContextManager[None] = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    return found


def save_archive(value: Any, file: Any) -> None:
    """Writes the archive of torch.save, without checksums, to a file-like object."""
    pickling = _Pickling()
    archive: Any = _ArchiveFile(file, pickling.storages)  # torch uses few methods of its file
    try:
        with skip_data(), without_checksums():
            torch.save(value, archive, pickle_module=pickling)
    except RuntimeError as error:  # torch's writer replaces an error of the file by one of its own
        raise archive.error or error from None
    if archive.num_written != len(pickling.storages):
        raise RuntimeError(f"torch.save wrote {archive.num_written} of {len(pickling.storages)} storages")


class _Pickling:
    """Stands for the module `pickle` in torch.save. storages: the storages of all pickled tensors, in the
    order in which torch writes them."""

    __name__ = "pickle"

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        seen = set[int]()  # as in torch.save, by the address of the storage in C++

        def note_storage(_: pickle.Pickler, value: Any) -> Any:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    self.storages.append(storage)
            return NotImplemented  # pickled as usual

        self.Pickler = type("Pickler", (pickle.Pickler,), {"reducer_override": note_storage})


class _ArchiveFile:
    """The file-like object that torch.save writes to."""

    def __init__(self, file: Any, storages: Sequence[torch.UntypedStorage]) -> None:
        """storages: filled by torch.save before it writes the first of them."""
        self._file, self._storages = file, storages
        self.flush: Callable[[], None] = file.flush
        self.num_written = 0
        self.error: Exception | None = None
        """The first error of `write` or `seek`."""

    def write(self, data: Any) -> int:
        with self._keep_error():
            written: int = self._file.write(data)
        return written

    def seek(self, num_bytes: int, _: int) -> None:
        """Writes the bytes of the next storage; called by torch to leave room for them."""
        with self._keep_error():
            self._write_storage(self._storages[self.num_written], num_bytes)
        self.num_written += 1

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            raise

    def _write_storage(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage.nbytes() != num_bytes:
            raise RuntimeError(f"torch.save writes {num_bytes:,} bytes, expected {storage.nbytes():,}")
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pieces = _buffers().pieces(content) if is_staged(storage.device) else [content]
        for piece in pieces:
            self._file.write(piece.numpy().data)


class StagingBuffers:
    """Two buffers in pinned host memory. While the host takes a piece from one, the device copies the next
    piece to the other."""

    def __init__(self, piece_bytes: int) -> None:
        # Tools need no device, and the import takes seconds.
        from deepspeed.accelerator import get_accelerator

        self._accelerator = get_accelerator()
        pin = self._accelerator.pin_memory
        self._buffers = [pin(torch.empty(piece_bytes, dtype=torch.uint8)) for _ in range(2)]
        self._lock = threading.Lock()

    def pieces(self, content: Tensor) -> Iterator[Tensor]:
        """Yields the bytes of a flat tensor in host memory, in order. A piece is valid until the next one."""
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
                while copying:  # after an error: the next copies must not meet these
                    oldest()


@cache
def _buffers() -> StagingBuffers:
    """Returns the buffers of all saves: the host's allocator would not return them to the system."""
    return StagingBuffers(PIECE_BYTES)
