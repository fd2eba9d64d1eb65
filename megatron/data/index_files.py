"""Index files: .npy files with arrays of integers, which are read by memory mapping."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.errors import UserError, is_access_error, one_line
from megatron.files import create_locked, locked_leftover, open_regular
from megatron.mapped_file import map_open_file

_LEFTOVER = re.compile(r"\.(npy|json)\.[0-9a-f]{32}\.tmp$")


class IndexFileError(Exception):
    """An index file is missing, damaged or was built from other data."""


def read_array(path: str, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """Returns a memory-mapped array of integers. shape: the expected shape; None for any length. Raises
    IndexFileError."""
    try:
        array = _map_array(path)
    except FileNotFoundError:
        raise IndexFileError(f"{path} does not exist") from None
    except Exception as error:  # numpy parses the header as a Python literal, with errors of any type
        if is_access_error(error):
            raise
        raise IndexFileError(f"{path} is damaged ({one_line(error)})") from error
    if array.dtype.kind not in "iu":
        raise IndexFileError(f"{path} does not hold an array of integers")
    if array.ndim != len(shape) or any(
        want not in (None, has) for want, has in zip(shape, array.shape, strict=True)
    ):
        raise IndexFileError(f"{path} has shape {array.shape}, expected {shape}")
    return array


def _map_array(path: str) -> npt.NDArray[Any]:
    """Returns what np.load(path, mmap_mode="r") returns, without keeping a file descriptor open."""
    with open_regular(path) as file:
        # np.save writes version 1.0 for integers. Headers of later versions may have gigabytes.
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"version {version} of the npy format, expected (1, 0)")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start, count = file.tell(), math.prod(shape)
        content = map_open_file(file, path)[start : start + count * dtype.itemsize].view(dtype)
    return content.reshape(shape, order="F" if is_fortran else "C")


def write_array(path: str, array: npt.NDArray[Any]) -> None:
    """Writes an index file under a temporary name and renames it. Creates its folder. Raises UserError if it
    fails."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        with replaced_file(path) as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise UserError(
            f"cannot write index files into {folder} ({error.strerror}): set --data-cache-path to a "
            "different folder"
        ) from error


@contextmanager
def replaced_file(path: str) -> Iterator[BinaryIO]:
    """Yields a temporary file, which replaces `path` after the block. Concurrent writers have different
    temporary files. Raises OSError."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with create_locked(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise


def remove_leftovers(folder: str) -> None:
    """Removes the temporary files of processes that were killed. Does nothing if the folder cannot be
    read."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _LEFTOVER.search(name):
                path = os.path.join(folder, name)
                with suppress(OSError), locked_leftover(path):
                    os.remove(path)
