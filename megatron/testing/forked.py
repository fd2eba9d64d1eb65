"""Processes that are forked from one that has imported torch, DeepSpeed and this package.

A start of `python pretrain_gpt.py` takes seconds of processor time before its first own line, most of it for
imports. The tests start it hundreds of times; those that are not about the start itself use `run_script`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.cluster.launch import temporary_environment
from megatron.testing.ports import free_ports

# Of the process that imports, and of those that are forked from it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
# What most tests and runs import.
_IMPORTED_ONCE = [
    "torch",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "megatron.checkpoint.manager",
    "megatron.engine.pipeline_engine",
    "megatron.planner.stages",
    "megatron.training.run",
    "megatron.training.trainer",
]
# Seconds that the ranks have to end once one of them has failed and they got SIGTERM, as torch's launcher.
_GRACE_S = 30.0


@dataclass(frozen=True)
class Ended:
    """The ranks of a script that has ended. exit_codes: by rank, negative for a signal, as of subprocess."""

    exit_codes: list[int]
    stdout: str
    stderr: str


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs `function(*args)`, which must be importable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with temporary_environment(ENVIRONMENT):
        process = context.Process(target=function, args=args, daemon=False)
        process.start()
    return process


def run_script(
    script: Path, flags: Sequence[str], environment: Mapping[str, str], processes: int, timeout: float
) -> Ended:
    """Runs `python -u SCRIPT FLAGS` in the folder of the script as the ranks 0 .. processes - 1 of one
    launch, or, if `processes` is 0, without a launcher's variables.

    Once a rank has failed, the others are ended, as by torch's launcher and by srun. Ranks that have not
    ended after `timeout` seconds are killed.
    """
    port = str(free_ports(1)[0])
    with TemporaryDirectory() as folder:
        ranks = []
        for rank in range(max(processes, 1)):
            variables = dict(environment)
            if processes:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                variables |= {"LOCAL_WORLD_SIZE": str(processes)}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(start(_run_script, str(script), list(flags), variables, folder))
        _wait(ranks, timeout)
        texts = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        codes = [rank.exitcode for rank in ranks]
    return Ended([code for code in codes if code is not None], *texts)


def _wait(ranks: Sequence[BaseProcess], timeout: float) -> None:
    """Returns when all have ended."""
    deadline = time.monotonic() + timeout
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), max(deadline - time.monotonic(), 0.0))
        if not ended:
            for rank in running.values():
                rank.kill()
        for sentinel in ended:
            rank = running.pop(int(sentinel))  # type: ignore[call-overload]
            rank.join()
            if rank.exitcode and time.monotonic() + _GRACE_S < deadline:
                deadline = time.monotonic() + _GRACE_S
                for other in running.values():
                    other.terminate()


def _run_script(script: str, flags: list[str], environment: Mapping[str, str], folder: str) -> None:
    """In the new process."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(os.path.dirname(script))
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        # multiprocessing ends its processes without this.
        atexit._run_exitfuncs()
