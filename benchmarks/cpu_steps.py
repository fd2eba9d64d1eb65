"""Accuracy of the simulation and of the cost model on this machine: memory and time of eight layouts.

For `benchmarks/planner_accuracy.py --cpu`. The program's engine runs each layout of ROWS in 1 to 4 processes
on CPUs, one thread each, in fp32.

Memory. `simulated` and `planned` are the predicted peaks of a step (the simulated step, and
`megatron.planner`). `measured` is the peak of the resident memory in a step, minus the resident memory before
the model was built. A tiny model is trained first, so that code and buffers of libraries are resident. glibc
keeps freed blocks below a threshold, which it adapts. The benchmark fixes the threshold at 64 KiB from the
start of the process, so that resident memory is what the program holds. (A threshold that is set later has no
effect: new blocks come from the blocks that were kept before.)

Time. `measured` is the CPU time of the main thread in the forward and backward pass of a micro-batch, the
least of STEPS steps. The processes share two cores, so the wall time would include waits for a core and for
other ranks. `predicted` is the cost model of `megatron.planner.step_time` without collectives. The rates of
its device are measured between the layouts: FLOP/s of GEMMs and bytes/s of an addition. Two constants, fitted
on the rows marked with *, are the fractions of these rates that the passes reach.

The imports are local: a worker sets its core and its standard output before it imports libraries.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.child_processes import status_bytes
from megatron.cluster.devices import GPU
from megatron.planner.simulation.passes import Kernel
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
    from megatron.engine.pipeline_engine import GPTEngine
    from megatron.mpu.mesh import Mesh

HIDDEN, SEQ, VOCAB = 512, 256, 8192
STEPS = 3
"""Number of timed steps."""
GOAL = 0.15
MIB = 2**20
_THRESHOLD = 64 * 1024
_MMAP_THRESHOLD, _MMAP_MAX, _TRIM_THRESHOLD = -3, -4, -1
"""Parameters of glibc's mallopt, from malloc.h."""


@dataclass(frozen=True)
class Row:
    """A layout. batch: micro-batch, global batch. fits: whether the constants are fitted on it."""

    name: str
    processes: int
    layers: int
    batch: tuple[int, int]
    more: str = ""
    fits: bool = False

    @property
    def flags(self) -> str:
        micro, all_samples = self.batch
        sizes = f"--num-layers {self.layers} --micro-batch-size {micro} --global-batch-size {all_samples}"
        return f"{sizes} {self.more}"


_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ROWS = (
    Row("1 process", 1, 6, (4, 4), fits=True),
    Row("1 process, recomputed", 1, 6, (8, 8), "--checkpoint-activations"),
    Row("DP 2, ZeRO 1", 2, 6, (4, 8), "--zero-stage 1"),
    Row("TP 2", 2, 8, (4, 4), _TP2),
    Row("PP 2", 2, 8, (4, 8), _PP2),
    Row("PP 4", 4, 12, (2, 8), "--pipeline-model-parallel-size 4", fits=True),
    Row("PP 2, dualpipev", 2, 8, (2, 8), f"{_PP2} --pipeline-schedule dualpipev"),
    Row("TP 2, PP 2, recomputed", 4, 12, (4, 8), f"{_TP2} {_PP2} --checkpoint-activations"),
)


@dataclass(frozen=True)
class Measured:
    """Measurements of one process: bytes, and seconds per micro-batch."""

    pipeline_rank: int
    peak: int
    seconds: float


Rates = Mapping[str, float]
"""Of one thread of this machine: FLOP/s of GEMMs ('products'), bytes/s of an addition ('memory')."""


def compare() -> None:
    """Measures all layouts and prints the tables."""
    measured, rates = [], []
    for index in range(len(ROWS)):
        rates.append(measure_rates())
        measured.append(run_row(index))
    rates.append(measure_rates())
    print(memory_report(measured))
    print()
    print(time_report(measured, rates))


def run_row(index: int) -> list[Measured]:
    """Runs ROWS[index]; returns the measurements of its processes, by rank."""

    world = World(__file__, str(index), ROWS[index].processes, ON_CPU)
    answers = world.answers()
    world.end()
    return [Measured(**json.loads(answer)) for answer in answers]


def make_config(row: Row, hidden: int = HIDDEN, seq: int = SEQ, vocab: int = VOCAB) -> Config:

    return config_of(
        f"--hidden-size {hidden} --num-attention-heads {hidden // 64} --seq-length {seq} "
        f"--max-position-embeddings {seq} --vocab-size {vocab} --hidden-dropout 0 --attention-dropout 0 "
        f"{row.flags}",
        row.processes,
    )


