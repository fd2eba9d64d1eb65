"""Runs functions of tests in worlds of processes (CPU, gloo) from a pool that is started once per session.

    results = run_world(4, function, argument)        # function runs on 4 ranks; results in rank order

`function` must be importable (defined at the top level of a module). It runs in a fresh process group of
torch and DeepSpeed, with the variables that a launcher sets. The workers are forked (`tests.support.forked`)
and are reused by later cases. They have the environment of the session's start. Changes that a function makes
in its environment are undone when it returns.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.support import HANG_TIMEOUT_S, forked

MAX_WORLD_SIZE = 8
# Seconds that the other ranks have to fail as well or to finish, after one rank has failed.
_GRACE_S = 5.0
# A worker with more threads than this after a case is replaced. Hooks of autograd keep an engine with sharded
# weights (ZeRO-3) until the process ends, with three threads per process group that wake 100 times per
# second.
_MAX_IDLE_THREADS = 8
# The modules in which DeepSpeed keeps state of one world. After a case their variables get the values they
# had after the import.
_DEEPSPEED_STATE = (
    "deepspeed",
    "deepspeed.comm.comm",
    "deepspeed.utils.groups",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
)


class WorldError(RuntimeError):
    """A case failed on some rank. `__cause__` is the exception of the first rank that failed, if it could be
    pickled. The message has its traceback."""


def run_world(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = HANG_TIMEOUT_S,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on each of `world_size` ranks. Returns their results in rank order.

    Raises WorldError if a rank raised or died, or did not answer within `timeout` seconds: then the message
    has the stacks of these ranks. Also raises WorldError if a worker was killed since the last case. The next
    case has new workers.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"a world of {world_size} ranks: expected 1 to {MAX_WORLD_SIZE}")
    return _pool.run(world_size, pickle.dumps((function, args, kwargs)), timeout)


class _Pool:
    """The workers of the pool, and the store through which they connect."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._directory: str | None = None
        self._store: Any = None
        self._cases = 0

    def run(self, world_size: int, job: bytes, timeout: float) -> list[Any]:
        self._grow(world_size)
        dead = [process for process, _ in self._workers if not process.is_alive()]
        if dead:
            self.close()
            raise WorldError(f"a test before this one killed a worker of the pool: {dead}")
        self._cases += 1
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            connection.send((rank, world_size, self._store.port, self._cases, job))
        case = _Case(self._workers[:world_size])
        case.collect(timeout)
        if case.unfinished:
            stacks = self._stacks_of(case.unfinished)
            self.close()
        else:
            stacks = ""
            for rank, num_threads in case.idle_threads.items():
                if num_threads > _MAX_IDLE_THREADS:
                    self._replace(rank)
        case.raise_if_failed(timeout, stacks)
        return [case.results[rank] for rank in range(world_size)]

    def _grow(self, world_size: int) -> None:
        if self._store is None:
            import torch.distributed

            self._directory = tempfile.mkdtemp(prefix="pool-")
            # One server for all cases, so a port is found only once. Each case writes under its own prefix.
            self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world_size:
            self._workers.append(self._start(len(self._workers)))

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = multiprocessing.Pipe()
        process = forked.start(_work, theirs, self._stack_file(rank))
        theirs.close()
        return process, ours

    def _replace(self, rank: int) -> None:
        process, connection = self._workers[rank]
        connection.close()
        process.kill()
        process.join()
        self._workers[rank] = self._start(rank)

    def _stack_file(self, rank: int) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, f"stack-{rank}")

    def _stacks_of(self, ranks: list[int]) -> str:
        """Returns the current Python stacks of these ranks."""
        for rank in ranks:
            process, _ = self._workers[rank]
            path = Path(self._stack_file(rank))
            before = path.stat().st_size if path.exists() else 0
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
                _wait_until_written(path, before)
        stacks = []
        for rank in ranks:
            path = Path(self._stack_file(rank))
            stacks.append(f"rank {rank} is at:\n{path.read_text() if path.exists() else '(not started)'}")
        return "\n".join(stacks)

    def close(self) -> None:
        """Ends all workers. The next case starts new workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
        self._store = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _wait_until_written(path: Path, before: int) -> None:
    """Returns when the file has more than `before` bytes and stops growing, or after some seconds."""
    deadline, size = time.monotonic() + _GRACE_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, path.stat().st_size if path.exists() else 0
        if before < size == last:
            return


class _Case:
    """One run of a function on a world, with the ranks' answers so far."""

    def __init__(self, workers: list[tuple[BaseProcess, Connection]]) -> None:
        self._rank_of = {connection: rank for rank, (_, connection) in enumerate(workers)}
        self._processes = [process for process, _ in workers]
        self._open = set(range(len(workers)))
        self.results: dict[int, Any] = {}
        self.idle_threads: dict[int, int] = {}
        self.failures: list[tuple[int, str, BaseException | None]] = []
        # Deaths are separate from failures: a rank may report its broken connection before the death that
        # broke it is seen.
        self.deaths: list[tuple[int, str, BaseException | None]] = []

    @property
    def unfinished(self) -> list[int]:
        """Returns the ranks that have not left the world, including ranks that have died."""
        return sorted(self._open)

    def collect(self, timeout: float) -> None:
        """Receives answers until each rank has left the world, or until the timeout."""
        deadline = time.monotonic() + timeout
        dead: set[int] = set()
        while self._open - dead:
            waiting = [connection for connection, rank in self._rank_of.items() if rank in self._open - dead]
            ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
            if not ready:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._rank_of[connection]
                try:
                    self._take(rank, *connection.recv())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(HANG_TIMEOUT_S)
                    self.deaths.append(
                        (rank, f"the process died, exit code {self._processes[rank].exitcode}", None)
                    )
                    dead.add(rank)
            if self.failures or self.deaths:
                deadline = min(deadline, time.monotonic() + _GRACE_S)

    def _take(self, rank: int, kind: str, content: Any) -> None:
        if kind == "result":
            self.results[rank] = pickle.loads(content)
        elif kind == "error":
            text, exception = content
            self.failures.append((rank, text, pickle.loads(exception) if exception else None))
        else:
            self.idle_threads[rank] = content
            self._open.discard(rank)

    def raise_if_failed(self, timeout: float, stacks: str) -> None:
        """Raises WorldError if a rank failed. stacks: the stacks of ranks that have not finished; "" if all
        have finished."""
        failures = [*self.deaths, *self.failures]
        if not failures and not stacks:
            return
        lines = []
        if failures:
            first_rank, text, cause = failures[0]
            lines.append(f"rank {first_rank} failed first:\n{text}")
            lines += [f"rank {rank} then failed: {text.splitlines()[-1]}" for rank, text, _ in failures[1:]]
        else:
            cause = None
            lines.append(f"ranks {self.unfinished} have not answered within {timeout} s")
        raise WorldError("\n".join([*lines, stacks])) from cause


