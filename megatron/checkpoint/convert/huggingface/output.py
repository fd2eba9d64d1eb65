"""The folder that a conversion writes: complete or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron.checkpoint.convert.to_universal import UNFINISHED_FOLDER, check_space
from megatron.config import ConfigError
from megatron.config.errors import one_line

_LOCK_FILE = "conversion.lock"


@contextmanager
def temporary_folder(output: Path, suffix: str, needed_bytes: int) -> Iterator[Path]:
    """A new folder beside `output`, which the body fills and renames to `output`; removed if the body raises.
    That of a conversion that was killed is replaced. UNFINISHED_FOLDER in it has a file that this process
    locks; the body removes it before it renames.

    suffix: of its name. Raises ConfigError if `output` exists, if this folder exists and is not of a killed
    conversion, if it cannot be made or written, and if its disk has fewer than needed_bytes free.
    """
    temporary = output.with_name(output.name + suffix)
    if output.exists():
        raise ConfigError(f"{output} exists already: remove it, or give another folder")
    _remove_leftover(temporary)
    try:
        (temporary / UNFINISHED_FOLDER).mkdir(parents=True)
        lock = os.open(temporary / UNFINISHED_FOLDER / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise ConfigError(f"{output} cannot be made ({error.strerror}): give another folder") from error
    try:
        _take_lock(lock)
        check_space(temporary, needed_bytes, str(output))
        yield temporary
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_write_error(error, temporary):
            raise ConfigError(
                f"{output} cannot be written ({one_line(error)}): free space, or give another folder"
            ) from error
        raise
    finally:
        os.close(lock)


def _remove_leftover(temporary: Path) -> None:
    """Removes the folder of a conversion that was killed. ConfigError for any other that exists."""
    if not os.path.lexists(temporary):
        return
    try:
        lock = os.open(temporary / UNFINISHED_FOLDER / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        lock = None
    if temporary.is_symlink() or lock is None:
        raise ConfigError(f"{temporary} exists already: remove it, or give another folder")
    try:
        if not _take_lock(lock):
            raise ConfigError(
                f"{temporary} is being written by another process: wait, or give another folder"
            )
        shutil.rmtree(temporary)
    finally:
        os.close(lock)


def _take_lock(lock: int) -> bool:
    """Whether this process holds the lock now. It ends with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_write_error(error: BaseException, folder: Path) -> bool:
    """Whether it may be that of a write in the folder, as on a full disk; an error of another file is not."""
    if isinstance(error, OSError):
        return not isinstance(error.filename, str) or Path(error.filename).is_relative_to(folder)
    return isinstance(error, SafetensorError)
