"""The cache of object stores on a node: a folder on its disk for objects that were downloaded or will be
uploaded.

The ranks of a job on one node share a cache. Each rank holds a shared lock on it, so that a start can find
and remove the caches of processes that have ended.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.errors import UserError
from megatron.files import is_path_of, locked_leftover

# Prefix of the folder's name: object-store-<user id>-<16 hexadecimal digits>.
_PREFIX = "object-store-"
_LOCK = "lock"
# Environment variables that differ between two jobs on a node, or between two starts of a job's processes.
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")


@contextmanager
def hold_cache(node: str, env: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Creates the cache of this process's job on this node, unless another rank has created it, and keeps it
    during the block. After the block the last rank removes it. node: the name of the node."""
    cache = Path(env.get("SLURM_TMPDIR") or tempfile.gettempdir()).absolute()
    # The ranks of a node have one parent process, the launcher. A process without a launcher is alone.
    process = os.getppid() if int(env.get("WORLD_SIZE") or 1) > 1 else os.getpid()
    names = [node, str(process), *(env.get(name, "") for name in _JOB_VARIABLES)]
    token = hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
    root = cache / f"{_PREFIX}{os.getuid()}-{token}"
    for path in cache.glob(f"{_PREFIX}{os.getuid()}-*"):
        if path != root:
            _remove_if_unused(path)
    try:
        descriptor = _lock(root)
    except OSError as error:
        raise UserError(
            f"{root}, the cache of the object store, cannot be created ({error.strerror}): set SLURM_TMPDIR "
            "or TMPDIR to a folder on a disk of the node"
        ) from error
    try:
        yield root
    finally:
        os.close(descriptor)
        _remove_if_unused(root)


@contextmanager
def explained_full_disk(path: Path) -> Iterator[None]:
    """Adds the cache's folder and a remedy to the error of a full disk. path: a path in the cache."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        root = next((parent for parent in path.parents if parent.name.startswith(_PREFIX)), path.parent)
        remedy = f"{error.strerror} in {root}: set SLURM_TMPDIR or TMPDIR to a folder on a larger disk"
        raise OSError(error.errno, remedy, str(path)) from error


def _lock(root: Path) -> int:
    """Creates a cache's folder if it is missing. Returns the descriptor of a shared lock on it."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
        with suppress(FileNotFoundError):  # another start removed the folder as unused: try again
            status = root.lstat()
            if status.st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "it belongs to another user", str(root))
            if not stat.S_ISDIR(status.st_mode):  # a link to a missing folder would cause an endless loop
                raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(root))
            lock = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(root / _LOCK, lock, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_path_of(root / _LOCK, descriptor):
                return descriptor
            os.close(descriptor)


def _remove_if_unused(root: Path) -> None:
    """Removes a cache on which no process holds a lock. It renames the folder first: a process that creates
    the cache again at the same time gets a new folder."""
    with suppress(OSError):
        status = root.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return
        with suppress(FileExistsError):  # the process that created it was killed before it locked the folder
            os.mknod(root / _LOCK, 0o600)
        with locked_leftover(os.fspath(root / _LOCK)):
            removed = root.rename(root.with_name(f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"))
            shutil.rmtree(removed, ignore_errors=True)
