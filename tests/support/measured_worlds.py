"""Processes that stay alive and do named pieces of work on request, so that layouts can take turns.

A benchmark starts itself as a worker with `--worker ...` through `World`, and the worker ends in `serve`.
Each line of its input names work. The answer is the seconds that the work took, or the number that it
returned. Answers go to the stream that `begin_worker` returns.
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


# Environment of processes that are measured on CPUs, also on a machine with an accelerator.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


class World:
    """The processes of one layout, with one thread each."""

    def __init__(
        self,
        script: str,
        worker: str,
        processes: int,
        settings: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
    ) -> None:
        """Starts `script WORDS --worker WORKER` as the ranks of one world. settings: variables in their
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
        """Waits for a line from each process. Returns the lines."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit("a measured process died; its error is above")
        return lines

    def run(self, work: str) -> float:
        """Does the named work. Returns the seconds of the slowest process, or the largest returned number."""
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
    """Returns the configuration of a measured run from its flags and --dry-run, which needs no data."""
    from megatron.arguments import parse_args

    env = {"WORLD_SIZE": str(processes), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    return parse_args(f"--lr 1e-4 --train-iters 1 --dry-run {flags}".split(), env)


def begin_worker() -> TextIO:
    """Begins a worker, before its imports. Binds each of several processes to its own core, and sends what
    libraries print to stderr. Returns the real stdout, for the answers."""
    if int(os.environ["WORLD_SIZE"]) > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    answers, sys.stdout = sys.stdout, sys.stderr
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig

    configure_logging(LoggingConfig())
    return answers


def connect(config: "Config") -> "Mesh":
    """Connects the workers of a world. Returns the mesh of this rank."""
    from megatron.cluster.processes import init_distributed
    from megatron.mpu.mesh import Mesh

    return Mesh.from_config(config.parallel, init_distributed(config)).connect()


def make_engine(
    config: "Config",
    mesh: "Mesh",
    vocab_size: int,
    values: "InitialValues | None" = None,
) -> "GPTEngine":
    """Returns the engine of a rank. values: the initial values (default: the initial values of a run)."""
    from megatron.data.vocabulary import Vocabulary
    from megatron.mpu.parameters import initial_values
    from megatron.optimizer.batch_schedule import BEGIN
    from megatron.run import Run
    from megatron.training.build import build_engine

    run = replace(Run.from_config(config, Vocabulary(vocab_size, 0)), mesh=mesh, _fingerprints={BEGIN: {}})
    return build_engine(run, values or initial_values)


def micro_batches(tokens: "torch.Tensor", mesh: "Mesh", size: int) -> "Iterator[MicroBatch]":
    """Returns the micro-batches of this replica, with `size` samples each. tokens: the tokens of a step,
    [global batch, seq + 1]."""
    from megatron.data.loader import MicroBatch

    for first in range(mesh.dp.rank * size, len(tokens), mesh.dp_size * size):
        yield MicroBatch.from_rows(tokens[first : first + size], first)


def serve(work: Callable[[str], object], answers: TextIO) -> None:
    """Does the work that each line of the input names. Prints the seconds that it took, or its result."""
    for line in sys.stdin:
        start = time.perf_counter()
        found = work(line.strip())
        seconds = time.perf_counter() - start
        print(found if isinstance(found, float) else seconds, file=answers, flush=True)
