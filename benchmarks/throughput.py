#!/usr/bin/env python3
"""Measures tokens per second of the trainer's step on two cores, for several layouts.

    python benchmarks/throughput.py     about three minutes

Five rows: one process, DP=2, PP=2 (--partition-method time), TP=2 and --bf16, with one thread and one core
per process. The rows take turns, one step each. Each row is compared with a plain PyTorch eager loop of the
run; --bf16 is compared with fp32. A CPU without bf16 instructions skips --bf16, whose GEMMs would take 30
times as long as fp32. benchmarks/device_throughput.py measures one GPU.

By default, glibc's malloc returns large blocks to the kernel after each use, and the kernel clears them
again. MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ prevent this, which makes all rows and the plain loop
about 9 % faster.
"""

import argparse
import os
import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.machine import benchmark_parser, describe_machine, times_in_turns
from tests.support.measured_worlds import (
    ON_CPU,
    World,
    begin_worker,
    connect,
    make_engine,
    micro_batches,
    serve,
)

if TYPE_CHECKING:
    from benchmarks.plain_model import Model
    from megatron.config import Config

WARM_UP = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
MICRO_BATCH, GLOBAL_BATCH = 2, 8


@dataclass(frozen=True)
class Row:
    """A measured layout. target: the least ratio to the row named `against`."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    precision: str = "fp32"
    against: str = ""
    target: float = 0.0

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data


CPU_ROWS = [
    Row("1 process", against="plain", target=1.28),
    Row("DP=2", data=2, against="plain", target=2.34),
    Row("PP=2", pipeline=2, against="plain", target=1.92),
    Row("TP=2", tensor=2, against="plain", target=1.84),
    Row("--bf16", precision="bf16", against="1 process", target=2.0),
]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps per row (default: 10)")
    parser.add_argument("--worker", metavar="ROW", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(next((row for row in CPU_ROWS if row.name == arguments.worker), None))
        return
    print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = measured_rows()
    print_rows(rows, measure(rows, arguments.rounds))
    if len(rows) < len(CPU_ROWS):
        print("--bf16 was skipped: this CPU has no bf16 instructions")


def measured_model() -> "Model":
    # Late: torch takes seconds to import.
    from benchmarks.plain_model import Model

    return Model(layers=4, hidden=256, heads=8, seq=512, vocab=8192)


def measured_rows() -> list[Row]:
    import torch

    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [row for row in CPU_ROWS if row.precision != "bf16" or has_bf16]


def measure(rows: list[Row], rounds: int) -> dict[str, float]:
    """Returns the median seconds per step of each row, and of 'plain'."""

    worlds = {"plain": World(__file__, "plain", 1, {**MALLOC, **ON_CPU})}
    worlds |= {row.name: World(__file__, row.name, row.processes, {**MALLOC, **ON_CPU}) for row in rows}
    works = {name: partial(world.run, "step") for name, world in worlds.items()}
    times = times_in_turns(works, rounds, WARM_UP)
    for world in worlds.values():
        world.end()
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def print_rows(rows: list[Row], measured: dict[str, float]) -> None:
    tokens = GLOBAL_BATCH * measured_model().seq
    print(f"{'':16} {'tokens/s':>9}  {'ratio':>6} {'target':>6} against")
    print(f"{'plain loop':16} {tokens / measured['plain']:9.0f}")
    for row in rows:
        seconds = measured[row.name]
        ratio = measured[row.against] / seconds
        print(f"{row.name:16} {tokens / seconds:9.0f}  {ratio:6.2f} {row.target:6.2f} {row.against}")


def run_worker(row: Row | None) -> None:
    """Runs a step for each line of the input, and prints its seconds. row: None for the plain loop."""

    answers = begin_worker()
    import torch

    # Late: torch takes seconds to import.
    from benchmarks.plain_model import plain_step
    from megatron.cluster.processes import destroy_distributed

    model, generator = measured_model(), torch.Generator().manual_seed(0)
    batch = torch.randint(0, model.vocab, (GLOBAL_BATCH, model.seq + 1), generator=generator)
    if row is None:
        step = plain_step(model, batch, MICRO_BATCH, "cpu", torch.float32)
        serve(lambda name: [step()], answers)  # a number would replace the seconds
        return
    config = make_config(model, row)
    mesh = connect(config)
    engine = make_engine(config, mesh, model.vocab)

    def own_step(name: str) -> object:
        return engine.train_step(micro_batches(batch, mesh, MICRO_BATCH), GLOBAL_BATCH, 1e-4)

    serve(own_step, answers)
    destroy_distributed()


def make_config(model: "Model", row: Row) -> "Config":
    return model.config(
        f"--partition-method time --micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH} "
        f"--tensor-model-parallel-size {row.tensor} --pipeline-model-parallel-size {row.pipeline} "
        + ("--bf16" if row.precision == "bf16" else ""),
        row.processes,
    )


if __name__ == "__main__":
    main()