# --- Tables ---


def memory_report(measured: Sequence[Sequence[Measured]]) -> str:
    """Returns a line per row and pipeline rank."""
    # Late: torch and DeepSpeed take seconds to import.
    from megatron.planner.layer_memory import planned_run
    from megatron.planner.memory import plan_memory
    from tests.support.simulation.stages import simulate_stages

    table = [["layout", "rank", "measured MiB", "simulated", "error %", "planned", "error %"]]
    errors: list[float] = []
    for row, processes in zip(ROWS, measured, strict=True):
        config = make_config(row)
        planned = plan_memory(planned_run(config, VOCAB))
        for record, plan in zip(simulate_stages(config), planned, strict=True):
            peak = max(one.peak for one in processes if one.pipeline_rank == record.stage)
            errors.append(record.peak.total / peak - 1)
            cells = [f"{peak / MIB:.0f}"]
            for predicted in (record.peak.total, plan.total):
                cells += [f"{predicted / MIB:.0f}", f"{100 * (predicted / peak - 1):+.1f}"]
            table.append([row.name, str(record.stage), *cells])
    return f"memory\n{format_table(table, left_align=(0,))}\nsimulated: {_summary(errors)}"


def time_report(measured: Sequence[Sequence[Measured]], rates: Sequence[Rates]) -> str:
    """Returns a line per row and pipeline rank."""

    machine = {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}
    fitted = [(row, found) for row, found in zip(ROWS, measured, strict=True) if row.fits]
    achieved = least(partial(_mean_error, fitted, machine), {"products": 0.8, "memory": 0.5})
    spans = {
        name: " to ".join(f"{most(rate[name] for rate in rates) / 1e9:.0f}" for most in (min, max))
        for name in machine
    }
    table = [["layout", "rank", "measured ms", "predicted", "matrix products", "error %"]]
    errors = []
    for row, processes in zip(ROWS, measured, strict=True):
        for rank, (products, other) in enumerate(predicted_seconds(row, machine, achieved)):
            seconds = _seconds(processes, rank)
            error = (products + other) / seconds - 1
            errors += [] if row.fits else [error]
            milliseconds = [f"{1e3 * value:.0f}" for value in (seconds, products + other, products)]
            table.append([row.name + "*" * row.fits, str(rank), *milliseconds, f"{100 * error:+.1f}"])
    return (
        "processor time of a micro-batch\n"
        f"matrix products {spans['products']} GFLOP/s, addition {spans['memory']} GB/s; "
        f"passes reach {achieved['products']:.2f} and {achieved['memory']:.2f} of the medians\n"
        f"{format_table(table, left_align=(0,))}\nwithout the fitted rows: {_summary(errors)}"
    )


def _summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    within = sum(size <= GOAL for size in sizes)
    return (
        f"{len(sizes)} ranks, median {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, "
        f"{within} within {100 * GOAL:.0f} %"
    )


def _seconds(processes: Sequence[Measured], rank: int) -> float:
    """Returns the mean measured seconds of the processes of a pipeline rank."""
    return statistics.fmean(one.seconds for one in processes if one.pipeline_rank == rank)


# --- Prediction ---


def least(cost: Callable[[Mapping[str, float]], float], start: Mapping[str, float]) -> dict[str, float]:
    """Returns the values with the least cost, to 1 %: changes one value at a time, in ever smaller steps."""
    best = dict(start)
    lowest = cost(best)
    for factor in (1.1, 1.03, 1.01):
        improves = True
        while improves:
            improves = False
            for name in best:
                for changed in (best[name] * factor, best[name] / factor):
                    if (found := cost({**best, name: changed})) < lowest:
                        lowest, improves, best[name] = found, True, changed
                        break
    return best


def _mean_error(
    rows: Sequence[tuple[Row, Sequence[Measured]]], machine: Rates, achieved: Mapping[str, float]
) -> float:
    return statistics.fmean(
        abs(sum(parts) / _seconds(processes, rank) - 1)
        for row, processes in rows
        for rank, parts in enumerate(predicted_seconds(row, machine, achieved))
    )


