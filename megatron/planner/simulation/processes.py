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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from megatron.cluster.launch import temporary_environment
from megatron.errors import UserError, one_line
from megatron.planner.simulation.record import SimulationError

_PRELOADED = ["torch._dynamo", "setuptools", "megatron.planner.simulation.world"]
_SHOWN_LINES = 30


def run_in_processes(
    function: Callable[..., Any], arguments: Iterable[Sequence[Any]], processes: int | None = None
) -> list[Any]:
    """`function(*a)` for each tuple `a` of arguments, each in a fresh process, `processes` at a time
    (default: one per core). function: of a module, by name.

    A UserError of the function is raised here, and one if a process is killed. SimulationError if a process
    fails in another way, with the last lines that it has printed.
    """
    context = _server()
    tasks = list(enumerate(arguments))[::-1]
    limit = processes or len(os.sched_getaffinity(0))
    results: dict[int, Any] = {}
    running: dict[Connection, tuple[int, Any, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while tasks or running:
                while tasks and len(running) < limit:
                    index, values = tasks.pop()
                    receiver, sender = context.Pipe(duplex=False)
                    output = Path(folder) / str(index)
                    process = context.Process(target=_run, args=(function, values, sender, str(output)))
                    process.start()
                    sender.close()
                    running[receiver] = index, process, output
                for receiver in wait(list(running)):
                    index, process, output = running.pop(receiver)  # type: ignore[index]
                    results[index] = _result(receiver, process, output)  # type: ignore[arg-type]
                    process.join()
        finally:
            for _, process, _ in running.values():
                process.terminate()
    return [results[index] for index in sorted(results)]


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
        """The function's result; errors as those of `run_in_processes`."""
        with suppress(BrokenPipeError):  # the process has ended, which `_result` reports
            self._connection.send((function, arguments))
        return _result(self._connection, self._process, self._output)

    def is_alive(self) -> bool:
        """Whether the process can run another function."""
        return bool(self._process.is_alive())


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


def _server() -> BaseContext:
    """The server that processes are forked from. It starts with few variables of the environment changed:
    DeepSpeed must not look for a GPU, and the simulation needs one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with temporary_environment({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


def _run(function: Callable[..., Any], arguments: Sequence[Any], sender: Connection, output: str) -> None:
    """In the new process."""
    with _to_file(output):
        sender.send(_answer(function, arguments))


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


def _result(receiver: Connection, process: Any, output: Path) -> Any:
    try:
        succeeded, value = receiver.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        if process.exitcode == -signal.SIGKILL:
            raise UserError(
                "a process that simulates this run was killed, probably since the machine's memory is full: "
                "stop other programs, or plan on a machine with more memory"
            ) from None
        lines = output.read_text(errors="replace").splitlines() if output.exists() else []
        raise SimulationError(
            f"a simulating process failed (exit code {process.exitcode}):\n"
            + "\n".join(lines[-_SHOWN_LINES:])
        ) from None
    if not succeeded:
        raise UserError(value)
    return value
