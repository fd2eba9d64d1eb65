"""Opening, reading and syncing the files of checkpoints, which anybody may have written.

Symbolic links are followed for reading, for a user may keep files on another disk, and the caches of Hugging
Face consist of links. What they lead to must be a regular file: a device or a pipe is never opened.
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

# The run.json of a run with thousands of files and parameters has 2 MB. Lists of lists take 30 times their
# text in memory.
MAX_JSON_BYTES = 1 << 23
MAX_JSON_DEPTH = 64


class HostileFileError(ConfigError):
    """A file that no program of the family writes, by accident or on purpose: it asks for a path outside its
    folder, for code to be run, or for far more memory or time than its size explains."""


def open_regular(path: Path | str) -> BinaryIO:
    """The file, opened for reading. OSError if there is none, or if it is not a regular file."""
    # O_NONBLOCK: to open a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file. OSError if it cannot be read, HostileFileError if it is beyond the limit."""
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


@contextmanager
def expect_layout(path: Path, what: str) -> Iterator[None]:
    """Whatever fails in it, as values of a file have not the types or keys that are expected, is a
    ConfigError that names the file. what: the file should be, in words."""
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
            f"{path} is not laid out as {what} ({type(error).__name__}): it is damaged, or of another program"
        ) from error


def sync_file(path: Path) -> None:
    """Returns when the file's content, or a folder's list of names, is on the disk.

    A rename is lost in a power failure until its folder is. Some network file systems refuse to sync a
    folder, and write names at once.
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
    """Returns when the folder is on the disk with all that is in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_file(Path(parent))


def rename_synced(source: Path, target: Path) -> None:
    """Renames within a file system; the new name is on the disk after this."""
    os.rename(source, target)
    sync_file(target.parent)
    if source.parent != target.parent:
        sync_file(source.parent)