def _work(connection: Connection, stack_file: str) -> None:
    """Runs cases in a worker until the parent process has ended."""
    import torch

    torch.set_num_threads(1)
    # On CPUs DeepSpeed would compile a kernel for 30 s when the first world is made. The tests do not use it.
    vars(importlib.import_module("deepspeed.ops"))["__compatible_ops__"] = {}
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        state = _deepspeed_state()
        while True:
            try:
                rank, world_size, port, case, job = connection.recv()
            except EOFError:
                return
            environment = dict(os.environ)
            try:
                _enter_world(rank, world_size, port, case)
                function, args, kwargs = pickle.loads(job)
                connection.send(("result", pickle.dumps(function(*args, **kwargs))))
                # No rank leaves while another rank still communicates with it.
                torch.distributed.barrier()
            except BaseException as error:
                connection.send(("error", (traceback.format_exc(), _pickled(error))))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                _leave_world(state)
                os.environ.clear()
                os.environ.update(environment)
            connection.send(("left", psutil.Process().num_threads()))


def _pickled(error: BaseException) -> bytes | None:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:
        return None
    return content


def _enter_world(rank: int, world_size: int, port: int, case: int) -> None:
    import deepspeed
    import torch.distributed as dist

    os.environ.update(forked.launch_variables(rank, world_size, port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"case-{case}", store), rank=rank, world_size=world_size
    )
    # DeepSpeed uses the process group that it finds.
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def _leave_world(state: dict[str, dict[str, Any]]) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # An engine is full of reference cycles. Each process group that it references keeps its threads.
    gc.collect()
    for name, values in state.items():
        module = sys.modules[name]
        for key in [key for key in vars(module) if not key.startswith("__") and key not in values]:
            delattr(module, key)
        for key, value in values.items():
            setattr(module, key, type(value)(value) if isinstance(value, (list, dict)) else value)


def _deepspeed_state() -> dict[str, dict[str, Any]]:
    """Returns the global variables of DeepSpeed's modules as they are before the first world."""
    state = {}
    for name in _DEEPSPEED_STATE:
        values = {key: value for key, value in vars(importlib.import_module(name)).items() if key[:2] != "__"}
        state[name] = {
            key: type(value)(value) if type(value) in (list, dict) else value for key, value in values.items()
        }
    return state


_pool = _Pool()
atexit.register(_pool.close)