def predicted_seconds(row: Row, machine: Rates, achieved: Mapping[str, float]) -> list[tuple[float, float]]:
    """Returns the predicted seconds of a micro-batch per pipeline rank: (GEMMs, other operations). achieved:
    fractions of the rates for 'products' and 'memory'."""
    # Late: torch and DeepSpeed take seconds to import.
    from megatron.planner.layer_memory import planned_run
    from megatron.planner.network import Network
    from megatron.planner.simulation.stage_costs import stage_costs
    from megatron.planner.step_time import Cluster, stage_times

    class Processor(Cluster):
        """This machine as a device of the cost model."""

        contention = 0.0

        def kernel_seconds(self, kernel: Kernel, dtype: str) -> float:
            products = kernel.flops / (achieved["products"] * machine["products"])
            return products + kernel.bytes / (achieved["memory"] * machine["memory"])

    config = make_config(row)
    run = planned_run(config, VOCAB)
    # Collectives are not counted, so any network is valid.
    device = Processor("", GPU(0, {}, 0.0), Network(1, 1, 1), launch_s=0.0)
    costs = [stage_costs(run, stage) for stage in range(config.parallel.num_stages)]
    times = stage_times(run, costs, device)
    by_rank = [
        [time for time in times if time.rank == rank] for rank in sorted({time.rank for time in times})
    ]
    return [(sum(time.matmul for time in own), sum(time.memory for time in own)) for own in by_rank]


# --- Measurement ---


def measure_rates() -> Rates:
    """Measures the rates of this machine: GEMMs of a layer's MLP, and an addition with its tensors."""
    import torch

    torch.set_num_threads(1)
    tokens = 1024
    x, weight = torch.randn(tokens, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN)
    a, b, out = (torch.randn(tokens, 4 * HIDDEN) for _ in range(3))
    product = _least_time(lambda: torch.mm(x, weight, out=out))
    addition = _least_time(lambda: torch.add(a, b, out=out))
    return {"products": 2 * tokens * HIDDEN * 4 * HIDDEN / product, "memory": 3 * 4 * out.numel() / addition}


def _least_time(work: Callable[[], object], calls: int = 20) -> float:
    """Returns the least CPU seconds of a call."""
    times = []
    for _ in range(calls):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def run_worker(row: Row) -> None:
    """Runs one process of the row: trains, and prints a `Measured` as JSON."""

    answers = begin_worker()
    # Late: torch and DeepSpeed take seconds to import.
    from megatron.cluster.processes import destroy_distributed
    from megatron.engine.pass_times import PassTimes

    class ProcessorTimes(PassTimes):
        """Times passes in the CPU time of this thread."""

        @contextmanager
        def measure(self) -> Iterator[None]:
            start = time.thread_time()
            yield
            self._passes.append((start, time.thread_time()))

    config = make_config(row)
    mesh = connect(config)
    _mallopt(_MMAP_THRESHOLD, _THRESHOLD)
    make_step(make_config(row, 128, 32, 256), mesh, 256)[1]()
    before = trimmed_resident_bytes()
    engine, step = make_step(config, mesh, VOCAB)
    step()
    step()
    trimmed_resident_bytes()
    step()
    peak = status_bytes("VmHWM") - before
    # From here on freed memory is kept, as a GPU's allocator does.
    _mallopt(_MMAP_MAX, 0)
    _mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    step()
    engine.pass_times = ProcessorTimes()
    busy = []
    for _ in range(STEPS):
        step()
        busy.append(engine.pass_times.busy_and_span()[0])
    seconds = min(busy) / engine.micro_batches
    found = Measured(mesh.pp.rank, peak, seconds)
    print(json.dumps(vars(found)), file=answers, flush=True)
    destroy_distributed()


def make_step(config: Config, mesh: Mesh, vocab_size: int) -> tuple[GPTEngine, Callable[[], object]]:
    """Returns the engine of this rank, and its training step on random tokens."""
    import torch

    engine = make_engine(config, mesh, vocab_size)
    samples, size = config.batch.global_batch_size, config.batch.micro_batch_size
    tokens = torch.randint(
        0, vocab_size, (samples, config.model.seq_length + 1), generator=torch.Generator().manual_seed(0)
    )
    return engine, lambda: engine.train_step(micro_batches(tokens, mesh, size), samples, 1e-4)


def trimmed_resident_bytes() -> int:
    """Returns the resident memory of this process, after glibc has returned free memory. Resets the peak."""

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def _mallopt(parameter: int, value: int) -> None:
    if ctypes.CDLL(None).mallopt(parameter, value) != 1:
        raise SystemExit(f"mallopt({parameter}, {value}) failed: the benchmark needs glibc")


if __name__ == "__main__":  # a process of `World`
    if not sys.argv[1:] or not sys.argv[1].startswith("--worker="):
        sys.exit("cpu_steps.py is a part of planner_accuracy.py: run planner_accuracy.py --cpu")
    run_worker(ROWS[int(sys.argv[1].removeprefix("--worker="))])
