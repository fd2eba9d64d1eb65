"""Runs simulations in parallel, each in its own process.

A simulation permanently changes its process: the device type, DeepSpeed's accelerator and the default process
group. The processes are forked from a server process that has already imported all modules.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from megatron.cluster.launch import temporary_environment
from megatron.errors import UserError, one_line
from megatron.torch_versions import missing_name

_PRELOADED = ["torch._dynamo", "setuptools", "megatron.planner.simulation.layer_costs"]
_SHOWN_LINES = 30
# Threads take turns to start workers, because the start of the server changes the environment for a moment.
_STARTING = threading.Lock()


class SimulationError(RuntimeError):
    """A process that simulates a run has failed."""


class Worker:
    """A process that runs functions, one after the other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the process. environment: environment variables for it."""
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "output"
        context = _server()
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(self._output), dict(environment))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in the process and returns its result. Raises the function's UserError, a UserError
        if the process is killed, and for any other failure a SimulationError with the last lines of the
        process's output."""
        with suppress(BrokenPipeError):  # the process has ended; the code below reports it
            self._connection.send((function, arguments))
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure() from None
        if not succeeded:
            raise UserError(value)
        return value

    def _failure(self) -> Exception:
        """Returns the error for a process that has ended."""
        self._process.join()
        if self._process.exitcode == -signal.SIGKILL:
            return UserError(
                "a process that simulates this run was killed, probably because memory ran out. "
                "Stop other programs, or plan on a machine with more memory."
            )
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return SimulationError(
            f"a process that simulates this run failed (exit code {self._process.exitcode}):\n"
            + "\n".join(lines[-_SHOWN_LINES:])
        )

    def is_alive(self) -> bool:
        """Returns whether the process can run another function."""
        return self._process.is_alive()

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()  # SIGTERM might be ignored, see `exit_on_interrupt`


def _serve(connection: Connection, output: str, environment: dict[str, str]) -> None:
    """Runs functions in the new process until the other end of the connection is closed."""
    os.environ.update(environment)
    with _to_file(output):
        with suppress(EOFError):
            while True:
                function, arguments = connection.recv()
                connection.send(_answer(function, arguments))


def start_server() -> None:
    """Starts the server process from which processes are forked. This takes seconds in the background, so a
    command that plans calls it before its own imports."""
    _server()


def _server() -> ForkServerContext:
    """Returns the server process from which processes are forked, and starts it if it does not run. Two
    environment variables are set for it: DeepSpeed must not look for a GPU, and a simulation needs only one
    thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _STARTING, temporary_environment({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


@contextmanager
def _to_file(output: str) -> Iterator[None]:
    """Sends all output of this process to a file during the block, including the messages of crashes in
    libraries."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    gc.freeze()  # garbage collection then skips the server's imports, so their memory pages stay shared
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        with redirect_stdout(file):
            yield


def _answer(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Calls the function. Returns (True, result), or (False, message) if it raises a UserError."""
    try:
        return True, function(*arguments)
    except UserError as error:
        return False, str(error)
    except (AttributeError, ImportError) as error:
        if (sentence := missing_name(error)) is None:
            raise
        return False, sentence
    except (MemoryError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "overflow" not in str(error):
            raise
        return False, (
            f"a tensor of this model is larger than any device can hold ({one_line(error)}). Reduce the "
            "sizes of the model, --seq-length or --micro-batch-size."
        )
