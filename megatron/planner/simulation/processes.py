"""Simulations in parallel, each in a process of its own.

A simulation changes its process for good: the device type, DeepSpeed's accelerator, the default process
group. The processes are forked from a server that has imported everything already.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from megatron.cluster.launch import temporary_environment
from megatron.errors import UserError, one_line
from megatron.planner.simulation.record import SimulationError

_PRELOADED = ["torch._dynamo", "setuptools", "megatron.planner.simulation.world"]
_SHOWN_LINES = 30
# Workers are started in threads, and the start of the server changes the environment for a moment.
_STARTING = threading.Lock()


def run_in_processes(
    function: Callable[..., Any], arguments: Iterable[Sequence[Any]], processes: int | None = None
) -> list[Any]:
    """`function(*a)` for each tuple `a` of arguments, each in a fresh process, `processes` at a time
    (default: one per core); errors as those of `Worker.run`. function: of a module, by name."""
    workers: list[Worker] = []

    def run_one(values: Sequence[Any]) -> Any:
        workers.append(worker := Worker({}))
        try:
            return worker.run(function, *values)
        finally:
            worker.end()

    with ThreadPoolExecutor(processes or len(os.sched_getaffinity(0))) as threads:
        tasks = [threads.submit(run_one, values) for values in arguments]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:  # nothing else is started, and what runs ends
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in list(workers):
                worker.end()
            raise
    return [task.result() for task in tasks]


class Worker:
    """A process that stays, and runs one function after the other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: variables that the process sets."""
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "output"
        context = _server()
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(self._output), dict(environment))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result. A UserError of the function is raised here, and one if the process is
        killed. SimulationError if the process fails in another way, with the last lines that it has printed.
        """
        with suppress(BrokenPipeError):  # the process has ended, which is reported below
            self._connection.send((function, arguments))
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure() from None
        if not succeeded:
            raise UserError(value)
        return value

    def _failure(self) -> Exception:
        """The error for a process that has ended."""
        self._process.join()
        if self._process.exitcode == -signal.SIGKILL:
            return UserError(
                "a process that simulates this run was killed, probably since the machine's memory is full: "
                "stop other programs, or plan on a machine with more memory"
            )
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return SimulationError(
            f"a simulating process failed (exit code {self._process.exitcode}):\n"
            + "\n".join(lines[-_SHOWN_LINES:])
        )

    def is_alive(self) -> bool:
        """Whether the process can run another function."""
        return self._process.is_alive()

    def end(self) -> None:
        """Ends the process."""
        self._process.terminate()


def _serve(connection: Connection, output: str, environment: dict[str, str]) -> None:
    """In the new process: answers until the other end is closed."""
    os.environ.update(environment)
    with _to_file(output):
        with suppress(EOFError):
            while True:
                function, arguments = connection.recv()
                connection.send(_answer(function, arguments))


def start_server() -> None:
    """Starts the server that processes are forked from, which takes seconds. A command that plans calls it
    before its own imports."""
    _server()


def _server() -> ForkServerContext:
    """The server that processes are forked from. It starts with few variables of the environment changed:
    DeepSpeed must not look for a GPU, and the simulation needs one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _STARTING, temporary_environment({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


@contextmanager
def _to_file(output: str) -> Iterator[None]:
    """What this process, its libraries and crashes write goes to a file."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    gc.freeze()  # what the server has imported is not searched, and its pages stay shared
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        with redirect_stdout(file):
            yield


def _answer(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bool, Any]:
    """(True, result) or (False, message of a UserError)."""
    try:
        return True, function(*arguments)
    except UserError as error:
        return False, str(error)
    except (MemoryError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "overflow" not in str(error):
            raise
        return False, (
            f"a tensor of this model is larger than any device can hold ({one_line(error)}): reduce the "
            "sizes of the model, --seq-length or --micro-batch-size"
        )
