"""Work that processes on any nodes share out through locks on the bytes of one file.

An item has two bytes. A process locks the first before it begins the item, and the second when the item is
done; it keeps both until it ends. The kernel, or the server of a network file system, releases the locks of a
process however it ends. So an item without a lock has no living process that works on it or has checked it,
and the next process takes it over. Nobody has to know the number of processes, their ranks or their clocks.

The locks only avoid duplicate work, because a few network file systems do not pass them between nodes, and a
server may give the locks of a node that it cannot reach to another. The result must be right even if two
processes do one item at once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from megatron.errors import UserError
from megatron.files import open_own
from megatron.text_table import first_few

T = TypeVar("T")
# After this time without an item to do, a process names the items that it waits for.
REPORT_AFTER_S = 30.0
# Polls per second of all processes together: each poll tries the locks of all items that are not done.
_POLLS_PER_S = 20
_MIN_POLL_S = 0.5
_IS_HELD = (errno.EACCES, errno.EAGAIN)


class SharedWork:
    """The share of one process. Without a file, the process has all items for itself."""

    def __init__(self, path: Path | None = None, rank: int = 0, num_tasks: int = 1) -> None:
        """rank, num_tasks: decide only the order in which this process tries the items. Raises UserError if
        the file system has no locks and there are several tasks."""
        self._path, self._rank, self._num_tasks = path, rank, num_tasks
        self._poll_s = max(_MIN_POLL_S, num_tasks / _POLLS_PER_S)
        self._file: int | None = None
        if path is None:
            return
        self._file = open_own(path, 0)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH, 1)
        except OSError as error:
            self._close()
            if num_tasks > 1:
                raise UserError(
                    f"{path} cannot be locked ({error.strerror}), so {num_tasks} tasks cannot share the "
                    "work: start one task, or mount the file system with locks (Lustre: -o flock)"
                ) from error

    def __enter__(self) -> SharedWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        # After an error the other processes still need the file: a new one would have no locks.
        if kind is None and self._path is not None:
            self._path.unlink(missing_ok=True)
        self._close()

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
        """Calls `work` in threads for each item that no other process does; yields the results as they
        arrive. Returns when each item is done: by this process, or by one that lives.

        names: the items of this kind, the largest first. is_done: returns False for the result of an item
        that must stay undone: then another process tries the item.
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
                        else:  # others would wait for it, and this process for theirs
                            self._unlock(kind, name)
                        yield result
                elif waiting:
                    if idle_since is not None and time.monotonic() - idle_since >= REPORT_AFTER_S:
                        idle_since = None  # one report
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
        """Returns whether this process has the lock. Only the exclusive lock of an item that is done waits:
        for other processes that look whether the item is done."""
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
    # From the name, so that processes need not agree on a list. Byte 0 tests if the file system has locks.
    digest = hashlib.sha256(f"{kind} {name}".encode(errors="surrogateescape")).digest()
    return 2 + 2 * int.from_bytes(digest[:7], "big") + done
