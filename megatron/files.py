"""Small files: bounded reads of files that anybody may have written, atomic and synced writes.

Symbolic links are followed for reading, since users keep files on other disks and the caches of Hugging Face
consist of links. The target must be a regular file: a device or a pipe is never opened.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron.config.errors import ConfigError

# The run.json of a run with thousands of files and parameters has 2 MB. Nested lists take 30 times the size
# of their text in memory.
MAX_JSON_BYTES = 1 << 23
MAX_JSON_DEPTH = 64


class HostileFileError(ConfigError):
    """A file that no Megatron program writes, by accident or on purpose: it requires a path outside its
    folder, code execution, or far more memory or time than its size explains."""


def open_regular(path: Path | str) -> BinaryIO:
    """Opens a file for reading. OSError if it does not exist, or if it is not a regular file."""
    # O_NONBLOCK: opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Reads a whole file. OSError if it cannot be read, HostileFileError if it is larger than the limit."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            size = os.fstat(file.fileno()).st_size
            raise HostileFileError(f"{path} has {size:,} bytes, expected {limit_bytes:,} at most")
    return content


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises OSError if it cannot be read, ValueError if it does not hold JSON, and HostileFileError if it is
    larger or nested more deeply than any file of this kind.
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
    """Whether it has no more than MAX_JSON_DEPTH levels. ValueError for a string that cannot be printed."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        for entry in level:
            if isinstance(entry, str) and not entry.isascii():
                entry.encode()  # half a surrogate pair fails, with a ValueError
        containers = [entry for entry in level if isinstance(entry, (dict, list))]
        level = [child for entry in containers for child in entry]
        level += [child for entry in containers if isinstance(entry, dict) for child in entry.values()]
        if not level:
            return True
    return False


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file through a temporary file, a sync and a rename: it is complete, or unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", opener=_not_through_a_link) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_file(path.parent)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """Writes a JSON file as `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=indent) + "\n")


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def expect_layout(path: Path, what: str) -> Iterator[None]:
    """Turns errors inside the block, caused by unexpected types or keys in a file, into a ConfigError that
    names the file. what: what the file was expected to contain, in words."""
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
        raise ConfigError(
            f"{path} is not laid out as {what} ({type(error).__name__}): it is damaged, or another program "
            "wrote it"
        ) from error


def sync_file(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk.

    After a power failure a rename is lost unless its folder was synced. Some network file systems refuse to
    sync a folder, and write names at once.
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
    """Renames within a file system and flushes the new name to the disk."""
    os.rename(source, target)
    sync_file(target.parent)
    if source.parent != target.parent:
        sync_file(source.parent)
