"""Simulations in parallel, each in a process of its own.

A simulation changes its process for good: the device type, DeepSpeed's accelerator, the default process
group. The processes are forked from a server that has imported everything already.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from megatron.cluster.launch import temporary_environment
from megatron.config import ConfigError
from megatron.simulation.trace import SimulationError

_PRELOADED = ["torch._dynamo", "megatron.simulation.world"]
_SHOWN_LINES = 30


def run_in_processes(
    function: Callable[..., Any], arguments: Iterable[Sequence[Any]], processes: int | None = None
) -> list[Any]:
    """`function(*a)` for each tuple `a` of arguments, each in a fresh process, `processes` at a time
    (default: one per core). function: of a module, by name.

    A ConfigError of the function is raised here. SimulationError if a process fails in another way, with the
    last lines that it has printed.
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
        finally:
            for _, process, _ in running.values():
                process.terminate()
    return [results[index] for index in sorted(results)]


def _server() -> BaseContext:
    """The server that processes are forked from. It starts with few variables of the environment changed:
    DeepSpeed must not look for a GPU, and the simulation needs one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with temporary_environment({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


def _run(function: Callable[..., Any], arguments: Sequence[Any], sender: Connection, output: str) -> None:
    """In the new process: sends (True, result) or (False, message of a ConfigError)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with open(output, "w") as file:
        # What libraries and crashes write goes to the file too.
        os.dup2(file.fileno(), sys.stderr.fileno())
        with redirect_stdout(file):
            try:
                sender.send((True, function(*arguments)))
            except ConfigError as error:
                sender.send((False, str(error)))


def _result(receiver: Connection, process: Any, output: Path) -> Any:
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        process.join()
        lines = output.read_text(errors="replace").splitlines() if output.exists() else []
        raise SimulationError(
            f"a simulating process failed (exit code {process.exitcode}):\n"
            + "\n".join(lines[-_SHOWN_LINES:])
        ) from None
    process.join()
    if not succeeded:
        raise ConfigError(value)
    return value
