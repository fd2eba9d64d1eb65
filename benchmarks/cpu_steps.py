"""Compares the planned memory of eight layouts with the memory that is measured on this machine.

`benchmarks/planner_accuracy.py --cpu` uses this module. The program's engine runs each layout of ROWS in fp32
in 1 to 4 processes on CPUs, with one thread per process.

`simulated` and `planned` are the predicted peaks of a step (the simulated step, and `megatron.planner`).
`measured` is the peak of the resident memory in a step, minus the resident memory before the model was built.
A tiny model is trained first, so that the code and the buffers of libraries are already resident. glibc keeps
freed blocks below a threshold, which it adapts. The benchmark sets the threshold to 64 KiB at the start of
the process, so that the resident memory is the memory that the program holds. (A threshold that is set later
has no effect, because new blocks come from the blocks that glibc has kept.)

The imports are inside functions, because a worker sets its core and its standard output before it imports
libraries.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.child_processes import status_bytes
from megatron.text_table import format_table
from tests.support.measured_worlds import (
    ON_CPU,
    World,
    begin_worker,
    config_of,
    connect,
    make_engine,
    micro_batches,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.mpu.mesh import Mesh

HIDDEN, SEQ, VOCAB = 512, 256, 8192
GOAL = 0.15
MIB = 2**20
_THRESHOLD = 64 * 1024
_MMAP_THRESHOLD = -3
"""Parameter of glibc's mallopt, from malloc.h."""


@dataclass(frozen=True)
class Row:
    """A layout. batch: (micro-batch size, global batch size)."""

    name: str
    processes: int
    layers: int
    batch: tuple[int, int]
    more: str = ""

    @property
    def flags(self) -> str:
        micro, all_samples = self.batch
        sizes = f"--num-layers {self.layers} --micro-batch-size {micro} --global-batch-size {all_samples}"
        return f"{sizes} {self.more}"


_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ROWS = (
    Row("1 process", 1, 6, (4, 4)),
    Row("1 process, recomputed", 1, 6, (8, 8), "--checkpoint-activations"),
    Row("DP 2, ZeRO 1", 2, 6, (4, 8), "--zero-stage 1"),
    Row("TP 2", 2, 8, (4, 4), _TP2),
    Row("PP 2", 2, 8, (4, 8), _PP2),
    Row("PP 4", 4, 12, (2, 8), "--pipeline-model-parallel-size 4"),
    Row("PP 2, dualpipev", 2, 8, (2, 8), f"{_PP2} --pipeline-schedule dualpipev"),
    Row("TP 2, PP 2, recomputed", 4, 12, (4, 8), f"{_TP2} {_PP2} --checkpoint-activations"),
)


def compare() -> None:
    """Measures all layouts and prints the table."""
    print(memory_report([run_row(index) for index in range(len(ROWS))]))


def run_row(index: int) -> list[tuple[int, int]]:
    """Runs ROWS[index], and returns (pipeline rank, peak in bytes) of each of its processes."""
    world = World(__file__, str(index), ROWS[index].processes, ON_CPU)
    answers = world.answers()
    world.end()
    return [(int(rank), int(peak)) for rank, peak in map(str.split, answers)]


def make_config(row: Row, hidden: int = HIDDEN, seq: int = SEQ, vocab: int = VOCAB) -> Config:
    return config_of(
        f"--hidden-size {hidden} --num-attention-heads {hidden // 64} --seq-length {seq} "
        f"--max-position-embeddings {seq} --vocab-size {vocab} --hidden-dropout 0 --attention-dropout 0 "
        f"{row.flags}",
        row.processes,
    )


def memory_report(measured: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Returns a line per row and pipeline rank."""
    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.planner.layer_memory import planned_run
    from megatron.planner.memory import plan_memory
    from tests.support.simulation.stages import simulate_stages

    table = [["layout", "rank", "measured MiB", "simulated", "error %", "planned", "error %"]]
    errors: list[float] = []
    for row, processes in zip(ROWS, measured, strict=True):
        config = make_config(row)
        planned = plan_memory(planned_run(config, VOCAB))
        for record, plan in zip(simulate_stages(config), planned, strict=True):
            peak = max(peak for rank, peak in processes if rank == record.stage)
            errors.append(record.peak.total / peak - 1)
            cells = [f"{peak / MIB:.0f}"]
            for predicted in (record.peak.total, plan.total):
                cells += [f"{predicted / MIB:.0f}", f"{100 * (predicted / peak - 1):+.1f}"]
            table.append([row.name, str(record.stage), *cells])
    sizes = [abs(error) for error in errors]
    within = sum(size <= GOAL for size in sizes)
    return (
        f"memory\n{format_table(table, left_align=(0,))}\nsimulated: {len(sizes)} ranks, median "
        f"{100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, {within} within "
        f"{100 * GOAL:.0f} %"
    )


def run_worker(row: Row) -> None:
    """Runs one process of the row: trains, and prints its pipeline rank and its peak."""
    answers = begin_worker()
    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.cluster.processes import destroy_distributed

    config = make_config(row)
    mesh = connect(config)
    if ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD) != 1:
        raise SystemExit("the benchmark needs glibc, whose threshold it sets")
    make_step(make_config(row, 128, 32, 256), mesh, 256)()
    before = trimmed_resident_bytes()
    step = make_step(config, mesh, VOCAB)
    step()
    step()
    trimmed_resident_bytes()
    step()
    peak = status_bytes("VmHWM") - before
    print(mesh.pp.rank, peak, file=answers, flush=True)
    destroy_distributed()


def make_step(config: Config, mesh: Mesh, vocab_size: int) -> Callable[[], object]:
    """Returns the training step of this rank on random tokens."""
    import torch

    engine = make_engine(config, mesh, vocab_size)
    samples, size = config.batch.global_batch_size, config.batch.micro_batch_size
    tokens = torch.randint(
        0, vocab_size, (samples, config.model.seq_length + 1), generator=torch.Generator().manual_seed(0)
    )
    return lambda: engine.train_step(micro_batches(tokens, mesh, size), samples, 1e-4)


def trimmed_resident_bytes() -> int:
    """Returns the resident memory of this process, after glibc has returned free memory. Resets the peak."""

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


if __name__ == "__main__":  # a process of `World`
    if not sys.argv[1:] or not sys.argv[1].startswith("--worker="):
        sys.exit("cpu_steps.py is a part of planner_accuracy.py: run planner_accuracy.py --cpu")
    run_worker(ROWS[int(sys.argv[1].removeprefix("--worker="))])
