"""Maps files into memory without keeping a descriptor, because a run may map more files than a process can
have open.

Before Python 3.13 (`trackfd`), Python's mmap and numpy's memmap keep a descriptor for each mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.files import open_regular

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
# Without this flag Linux may reject a writable mapping that is larger than the memory.
_MAP_NORESERVE = 0x4000
_HUGE_PAGE_BYTES = 1 << 21


class _Mapping:
    """A memory mapping that lives as long as a numpy array uses it."""

    def __init__(self, address: int, num_bytes: int, writable: bool) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, not writable),
        }
        # The mapping is not unmapped at exit, because threads may still read it. The system unmaps it anyway.
        weakref.finalize(self, _LIBC.munmap, address, num_bytes).atexit = False


def map_file(path: Path | str) -> npt.NDArray[np.uint8]:
    """Maps a file into memory and returns its bytes. See `map_open_file`. Raises OSError if the file cannot
    be opened or mapped, or is not a regular file."""
    with open_regular(path) as file:
        return map_open_file(file, path)


def map_open_file(file: BinaryIO, path: Path | str, copy_on_write: bool = False) -> npt.NDArray[np.uint8]:
    """Maps an open file into memory and returns its bytes. The file may be closed afterwards.

    path: path of the file, for the error. copy_on_write: whether the array is writable; writing to it does
    not change the file. Raises OSError if the file cannot be mapped.
    """
    access, flags = mmap.PROT_READ, mmap.MAP_SHARED
    if copy_on_write:
        access, flags = access | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    address = _LIBC.mmap(None, num_bytes, access, flags, file.fileno(), 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return np.asarray(_Mapping(address, num_bytes, copy_on_write))


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Requests huge pages for memory that has not been written yet, so that a page fault provides 2 MB
    instead of 4 KB. Has no effect on a system without huge pages."""
    first, end = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, address + num_bytes
    if (length := end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - first) > 0:
        _LIBC.madvise(first, length, mmap.MADV_HUGEPAGE)


def advise_random(values: npt.NDArray[Any]) -> None:
    """Advises the system that parts of a mapping are read in random order. A page fault then reads one page
    of the file instead of megabytes around it."""
    _LIBC.madvise(values.ctypes.data, values.nbytes, mmap.MADV_RANDOM)


def read_ahead(values: npt.NDArray[Any]) -> None:
    """Starts reading a part of a mapping with one request. Returns before the pages are read."""
    start = values.ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    _LIBC.madvise(first, start + values.nbytes - first, mmap.MADV_WILLNEED)


def release_pages(address: int, num_bytes: int) -> None:
    """Removes pages of a mapping from the resident memory of the process. The pages are read again when they
    are accessed. Without this call, the whole file becomes resident when it is read once. Must not be used
    for mappings that were written to."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + num_bytes
    if (length := end // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
        _LIBC.madvise(first, length, mmap.MADV_DONTNEED)
