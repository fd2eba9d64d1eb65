"""Reports the progress of a process that prepares the run to the other processes, which wait for it.

Before a process connects (see `rendezvous`), it imports libraries and verifies data; rank 0 also computes the
data report and selects the checkpoint. --start-timeout limits the time without progress, not the duration of
this work. So rank 0 starts the store first, and each rank counts its progress in the store. A process makes
progress if it uses the CPU, or reads or writes. Only the start of Python and the import of torch precede it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.node_processes import io_bytes
from megatron.cluster.rendezvous import PROGRESS_KEY, Address, mark_preparing, open_store
from megatron.config import Config
from megatron.errors import UserError

_INTERVAL_S = 5.0
# Least progress per interval: a share of CPU time, or bytes. The threads of an idle process use less.
_MIN_CPU_SHARE = 0.02
_MIN_BYTES = 2**20


class Preparation:
    """Counts the progress of this process in the store, in a thread, until `end` or the end of the block.
    Does nothing for a single process and for a dry run.

    The block must last until the process has connected, since this object keeps the store of rank 0 alive.
    """

    def __init__(self, config: Config, env: Mapping[str, str] = os.environ) -> None:
        self._timeout_s = config.parallel.start_timeout
        self._interval_s = min(_INTERVAL_S, self._timeout_s / 4)
        is_run = int(env.get("WORLD_SIZE", "1")) > 1 and not config.training.dry_run
        self._address = Address.from_environment(env) if is_run else None
        self._ended = threading.Event()
        self._store: dist.Store | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Preparation:
        """Raises UserError if this process must start the store and cannot use the port."""
        if self._address is not None:
            if self._address.hosts_store:
                self._store = open_store(self._address, time.monotonic() + self._timeout_s)
            self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Stops counting. Must be called before the process connects: waiting uses the CPU too."""
        self._ended.set()

    def _run(self) -> None:
        assert self._address is not None
        # The main thread raises the same errors when it connects.
        with suppress(UserError, RunStopped, dist.DistError):
            store = self._store or open_store(self._address, time.monotonic() + self._timeout_s)
            mark_preparing(store, self._address.rank)
            cpu_s, bytes_ = time.process_time(), io_bytes()
            while not self._ended.wait(self._interval_s):
                now_cpu_s, now_bytes = time.process_time(), io_bytes()
                if now_cpu_s - cpu_s >= _MIN_CPU_SHARE * self._interval_s or now_bytes - bytes_ >= _MIN_BYTES:
                    store.add(PROGRESS_KEY, 1)
                    cpu_s, bytes_ = now_cpu_s, now_bytes
