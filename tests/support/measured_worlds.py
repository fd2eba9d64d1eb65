"""Processes that stay alive and do named pieces of work on request, so that layouts can take turns.

A benchmark starts itself again with `--worker ...` through `World`; the worker ends in `serve`. Each line of
its input names work; the answer is the seconds that it took, or the number that it returned. Answers
go to the stream that `begin_worker` returns.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from tests.support.forked import launch_variables
from tests.support.ports import free_ports

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data.loader import MicroBatch
    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.mpu.mesh import Mesh
    from megatron.mpu.parameters import InitialValues


# In the environment of processes that are measured on CPUs, on a machine with an accelerator too.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


class World:
    """The processes of one layout, one thread each."""

    def __init__(
        self,
        script: str,
        worker: str,
        processes: int,
        settings: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
    ) -> None:
        """Starts `script WORDS --worker WORKER` as the ranks of one world, with `settings` in their
        environment."""
        (port,) = free_ports(1)
        command = [sys.executable, script, *words, f"--worker={worker}"]
        self.processes = []
        for rank in range(processes):
            environment = {**os.environ, **(settings or {}), "OMP_NUM_THREADS": "1"}
            environment |= launch_variables(rank, processes, port)
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )

    def answers(self) -> list[str]:
        """Waits for a line from each process."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit("a measured process died; its error is above")
        return lines

    def run(self, work: str) -> float:
        """Does the named work. Returns the seconds of the slowest process, or the largest number returned."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(work + "\n")
            process.stdin.flush()
        return max(map(float, self.answers()))

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()


def config_of(flags: str, processes: int = 1) -> "Config":
    """The configuration of a measured run, from its flags and --dry-run: it needs no data."""
    from megatron.arguments import parse_args

    env = {"WORLD_SIZE": str(processes), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    return parse_args(f"--lr 1e-4 --train-iters 1 --dry-run {flags}".split(), env)


def begin_worker() -> TextIO:
    """The start of a worker, before its imports: of several processes each is bound to its own core, and what
    libraries print goes to stderr. Returns the real stdout, for the answers."""
    if int(os.environ["WORLD_SIZE"]) > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    answers, sys.stdout = sys.stdout, sys.stderr
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig

    configure_logging(LoggingConfig())
    return answers


def connect(config: "Config") -> "Mesh":
    """Connects the workers of a world; returns the mesh of this rank."""
    from megatron.cluster.processes import init_distributed
    from megatron.mpu.mesh import Mesh

    return Mesh.from_config(config.parallel, init_distributed(config)).connect()


def make_engine(
    config: "Config",
    mesh: "Mesh",
    vocab_size: int,
    values: "InitialValues | None" = None,
) -> "GPTEngine":
    """Returns the engine of a rank. values: the initial values (default: those of a run)."""
    from megatron.data.vocabulary import Vocabulary
    from megatron.mpu.parameters import initial_values
    from megatron.optimizer.batch_schedule import BEGIN
    from megatron.run import Run
    from megatron.training.build import build_engine

    run = replace(Run.from_config(config, Vocabulary(vocab_size, 0)), mesh=mesh, _fingerprints={BEGIN: {}})
    return build_engine(run, values or initial_values)


def micro_batches(tokens: "torch.Tensor", mesh: "Mesh", size: int) -> "Iterator[MicroBatch]":
    """The micro-batches of this replica, `size` samples each, from the tokens of a step,
    [global batch, seq + 1]."""
    from megatron.data.loader import MicroBatch

    for first in range(mesh.dp.rank * size, len(tokens), mesh.dp_size * size):
        yield MicroBatch.from_rows(tokens[first : first + size], first)


def serve(work: Callable[[str], object], answers: TextIO) -> None:
    """Does the work that each line of the input names, and prints its seconds or its result."""
    for line in sys.stdin:
        start = time.perf_counter()
        found = work(line.strip())
        seconds = time.perf_counter() - start
        print(found if isinstance(found, float) else seconds, file=answers, flush=True)
