"""Forks processes from a process that has imported torch, DeepSpeed and this package.

A start of `python pretrain_gpt.py` takes seconds of processor time before its own first line, mostly for
imports. The tests start it hundreds of times. Tests that are not about the start itself use `run_script`.
"""

from __future__ import annotations

import atexit
import gc
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
from typing import Any, BinaryIO

from megatron.cluster.launch import temporary_environment
from tests.support import HANG_TIMEOUT_S
from tests.support.ports import free_ports

# Environment of the process that imports, and of the processes that are forked from it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
# The modules that most tests and runs import.
_IMPORTED_ONCE = [
    "torch",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.utils.pin_memory",
    "s3fs",
    "megatron.checkpoint.manager",
    "megatron.engine.pipeline_engine",
    "megatron.pipeline.stages",
    "megatron.training.run",
    "megatron.training.trainer",
    "pytest",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers",
]
# Seconds that the ranks have to end after one of them has failed and the others got SIGTERM, as under torch's
# launcher.
_GRACE_S = 30.0
# Seconds between two reads of the ranks' output, if a test follows it.
_LOOK_S = 0.02

# (line of stdout, process ids of the ranks) -> input of the ranks.
OnLine = Callable[[str, list[int]], bytes]


@dataclass(frozen=True)
class Ended:
    """The result of a script that has ended. exit_codes: exit code of each rank, negative for a signal, as in
    subprocess."""

    exit_codes: list[int]
    stdout: str
    stderr: str


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts a process that runs `function(*args)`. The function must be importable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with temporary_environment(ENVIRONMENT):
        process = context.Process(target=_call, args=(function, *args), daemon=False)
        process.start()
    return process


def _call(function: Callable[..., None], *args: Any) -> None:
    """Runs the function in the new process."""
    # Imported modules are never garbage. Without this call, a collection looks at 200,000 objects for 0.25 s,
    # and copies their memory pages, which the processes share.
    gc.freeze()
    function(*args)


def run_script(
    script: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
    processes: int,
    on_line: OnLine | None = None,
) -> Ended:
    """Runs `python -u SCRIPT FLAGS` in the working directory as the ranks 0 .. processes - 1 of one launch.
    With `processes` 0 it runs one process without a launcher's variables.

    After a rank has failed, the other ranks are ended, as by torch's launcher and by srun. Ranks that hang
    are killed. on_line: called with each line of stdout and the process ids by rank. Its result is the input
    of the ranks.
    """
    (port,) = free_ports(1)
    ranks: list[BaseProcess] = []
    with TemporaryDirectory() as folder:
        os.mkfifo(Path(folder, "stdin"))
        with open(os.open(Path(folder, "stdin"), os.O_RDWR), "wb", buffering=0) as answers:
            try:
                for rank in range(max(processes, 1)):
                    variables = dict(environment)
                    if processes:
                        variables |= launch_variables(rank, processes, port)
                    ranks.append(start(_run_script, str(script), list(flags), variables, folder))
                lines = on_line and _Lines(Path(folder, "stdout"), ranks, on_line, answers)
                _wait(ranks, lines.look if lines else None)
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
        texts = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        codes = [rank.exitcode for rank in ranks]
    return Ended([code for code in codes if code is not None], *texts)


def launch_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Returns the variables that a launcher sets for a rank of a world on this machine."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


class _Lines:
    """Reads the lines that the ranks write to a file, while they are written."""

    def __init__(self, file: Path, ranks: Sequence[BaseProcess], on_line: OnLine, answers: BinaryIO) -> None:
        self._file, self._ranks, self._on_line, self._answers = file, ranks, on_line, answers
        self._seen = 0

    def look(self) -> None:
        """Handles the complete lines that were written since the last call."""
        text = self._file.read_bytes() if self._file.exists() else b""
        end = text.rfind(b"\n") + 1
        new, self._seen = text[self._seen : end], max(self._seen, end)
        for line in new.decode().splitlines():
            self._answers.write(self._on_line(line, [rank.pid or 0 for rank in self._ranks]))


def _wait(ranks: Sequence[BaseProcess], look: Callable[[], None] | None) -> None:
    """Waits until all processes have ended. look: called repeatedly until then, and once at the end."""
    deadline = time.monotonic() + HANG_TIMEOUT_S
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        left = max(deadline - time.monotonic(), 0.0)
        ended = wait(list(running), left if look is None else min(left, _LOOK_S))
        if look is not None:
            look()
        if not ended and time.monotonic() >= deadline:
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
    """Runs the script in the new process."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.dup2(os.open(os.path.join(folder, "stdin"), os.O_RDONLY | os.O_NONBLOCK), 0)
    os.set_blocking(0, True)
    sys.argv = [script, *flags]
    sys.path.insert(0, os.path.dirname(script))  # as Python does
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        # multiprocessing ends its processes without exit functions.
        atexit._run_exitfuncs()
