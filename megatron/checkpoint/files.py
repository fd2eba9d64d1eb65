"""The files of a checkpoint: sizes, digests, and access errors.

An access error, such as an I/O error of a network file system, says nothing about a checkpoint's content. The
program repeats the read, and stops if it fails again. Only a file that can be read can count as damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron.errors import is_access_error
from megatron.files import HostileFileError, open_own, open_regular, read_json, write_atomically
from megatron.object_store.path import ObjectPath

# Delays between attempts: a network file system may take seconds until it recovers or shows a new file.
RETRY_DELAYS_S = (0.1, 0.4, 1.0, 3.0, 6.0)
# Appended to the message of an access error.
MAY_BE_INTACT = ": the checkpoint may be intact, so no older one is used; repair the access, then start again"

T = TypeVar("T")


def as_path(folder: str | Path) -> Path:
    """Returns a folder's path as a Path. An `ObjectPath` (a path in an object store) is returned
    unchanged."""
    return Path(folder) if isinstance(folder, str) else folder


def write_small(path: Path, content: str) -> None:
    """Writes a small file or object. If the write fails, the old content remains complete."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content.encode())
    else:
        write_atomically(path, content)


def read_with_retries(
    path: Path, read: Callable[[], T], retry_delays_s: Sequence[float] = RETRY_DELAYS_S
) -> T:
    """Returns read(), which reads `path`. After an access error it tries again for about ten seconds (by
    default), then raises OSError with the path. It raises any other error at once."""
    for delay_s in (*retry_delays_s, None):
        try:
            return read()
        except OSError as error:
            if not is_access_error(error):
                raise
            if delay_s is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
        time.sleep(delay_s)
    raise AssertionError("the last attempt returns or raises")


# File name -> {"bytes": size, "sha256": digest in hex}.
Files = dict[str, dict[str, Any]]
READ_THREADS = 4
# Linux writes at most 2 GiB with one call.
_WRITE_BYTES = 1 << 30


DISK_IS_FULL = "the disk is full"


def write_problem(error: BaseException, path: str | None = None) -> str:
    """Returns which file cannot be written, if it is known, and why. path: the file that was being written.

    torch.save replaces the OSError of a file with an error that names positions in the file.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None:
        return str(error)
    why = DISK_IS_FULL if cause.errno == errno.ENOSPC else cause.strerror or str(cause)
    file = cause.filename or path
    return f"{file}: {why}" if file else why


def first_size_mismatch(folder: Path, files: Files, unneeded: Collection[str] = ()) -> str | None:
    """Returns a text on the first file that is missing or has the wrong size; None if all are right. Opens no
    file.

    unneeded: files that may be missing. Raises OSError if the folder cannot be read now.
    """
    for name, expected in sorted(files.items()):
        try:
            status = read_with_retries(folder / name, (folder / name).stat)
        except OSError as error:
            if is_access_error(error):
                raise
            if name in unneeded:
                continue
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        size = status.st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes and was written with {expected['bytes']:,}"
    return None


def first_absent(folder: Path, names: Collection[str]) -> str | None:
    """Returns the first file that is missing; None if there is none. Lists each folder once: this needs one
    request to the file system per folder, while a comparison of sizes needs one per file. Raises OSError if a
    folder cannot be read now."""
    listed: dict[Path, set[str]] = {}
    for path in sorted(folder / name for name in names):
        parent = path.parent
        if parent not in listed:
            listed[parent] = set()
            with suppress(FileNotFoundError):
                listed[parent] |= {*read_with_retries(parent, partial(os.listdir, parent))}
        if path.name not in listed[parent]:
            return str(path.relative_to(folder))
    return None


def file_problem(folder: Path, name: str, sha256: str | None, source: str = "run.json") -> str | None:
    """Reads a file and returns what is wrong with it; None if its digest is `sha256`. source: the file that
    holds the digest, for the message. Raises OSError if the file cannot be read now."""
    path = folder / name
    try:
        found = read_with_retries(path, lambda: describe_file(path))
    except OSError as error:
        if is_access_error(error):
            raise
        return f"{name} cannot be read ({error.strerror or error})"
    return None if found["sha256"] == sha256 else digest_differs(name, source)


def digest_differs(what: str, source: str = "run.json") -> str:
    """Returns the message that a file or tensor differs from its digest. source: the file with the digest."""
    return f"{what} is damaged: its digest differs from that in {source}"


def file_sizes(folder: Path, pattern: str = "*") -> dict[str, int]:
    """Returns the size in bytes of each file below a folder: path relative to the folder -> size, sorted."""
    paths = (path for path in sorted(folder.rglob(pattern)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def read_record(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file whose checksum `add_checksum` added; None if the file is missing or
    damaged. Raises OSError if the file cannot be read now."""
    try:
        record = read_with_retries(path, lambda: read_json(path))
    except (OSError, ValueError, HostileFileError) as error:
        if is_access_error(error):
            raise
        return None
    return record if isinstance(record, dict) and has_valid_checksum(record) else None


def add_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with a SHA-256 of its content under "sha256"; an existing one is replaced."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "sha256": digest}


def has_valid_checksum(record: dict[str, Any]) -> bool:
    """Returns whether the record's SHA-256 is the one that `add_checksum` computes."""
    return record.get("sha256") == add_checksum(record)["sha256"]


class HashedFile:
    """A file-like object that writes a new file and computes its SHA-256 from the bytes while they are
    written, in a thread, so that a save does not read its files again. hashed: False for a file whose tensors
    have digests of their own; its SHA-256 is not computed."""

    def __init__(self, path: Path, hashed: bool = True) -> None:
        self._descriptor = open_own(path)
        self._digest = hashlib.sha256() if hashed else None
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """Appends the bytes of a buffer. Raises OSError if they cannot be written."""
        content = memoryview(data).cast("B")
        hashed = self._thread.submit(self._digest.update, content) if self._digest is not None else None
        done = 0
        while done < len(content):
            done += os.write(self._descriptor, content[done : done + _WRITE_BYTES])
        if hashed is not None:
            hashed.result()  # the caller may change the buffer afterwards
        self._num_bytes += done
        return done

    def close(self) -> dict[str, Any]:
        """Syncs the file to disk and closes it. Returns its size and digest in the form of
        `describe_file`."""
        try:
            os.fsync(self._descriptor)
        finally:
            self.abandon()
        digest = {} if self._digest is None else {"sha256": self._digest.hexdigest()}
        return {"bytes": self._num_bytes, **digest}

    def abandon(self) -> None:
        """Closes the file after an error, if it is still open."""
        self._thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def describe_file(path: Path) -> dict[str, Any]:
    """Returns the size and digest of one file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
