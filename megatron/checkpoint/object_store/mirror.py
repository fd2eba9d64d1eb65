"""The mirror of object stores on a node: a folder on its disk in which each URL has a path.

The ranks of a job on one node share a mirror. Each holds a shared lock on it, so a start removes the mirrors
of processes that have ended. A mirror holds small files and the files in transit between a store and the
ranks; every other object is a placeholder: a sparse file of the object's size, without content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.errors import UserError
from megatron.files import is_path_of
from megatron.object_urls import MIRROR

_LOCK = "lock"
# Environment variables that differ between two jobs on a node, or between two starts of a job's processes.
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")


@contextmanager
def hold_mirror(node: str, env: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Creates the mirror of this process's job on this node, unless another rank has created it, and keeps it
    during the block. Then the last rank removes it. node: the name of the node."""
    cache = Path(env.get("SLURM_TMPDIR") or tempfile.gettempdir()).absolute()
    if re.search(r"\s", str(cache)):
        raise UserError(
            f"{str(cache)!r}, the folder for the mirror of the object store, contains a space: set "
            "SLURM_TMPDIR or TMPDIR to a path without spaces"
        )
    # A launcher starts the ranks of a node; a process without a launcher is alone.
    process = os.getppid() if int(env.get("WORLD_SIZE") or 1) > 1 else os.getpid()
    facts = [node, str(process), *(env.get(name, "") for name in _JOB_VARIABLES)]
    token = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    root = cache / f"{MIRROR}{os.getuid()}-{token}"
    for path in cache.glob(f"{MIRROR}{os.getuid()}-*"):
        if path != root:
            _remove_if_unused(path)
    try:
        descriptor = _lock(root)
    except OSError as error:
        raise UserError(
            f"{root}, the mirror of the object store, cannot be created ({error.strerror}): set SLURM_TMPDIR "
            "or TMPDIR to a folder on a disk of the node"
        ) from error
    try:
        yield root
    finally:
        os.close(descriptor)
        _remove_if_unused(root)


def show_object(path: Path, size: int, modified: float | None = None, content: bytes = b"") -> None:
    """Writes the file of an object. Processes that have mapped an earlier file of this path keep it.

    size: of a placeholder. modified: the time of the object's last change. content: the object's bytes, which
    may be newer than the listing with its size; b"" for a placeholder.
    """
    with explained_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        with open(temporary, "wb") as file:
            if content:
                file.write(content)
            else:
                file.truncate(size)
        if modified is not None:
            os.utime(temporary, (modified, modified))
        os.replace(temporary, path)


@contextmanager
def explained_full_disk(path: Path) -> Iterator[None]:
    """Names the folder of the mirror and what to change in the error of a full disk. path: in the mirror."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        root = next((parent for parent in path.parents if parent.name.startswith(MIRROR)), path.parent)
        remedy = f"{error.strerror} in {root}: set SLURM_TMPDIR or TMPDIR to a folder on a larger disk"
        raise OSError(error.errno, remedy, str(path)) from error


def _lock(root: Path) -> int:
    """Creates a mirror's folder, and returns the descriptor of a shared lock on it."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
        with suppress(FileNotFoundError):  # a start that removes unused mirrors was faster
            status = root.lstat()
            if status.st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "it belongs to another user", str(root))
            if not stat.S_ISDIR(status.st_mode):  # a link to a missing folder would be tried forever
                raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(root))
            descriptor = _open_lock(root)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_path_of(root / _LOCK, descriptor):
                return descriptor
            os.close(descriptor)


def _open_lock(root: Path) -> int:
    return os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _remove_if_unused(root: Path) -> None:
    """Removes a mirror on which no process holds a lock. Under another name first: a process that creates the
    mirror again meanwhile has a new folder."""
    with suppress(OSError):
        status = root.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return
        descriptor = _open_lock(root)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_path_of(root / _LOCK, descriptor):
                removed = root.rename(root.with_name(f"{MIRROR}{os.getuid()}-{secrets.token_hex(8)}"))
                shutil.rmtree(removed, ignore_errors=True)
        finally:
            os.close(descriptor)
