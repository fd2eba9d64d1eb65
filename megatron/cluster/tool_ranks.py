"""Starts the other ranks of a tool on this host if the tool was started without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron.child_processes import end_with_parent, python_path
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.exit_status import USER_ERROR_EXIT_CODE, is_own_error, sentence_of
from megatron.cluster.launch import temporary_environment
from megatron.cluster.processes import free_port
from megatron.errors import UserError

# After rank 0 has ended, the other ranks must end within this time.
_GRACE_S = 30.0
# After a user's mistake on another rank, rank 0 prints it within this time.
_REASON_S = 5.0
# After rank 0 has lost the connection to a rank, the exit of that rank is noticed within this time.
_LOST_RANK_S = 2 * _REASON_S
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")


@contextmanager
def start_other_ranks(program: Sequence[str], world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of `world_size` processes in the block; the others run `python *program`.

    Sets the variables of a launcher. The processes share the cores of this host. If another rank fails, this
    process ends with its exit code; if this process ends, the others are ended.
    """
    variables = {
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    if "OMP_NUM_THREADS" not in os.environ:
        count = max(len(os.sched_getaffinity(0)) // world_size, 1)  # a job may have only some of the cores
        variables["OMP_NUM_THREADS"] = str(count)
        torch.set_num_threads(count)  # this process has read the variable already
    # The environment without the variables that a launcher or srun has set for this process alone.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    variables["PYTHONPATH"] = python_path(os.environ)
    with ExitStack() as stack:
        stack.enter_context(temporary_environment({**variables, "RANK": "0", "LOCAL_RANK": "0"}))
        others = [
            subprocess.Popen(
                [sys.executable, *program],
                env={**inherited, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )
            for rank in range(1, world_size)
        ]
        ended = threading.Event()
        threads = [
            threading.Thread(target=_follow, args=(rank, process, ended, others), daemon=True)
            for rank, process in enumerate(others, 1)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, UserError | RunStopped) and not is_own_error(sentence_of(error)):
                time.sleep(_LOST_RANK_S)  # `_follow` names the rank that is lost, and ends this process
            ended.set()
            _end(others)
            raise
        for process in others:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                ended.set()
                process.kill()


def _follow(
    rank: int, process: subprocess.Popen[bytes], ended: threading.Event, others: list[subprocess.Popen[bytes]]
) -> None:
    """Waits for another rank, and ends all processes if it fails, since rank 0 would wait for it. If the rank
    has reported a user's mistake to rank 0, rank 0 first gets time to print it and to exit."""
    code = process.wait()
    if code == 0 or ended.wait(_REASON_S if code == USER_ERROR_EXIT_CODE else 0.0):
        return
    ended.set()
    print(f"error: rank {rank} has ended with exit code {code}", file=sys.stderr, flush=True)
    _end(others)
    os._exit(code if code > 0 else 128 - code)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def _end_with_parent() -> None:
    """Makes this child process end with its parent: the parent ends it after Ctrl-C, and on Linux the kernel
    ends it if the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
