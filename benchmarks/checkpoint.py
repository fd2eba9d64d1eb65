#!/usr/bin/env python3
"""Speed of converting checkpoints, compared with DeepSpeed's converter, and of loading them on a new layout.

    python benchmarks/checkpoint.py                 three sizes; some minutes and 12 GB of disk
    python benchmarks/checkpoint.py --sizes 12      only the largest size

Conversion to the universal format. Two processes (TP=2, ZeRO-1) save a checkpoint with the trainer's engine:
L layers, hidden 1024, vocabulary 50,257 (padded to 50,432), Adam, fp32. No step is trained; the moments are
filled with numbers. deepspeed/checkpoint/ds_to_universal.py and tools/ds_to_universal.py convert the
checkpoint in turns, as commands, with equal numbers of workers.

Every figure is for a complete command, imports included. CPU seconds are summed over all processes of a
command; they depend less on other load. Memory is the largest sum of resident memory over a command's
processes (shared pages count in each process), sampled every 10 ms. The files of both converters are
compared before they are deleted.

Direct load. Two pipeline stages (TP=1) load this checkpoint without conversion. 'read': plain reads of as
many bytes as a rank needs; 'load': values and moments are restored; 'verify': the integrity record is
recomputed after the load; 'check': the SHA-256 of all files, before the load. The files are in the page
cache. Memory: the peak growth of a rank's anonymous memory during the load; in brackets its bound, the size
of the rank's moments and the largest parameter.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import benchmark_parser, describe_machine, peak_bytes_of
from benchmarks.saves import BLOOM_BYTES, FOLDER, SEQ, TENSOR, VOCAB, Saver, print_saves

ROOT = Path(__file__).resolve().parent.parent
if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine

HIDDEN, HEADS = 1024, 16
# For an estimate of a conversion.
BLOOM_NODES = 24
SIZES = (3, 6, 12)
TABLES = ("saves", "conversion", "load")
MEMORY_FILE = "memory"


@dataclass
class Measured:
    """Seconds, CPU seconds and peak bytes of each run of a converter."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each converter per size (default: 3)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of layers")
    parser.add_argument("--workers", type=int, default=2, help="workers of each converter (default: 2)")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all")
    parser.add_argument("--worker", metavar="LAYERS,LAYOUT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        layers, layout = arguments.worker.split(",")
        run_worker(int(layers), layout)
        return
    print(describe_machine(), flush=True)
    if "saves" in arguments.tables:
        print_saves(__file__, arguments.sizes[len(arguments.sizes) // 2], arguments.rounds)
    if "conversion" in arguments.tables:
        conversion(arguments.sizes, arguments.rounds, arguments.workers)
    if "load" in arguments.tables:
        direct_load(arguments.sizes, arguments.rounds)


def direct_load(sizes: list[int], rounds: int) -> None:
    """Prints the table of loads on a layout different from the saved one."""
    from tests.support.measured_worlds import World

    print(
        f"\ndirect load, saved with TP=2 ZeRO-1, loaded with PP=2, seconds of the slower rank, median of "
        f"{rounds}"
    )
    print(
        f"{'layers':>6} {'GB':>5}  {'read':>6} {'load':>6} {'ratio':>6}  {'verify':>6} {'check':>6}  "
        "memory MB"
    )
    for layers in sizes:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=os.environ.get("TMPDIR")) as folder:
            source = make_checkpoint(Path(folder), layers)
            size_bytes = sum(path.stat().st_size for path in source.glob("*_optim_states.pt"))
            world = World(__file__, f"{layers},pp2", 2, {FOLDER: folder})
            times: dict[str, list[float]] = {work: [] for work in ("read", "load", "verify", "check")}
            # Reads and loads alternate without pauses: the host of a virtual machine takes back memory that
            # is free for seconds, and then the page faults of the next work take longer than the work.
            for works in (("read", "load"), ("verify", "check")):
                for work in works:  # once to warm up
                    world.run(work)
                for _ in range(rounds):
                    for work in works:
                        times[work].append(world.run(work))
            world.end()
            memory = ", ".join(path.read_text() for path in sorted(Path(folder).glob(f"{MEMORY_FILE}-*")))
        read, load, verify, check = (statistics.median(seconds) for seconds in times.values())
        print(
            f"{layers:6} {size_bytes / 1e9:5.2f}  {read:6.2f} {load:6.2f} {load / read:6.2f}  "
            f"{verify:6.2f} {check:6.2f}  {memory}",
            flush=True,
        )


def conversion(sizes: list[int], rounds: int, workers: int) -> None:
    """Prints the table of conversions, and an estimate for a checkpoint of BLOOM's size."""
    print(f"\nconversion to universal, {workers} workers each, median of {rounds}")
    print(f"{'':12}  {'seconds':23}  {'processor seconds':23}  peak MB")
    columns = f"{'theirs':>7} {'ours':>7} {'ratio':>7}"
    print(f"{'layers':>6} {'GB':>5}  {columns}  {columns}  {'theirs':>6} {'ours':>6}")
    rates = []
    for layers in sizes:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=os.environ.get("TMPDIR")) as folder:
            source = make_checkpoint(Path(folder), layers)
            theirs, ours, size_bytes = convert_in_turns(source, Path(folder), rounds, workers)
        times = "  ".join(
            f"{one:7.2f} {other:7.2f} {one / other:7.1f}"
            for one, other in (
                (statistics.median(theirs.seconds), statistics.median(ours.seconds)),
                (statistics.median(theirs.cpu_s), statistics.median(ours.cpu_s)),
            )
        )
        peaks = " ".join(f"{max(one.peaks) / 1e6:6.0f}" for one in (theirs, ours))
        print(f"{layers:6} {size_bytes / 1e9:5.2f}  {times}  {peaks}", flush=True)
        rates.append((size_bytes, statistics.median(ours.seconds)))
    print_estimate(rates, workers)


def print_estimate(rates: list[tuple[int, float]], workers: int) -> None:
    """Prints an estimate for 2.3 TB on one node, and on 24 nodes that divide the parameters."""
    size_bytes, seconds = max(rates)
    rate = size_bytes / seconds
    print(
        f"at {rate / 1e9:.2f} GB/s (the largest size), one command with {workers} workers converts "
        f"{BLOOM_BYTES / 1e12} TB in {BLOOM_BYTES / rate / 60:.0f} minutes.\n"
        f"If each of {BLOOM_NODES} nodes converted a part of the parameters, and their shared file system "
        f"read and wrote {BLOOM_NODES * rate / 1e9:.0f} GB/s:\n{BLOOM_BYTES / rate / BLOOM_NODES / 60:.1f} "
        "minutes. The tasks of one srun command share out the parameters; this measurement ran one task."
    )


def make_checkpoint(folder: Path, layers: int) -> Path:
    """Writes a native checkpoint with two processes (TP=2, ZeRO-1); returns its folder."""
    from tests.support.measured_worlds import World

    world = World(__file__, f"{layers},tp2", TENSOR, {FOLDER: str(folder)})
    world.run("save")
    world.end()
    return folder / "global_step1"


def run_worker(layers: int, layout_name: str) -> None:
    """Runs one rank: layout 'tp2' saves a checkpoint on request, layout 'pp2' reads and loads it."""
    from tests.support.measured_worlds import begin_worker, connect, make_engine, serve

    answers = begin_worker()
    import torch

    from megatron.cluster.processes import destroy_distributed

    config = make_config(layers, layout_name)
    engine = make_engine(config, connect(config), VOCAB)
    if layout_name == "pp2":
        serve(Loader(engine, Path(os.environ[FOLDER])).do, answers)
    else:
        for flat in engine.optimizer.flat:
            moments = {"exp_avg": flat.master.detach() * 0.1, "exp_avg_sq": flat.master.detach().square()}
            engine.optimizer.optimizer.state[flat.master] = {"step": torch.tensor(1.0), **moments}
        serve(Saver(engine, Path(os.environ[FOLDER])).do, answers)
    destroy_distributed()


class Loader:
    """One rank that loads the checkpoint in a folder."""

    def __init__(self, engine: "GPTEngine", folder: Path) -> None:
        from megatron.checkpoint.discovery import find_latest

        self.engine = engine
        self.folder = folder
        self.checkpoint = find_latest(folder)
        self.needed_bytes = 12 * sum(parameter.numel() for parameter in engine.optimizer.parameters)

    def do(self, work: str) -> None:
        """Does the work 'read', 'load', 'verify' or 'check'."""
        from megatron.checkpoint.formats.registry import open_reader
        from megatron.checkpoint.integrity import verify_loaded_state
        from megatron.checkpoint.ranks import first_problem

        if work == "read":
            self.read()
        elif work == "load":
            self.load()
        elif work == "verify":
            verify_loaded_state(self.engine, self.checkpoint, "not compared", {})
        else:
            reader = open_reader(self.checkpoint)
            if problem := first_problem(reader.files_to_verify(), reader.file_problem):
                raise SystemExit(problem)

    def read(self) -> None:
        """Reads as many bytes as this rank needs."""
        import numpy as np

        target = memoryview(np.empty(self.needed_bytes, dtype=np.uint8))
        filled = 0
        while filled < self.needed_bytes:
            for path in sorted(self.checkpoint.folder.glob("*_optim_states.pt")):
                with open(path, "rb", buffering=0) as file:
                    while count := file.readinto(target[filled : filled + (1 << 26)]):
                        filled += count

    def load(self) -> None:
        """Restores values and moments, and records the growth of memory."""
        from megatron.checkpoint.formats.registry import open_reader

        optimizer = self.engine.optimizer
        optimizer.optimizer.state.clear()
        with AnonymousMemory() as memory:
            optimizer.read_by_name(open_reader(self.checkpoint).read_parameter, None, with_moments=True)
            optimizer.exchange_loaded()
        bound = self.needed_bytes * 2 / 3 + 4 * VOCAB * HIDDEN
        note = self.folder / f"{MEMORY_FILE}-{self.engine.global_rank}"
        note.write_text(f"{memory.growth_bytes / 1e6:.0f} ({bound / 1e6:.0f})")


class AnonymousMemory:
    """Peak growth of this process's anonymous memory, sampled every few ms."""

    def __enter__(self) -> "AnonymousMemory":
        self.before = self.peak = self.now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.peak = max(self.peak, self.now())

    @property
    def growth_bytes(self) -> int:
        return self.peak - self.before

    def watch(self) -> None:
        while not self.over.wait(0.005):
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        from megatron.child_processes import status_bytes

        return status_bytes("RssAnon")


def make_config(layers: int, layout_name: str):
    from tests.support.measured_worlds import config_of

    layout = (
        f"--tensor-model-parallel-size {TENSOR}"
        if layout_name == "tp2"
        else "--pipeline-model-parallel-size 2"
    )
    return config_of(
        f"--num-layers {layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} "
        f"--max-position-embeddings {SEQ} --micro-batch-size 1 --global-batch-size 2 --zero-stage 1 {layout}",
        2,
    )


def convert_in_turns(source: Path, folder: Path, rounds: int, workers: int) -> tuple[Measured, Measured, int]:
    """Returns the measurements of DeepSpeed's converter and of this one, and the checkpoint's bytes."""
    flags = ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    converters = {
        "theirs": [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *flags],
        "ours": [sys.executable, str(ROOT / "tools" / "ds_to_universal.py"), *flags],
    }
    measured = {name: Measured() for name in converters}
    for _ in range(rounds):
        for name, command in converters.items():
            seconds, cpu_s, peak = run(
                [*command, "--input_folder", str(source), "--output_folder", str(folder / name)]
            )
            measured[name].seconds.append(seconds)
            measured[name].cpu_s.append(cpu_s)
            measured[name].peaks.append(peak)
        size_bytes = compare(folder / "theirs" / "zero", folder / "ours" / "zero")
        for name in converters:
            shutil.rmtree(folder / name)
    return measured["theirs"], measured["ours"], size_bytes


def run(command: list[str]) -> tuple[float, float, int]:
    """Runs a command; returns its wall seconds, and CPU seconds and peak memory summed over its processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start, before = time.perf_counter(), os.times()
    peak = peak_bytes_of(command, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu_s, peak


def compare(theirs: Path, ours: Path) -> int:
    """Returns the bytes of the parameters' files. Exits the program if a tensor differs between the two."""
    import torch

    size_bytes = 0
    for path in sorted(theirs.glob("*/*.pt")):
        expected, found = (
            torch.load(side, mmap=True, weights_only=True) for side in (path, ours / path.relative_to(theirs))
        )
        pairs = (
            [(expected, found)]
            if path.name == "step.pt"
            else [(expected[key], found[key]) for key in expected]
        )
        if not all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in pairs):
            raise SystemExit(f"{path.relative_to(theirs)} differs")
        size_bytes += path.stat().st_size
    return size_bytes


if __name__ == "__main__":
    main()
