"""Work that processes on any nodes divide among themselves through locks on the bytes of one file.

An item has two bytes in the file. A process locks the first byte before it begins the item, and the second
when the item is done; it keeps both locks until it ends. The kernel, or the server of a network file system,
releases the locks of a process however it ends. So no living process works on, or has checked, an item
without locks, and the next process takes the item over. Nobody has to know the number of processes, their
ranks or their clocks.

The locks only avoid duplicate work: a few network file systems do not pass them between nodes, and a server
may give the locks of a node that it cannot reach to another node. The result must be right even if two
processes do the same item at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from megatron.errors import UserError
from megatron.files import is_path_of, open_own
from megatron.text_table import first_few

T = TypeVar("T")
# After this time without an item to do, a process logs which items it waits for.
REPORT_AFTER_S = 30.0
# Polls per second of all processes together. Each poll tries the locks of all items that are not done.
_POLLS_PER_S = 20
_MIN_POLL_S = 0.5
# Attempts of a process to join the work: the last process that failed may remove the file at that moment.
_ATTEMPTS_TO_JOIN = 3
_IS_HELD = (errno.EACCES, errno.EAGAIN)


class SharedWork:
    """One process's share of the work. A process that is alone does all items.

    The file with the locks is beside the folder that is written, not in it: NFS renames an open file instead
    of deleting it, so a folder with an open file cannot be deleted.
    """

    def __init__(self, folder: Path, rank: int = 0, num_tasks: int = 1, is_exclusive: bool = False) -> None:
        """folder: the folder that is written. Its parent is created, and removed after an error if it is
        empty. rank, num_tasks: determine only the order in which this process tries the items. is_exclusive:
        whether no other process may work on the folder.

        Raises UserError if another process excludes this one, or if the file system has no locks and this
        process cannot be sure that it is alone. Raises OSError if the parent or the file cannot be created.
        """
        self._path = folder.with_name(folder.name + ".locks")
        self._rank, self._num_tasks, self._is_exclusive = rank, num_tasks, is_exclusive
        self._poll_s = max(_MIN_POLL_S, num_tasks / _POLLS_PER_S)
        self._file: int | None = None
        self.is_leftover = os.path.lexists(self._path)
        """Whether a process that was killed or has failed left the file with the locks."""
        busy = UserError(f"{folder} is being written by another process: wait, or give another folder")
        try:
            self._creates_parent = not folder.parent.exists()
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Without locks, the existence of the file shows that a process works on the folder.
            is_created = is_exclusive and not self.is_leftover
            attempts = 1 if is_exclusive else _ATTEMPTS_TO_JOIN
            while not self._open(os.O_EXCL if is_created else 0):
                attempts -= 1
                if not attempts:
                    raise busy
                time.sleep(_MIN_POLL_S)
        except FileExistsError as error:
            if not folder.parent.is_dir():
                raise
            raise busy from error

    def _open(self, flags: int) -> bool:
        """Opens the file and locks its first byte, if the file system has locks. Returns False if another
        process excludes this one, or has removed the file in the meantime."""
        self._file = open_own(self._path, flags)
        mode = fcntl.LOCK_EX if self._is_exclusive else fcntl.LOCK_SH
        try:
            fcntl.lockf(self._file, mode | fcntl.LOCK_NB, 1)
            if is_path_of(self._path, self._file):
                return True
        except OSError as error:
            if error.errno not in _IS_HELD:
                self._close()
                self._check_without_locks(error)
                return True
        self._close()
        return False

    def _check_without_locks(self, error: OSError) -> None:
        if self._num_tasks > 1 and not self._is_exclusive:
            raise UserError(
                f"{self._path} cannot be locked ({error.strerror}), so {self._num_tasks} tasks cannot share "
                "the work: start one task, or mount the file system with locks (Lustre: -o flock)"
            ) from error
        if self._is_exclusive and self.is_leftover:
            raise UserError(
                f"{self._path} exists already: its conversion runs or was killed. Give another folder, "
                f"or remove {self._path.name} and {self._path.stem} if it was killed"
            ) from error

    def __enter__(self) -> SharedWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        # After an error the other processes still need this file: a new file would have no locks.
        if kind is None or self.is_last():
            self._path.unlink(missing_ok=True)
        self._close()
        if kind is not None and self._creates_parent:
            with suppress(OSError):  # if the folder is not empty
                self._path.parent.rmdir()

    def is_last(self) -> bool:
        """Returns whether no other process works on the folder. If so, none begins before this process has
        ended. Call it when this process has nothing more to do."""
        if self._is_exclusive or self._file is None:
            return True
        try:
            # This process unlocks first. Otherwise processes that end together would each find the
            # others' locks.
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            self._is_exclusive = is_path_of(self._path, self._file)
        except OSError:
            return False
        return self._is_exclusive

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def share(
        self,
        kind: str,
        names: Sequence[str],
        work: Callable[[str], T],
        workers: int = 1,
        is_done: Callable[[T], bool] = lambda _: True,
    ) -> Iterator[T]:
        """Calls `work` in threads for each item that no other process works on. Yields the results as they
        arrive. Returns when every item is done, by this process or by another living process.

        names: the items of this kind, the largest first. is_done: returns False if an item with this result
        is not done; then another process tries the item.
        """
        own = names[self._rank % self._num_tasks :: self._num_tasks]
        waiting = dict.fromkeys([*own, *names])
        running: dict[Future[T], str] = {}
        idle_since: float | None = time.monotonic()
        pool = ThreadPoolExecutor(workers)
        try:
            while waiting or running:
                for name in list(waiting):
                    if len(running) == workers:
                        break
                    if self._lock(fcntl.LOCK_EX, kind, name):
                        running[pool.submit(work, name)] = name
                        del waiting[name]
                    elif self._is_done(kind, name):
                        del waiting[name]
                if running:
                    idle_since = time.monotonic()
                    timeout = self._poll_s if waiting and len(running) < workers else None
                    for future in wait(running, timeout, return_when=FIRST_COMPLETED).done:
                        name, result = running.pop(future), future.result()
                        if is_done(result):
                            self._lock(fcntl.LOCK_EX, kind, name, done=True)
                        else:  # with a kept lock, this process and the others would wait for each other
                            self._unlock(kind, name)
                        yield result
                elif waiting:
                    if idle_since is not None and time.monotonic() - idle_since >= REPORT_AFTER_S:
                        idle_since = None  # so that the report appears only once
                        print(f"waiting for other tasks: {kind} {first_few(list(waiting))}")
                    time.sleep(self._poll_s)
        finally:
            pool.shutdown(cancel_futures=True)

    def _is_done(self, kind: str, name: str) -> bool:
        if not self._lock(fcntl.LOCK_SH, kind, name, done=True):
            return True
        self._unlock(kind, name, done=True)
        return False

    def _unlock(self, kind: str, name: str, done: bool = False) -> None:
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _offset(kind, name, done))

    def _lock(self, mode: int, kind: str, name: str, done: bool = False) -> bool:
        """Returns whether this process has the lock. Only the exclusive lock of an item that is done is
        waited for: other processes hold it for a moment when they check whether the item is done."""
        if self._file is None:
            return True
        waits = done and mode == fcntl.LOCK_EX
        try:
            fcntl.lockf(self._file, mode | (0 if waits else fcntl.LOCK_NB), 1, _offset(kind, name, done))
        except OSError as error:
            if error.errno in _IS_HELD:
                return False
            raise
        return True


def _offset(kind: str, name: str, done: bool) -> int:
    # The lock's byte is computed from the name, so that processes need no common list. Byte 0 tests whether
    # the file system has locks.
    digest = hashlib.sha256(f"{kind} {name}".encode(errors="surrogateescape")).digest()
    return 2 + 2 * int.from_bytes(digest[:7], "big") + done
