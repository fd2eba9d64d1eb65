"""Processes that stay alive and do named pieces of work on request, so that layouts can take turns.

A benchmark starts itself again with `--worker ...` through `World`; the worker ends in `serve`. Each line of
its input names work; the answer is the seconds that it took, or the number that it returned. Answers
go to the stream that `redirect_stdout` returns.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from megatron.testing.forked import launch_variables
from megatron.testing.ports import free_ports

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.model.pipeline_module import GPTModelPipe


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

    def start(self, work: str) -> None:
        for process in self.processes:
            process.stdin.write(work + "\n")
            process.stdin.flush()

    def seconds(self) -> float:
        """Waits for the work. Returns the seconds of the slowest process, or the largest number returned."""
        answers = [process.stdout.readline() for process in self.processes]
        if not all(answers):
            raise SystemExit("a measured process died; its error is above")
        return max(float(answer) for answer in answers)

    def run(self, work: str) -> float:
        self.start(work)
        return self.seconds()

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


def config_of(flags: str, processes: int = 1) -> "Config":
    """The configuration of a measured run of `processes`, from its flags. It is a dry run's, which
    needs no data."""
    from megatron.config import parse_args

    env = {"WORLD_SIZE": str(processes), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    return parse_args(f"--lr 1e-4 --train-iters 1 --dry-run {flags}".split(), env)


def redirect_stdout() -> TextIO:
    """Redirects stdout to stderr, for what libraries print. Returns the real stdout, for the answers."""
    answers, sys.stdout = sys.stdout, sys.stderr
    return answers


def serve(work: Callable[[str], object], answers: TextIO) -> None:
    """For each line of the input, does the work that it names, and answers with its seconds or its result."""
    for line in sys.stdin:
        start = time.perf_counter()
        found = work(line.strip())
        seconds = time.perf_counter() - start
        print(found if isinstance(found, float) else seconds, file=answers, flush=True)


def make_stage_step(
    model: "GPTModelPipe", first: int, last: int, samples: "torch.Tensor"
) -> Callable[[], None]:
    """One micro-batch, forward and backward, through layers first to last - 1 of a single-process model, and
    the loss behind its last layer.

    samples: token ids, [batch, seq + 1].
    """
    import torch

    with model.fused_head_loss():
        layers = model.functions_before_loss()
    has_loss = last == len(model.forward_funcs)

    def run(begin: int, end: int, x: torch.Tensor) -> torch.Tensor:
        for layer in layers[begin:end]:
            x = layer(x)
        return x

    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    mask = torch.ones(labels.shape)
    with torch.no_grad():
        received = run(0, first, tokens)
        gradient = torch.randn_like(run(first, last, received))

    def step() -> None:
        x = run(first, last, received if first == 0 else received.clone().requires_grad_())
        if has_loss:
            with model.fused_head_loss():
                model.loss(x, (labels, mask)).backward()
        else:
            x.backward(gradient)

    return step
