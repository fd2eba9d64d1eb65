"""Functions for files: size-limited reads of untrusted small files, and atomic, synced writes.

Reads follow symbolic links, because users keep files on several disks and the caches of Hugging Face consist
of links. The target must be a regular file: a device or a pipe is never opened. Writes do not follow links,
because in a folder that other users can write to, a link could point to any of your files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import UserError

# Size limit of JSON files. The run.json of a run with thousands of files has 2 MB. In memory, nested lists
# take 30 times the size of their text.
MAX_JSON_BYTES = 1 << 23
MAX_JSON_DEPTH = 64


class HostileFileError(UserError):
    """The error about a file that may be malicious: it requires a path outside its folder, code execution, or
    far more memory or time than its size explains. No Megatron program writes such a file."""


def open_regular(path: Path | str) -> BinaryIO:
    """Opens a file for reading. Raises OSError if it does not exist or is not a regular file."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def open_own(path: Path | str, flags: int = os.O_TRUNC) -> int:
    """Opens a file for reading and writing, creates it if needed, and returns its descriptor. If the file has
    a second name (a hard link, such as `cp -al` makes), a new file replaces it, so that the second name keeps
    its content. Raises OSError for a symbolic link, and for anything else that is not a regular file."""
    own = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags & ~os.O_TRUNC
    descriptor = _open_regular(path, own)
    if flags & os.O_TRUNC:
        # The file is truncated only after the checks.
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            os.unlink(path)
            descriptor = _open_regular(path, own | os.O_EXCL)
        os.ftruncate(descriptor, 0)
    return descriptor


def _open_regular(path: Path | str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.EMFILE and _raise_descriptor_limit():
            return _open_regular(path, flags)
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        error.filename = str(path)  # for an object in a store, the URL instead of the local file
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def _raise_descriptor_limit() -> bool:
    """Raises the soft limit of open files to the hard limit. Returns whether the limit has changed. The usual
    soft limit of 1,024 protects programs that use select(2), so it is raised only when it is reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def open_stream(path: Path) -> int | None:
    """Opens a device, a pipe, or an open file of this process (/dev/stdout) for writing. Returns its
    descriptor, or None for any other path. Raises OSError for a pipe that nobody reads."""
    try:
        status = path.stat()
    except OSError:
        return None
    parent = path.parent.resolve()
    is_open_file = parent == Path("/dev") or Path("/proc") in parent.parents
    if not (is_open_file or stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        return None
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or without a file
            if os.path.samestat(status, os.fstat(stream.fileno())):
                stream.flush()
                return os.dup(stream.fileno())  # reopening a redirected output would overwrite it
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Reads a whole file. Raises OSError if the file cannot be read, and HostileFileError if it exceeds the
    limit."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            size = os.fstat(file.fileno()).st_size
            raise HostileFileError(f"{path} has {size:,} bytes: expected {limit_bytes:,} at most")
    return content


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file.

    Raises OSError if the file cannot be read, ValueError if it does not hold JSON, and HostileFileError if it
    is larger than MAX_JSON_BYTES or nested more deeply than MAX_JSON_DEPTH.
    """
    content = read_small(path)
    try:
        value = json.loads(content)
        shallow = _is_shallow(value)
    except RecursionError:
        shallow = False
    if not shallow:
        raise HostileFileError(f"{path} is nested more than {MAX_JSON_DEPTH} levels deep")
    return value


def _is_shallow(value: Any) -> bool:
    """Returns whether a value has at most MAX_JSON_DEPTH levels. Raises ValueError for unprintable
    strings."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        for entry in level:
            if isinstance(entry, str) and not entry.isascii():
                entry.encode()  # half a surrogate pair raises a ValueError
        containers = [entry for entry in level if isinstance(entry, (dict, list))]
        level = [child for entry in containers for child in entry]
        level += [child for entry in containers if isinstance(entry, dict) for child in entry.values()]
        if not level:
            return True
    return False


MAX_COUNT = 2**53
"""The largest integer that is accepted from a file. JSON readers round larger integers."""
Check = Callable[[Any], bool]
"""A function that returns whether a value from an untrusted file has the expected type."""


def is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    """Returns whether a value is an integer from `least` to `most`."""
    return type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def list_of(check: Check) -> Check:
    """Returns a check for lists in which every entry passes `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def fields_of(checks: Mapping[str, Check]) -> Check:
    """Returns a check for dictionaries that have at least these fields, and whose fields pass their
    checks."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in checks.items())
    )


def dict_of(check: Check) -> Check:
    """Returns a check for dictionaries in which every value passes `check`."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a small file atomically, with a temporary file, a sync and a rename. At any time the file is
    complete or unchanged.

    A symbolic link is replaced, and its target does not change. A device or a pipe is written directly.
    Characters that UTF-8 cannot encode (from file names in a different encoding) are written as escapes.
    """
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    try:
        if (stream := open_stream(path)) is not None:
            with os.fdopen(stream, "wb") as file:
                file.write(content)
            return
        temporary = path.with_name(path.name + ".tmp")
        with os.fdopen(open_own(temporary), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_file(path.parent)
    except OSError as error:
        # The error of a failed write does not name the file.
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Writes a JSON file with `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=indent) + "\n")


@contextmanager
def expect_layout(path: Path, what: str) -> Iterator[None]:
    """Turns errors in the block that are due to unexpected types or keys in a file into a UserError that
    names the file. what: text about the expected content of the file, for the message."""
    try:
        yield
    except (
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise UserError(
            f"{path} is not laid out as {what} ({type(error).__name__}): it is damaged, or another program "
            "wrote it"
        ) from error


def sync_file(path: Path) -> None:
    """Flushes the content of a file, or the list of names of a folder, to the disk.

    Without a sync of the folder, a power failure may undo a rename. Some network file systems cannot sync a
    folder, but write names at once.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flushes a folder and everything in it to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_file(Path(parent))


def rename_synced(source: Path, target: Path) -> None:
    """Renames a file or folder within one file system, and flushes the new name to the disk."""
    os.rename(source, target)
    sync_file(target.parent)
    if source.parent != target.parent:
        sync_file(source.parent)


def create_locked(path: str) -> BinaryIO:
    """Creates a file and locks it until it is closed, so that no process removes it as a leftover. On a file
    system without locks, the file is not locked. Raises OSError if the file cannot be created."""
    while True:
        file = open(path, "xb")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if is_path_of(path, file.fileno()):
            return file
        file.close()  # another process removed the file before the lock


@contextmanager
def locked_leftover(path: str) -> Iterator[None]:
    """Holds the lock of a file that another process has created with `create_locked`. Raises OSError if that
    process still runs."""
    # NFS gives exclusive locks only to a process that may write.
    with os.fdopen(_open_regular(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_path_of(path, file.fileno()):
            raise FileNotFoundError(errno.ENOENT, "removed or replaced by another process", path)
        yield


def is_path_of(path: Path | str, descriptor: int) -> bool:
    """Returns whether the path is still a name of an open file. Other processes may have removed or replaced
    the file before this process locked it. A symbolic link to the file does not count as its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: removed on another node (NFS)
            raise
        return False
