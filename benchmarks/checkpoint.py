#!/usr/bin/env python3
"""Measures the times of saving checkpoints, and of loading them on a new layout.

    python benchmarks/checkpoint.py                 three sizes; some minutes and 6 GB of disk
    python benchmarks/checkpoint.py --sizes 12      only the largest size

Two processes (TP=2, ZeRO-1) save a checkpoint with the trainer's engine: L layers, hidden 1024, vocabulary
50,257 (padded to 50,432), Adam, fp32; the moments are filled with numbers. benchmarks/conversion.py converts
such checkpoints.

Saves. In turns, the processes save while training waits, save in the background, and save with
torch.distributed.checkpoint.save.

Direct load. Two pipeline stages (TP=1) load this checkpoint without conversion. 'read' reads as many bytes as
a rank needs; 'load' restores values and moments; 'verify' recomputes the integrity record after the load;
'check' computes the SHA-256 of all files before the load. The files are in the page cache. 'memory' is the
peak growth of a rank's anonymous memory during the load; the number in brackets is its bound, the size of the
rank's moments and the largest parameter.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import benchmark_parser, describe_machine, sampled, times_in_turns
from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.record import TrainingState
from megatron.child_processes import io_bytes, status_bytes
from tests.support.measured_worlds import (
    World,
    begin_worker,
    config_of,
    connect,
    make_engine,
    micro_batches,
    serve,
)

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.engine.pipeline_engine import GPTEngine

HIDDEN, HEADS, VOCAB, SEQ, TENSOR = 1024, 16, 50257, 128, 2
SIZES = (3, 6, 12)
TABLES = ("saves", "load")
FOLDER = "BENCHMARK_FOLDER"
"""Name of the environment variable with the folder of a worker's checkpoints."""
MEMORY_FILE = "memory"
STEPS_DURING_SAVE = 3


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of layers")
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=TABLES, help="tables to measure (default: all)"
    )
    parser.add_argument("--worker", metavar="LAYERS,LAYOUT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        layers, layout = arguments.worker.split(",")
        run_worker(int(layers), layout)
        return
    print(describe_machine(), flush=True)
    if "saves" in arguments.tables:
        print_saves(arguments.sizes[len(arguments.sizes) // 2], arguments.rounds)
    if "load" in arguments.tables:
        direct_load(arguments.sizes, arguments.rounds)


# --- Saves ---


def print_saves(layers: int, rounds: int) -> None:
    """Prints how long a save of two ranks stops training, and what it reads and writes."""

    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=os.environ.get("TMPDIR")) as folder:
        world = World(__file__, f"{layers},tp2", TENSOR, {FOLDER: folder})
        checkpoint_bytes = 0
        times: dict[str, list[float]] = {}

        def do(work: str, kind: str = "") -> None:
            times.setdefault(kind or work, []).append(world.run(work))

        for work in ("save", "start", "finish", "copy", "dcp", "step"):  # the first time to warm up
            world.run(work)
        for _ in range(rounds):
            do("copy")
            do("step")
            before = world.run("bytes")
            do("save")
            times.setdefault("bytes", []).append(world.run("bytes") - before)
            do("dcp")
            do("start")
            began = time.perf_counter()
            for _ in range(STEPS_DURING_SAVE):
                do("step", "step while saving")
            do("finish")
            times.setdefault("durable", []).append(times["start"][-1] + time.perf_counter() - began)
            newest = max(Path(folder).glob("global_step*"), key=lambda path: int(path.name[11:]))
            checkpoint_bytes = sum(path.stat().st_size for path in newest.iterdir())
            shutil.rmtree(Path(folder) / "dcp")
        world.end()
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"\nsaves of 2 ranks, TP=2, ZeRO-1, {checkpoint_bytes / 2e9:.2f} GB per rank, median of {rounds}")
    for what, name, *others in (
        ("memory copy of the state", "copy"),
        ("save, training stopped", "save", "dcp"),
        ("torch.distributed.checkpoint.save", "dcp"),
        ("save in the background, training stopped", "start", "save", "copy"),
        ("save in the background, until the checkpoint is complete", "durable"),
        ("a step", "step"),
        ("a step while a save is written", "step while saving", "step"),
    ):
        shares = ", ".join(f"{median[name] / median[other]:.2f} x {other}" for other in others)
        print(f"  {what:44} {median[name]:7.3f} s  {shares}")
    ratio = 2 * median["bytes"] / checkpoint_bytes
    print(f"  bytes read and written per byte of the checkpoint: {ratio:.2f}", flush=True)


class Saver:
    """A rank that saves its state in several ways."""

    def __init__(self, engine: "GPTEngine", folder: Path) -> None:
        import torch
        from torch.distributed.distributed_c10d import _get_default_store

        # The import is late, because torch and DeepSpeed take seconds to import.
        from megatron.checkpoint.manager import CheckpointManager

        self.engine, self.folder, self.iteration = engine, folder, 0
        self.manager = CheckpointManager(engine, folder, store=_get_default_store())
        weights = {f"weight {i}": p.detach() for i, p in enumerate(engine.module.parameters())}
        moments = engine.optimizer.optimizer.state
        kept = {
            f"{i} {key}": value for i, state in enumerate(moments.values()) for key, value in state.items()
        }
        masters = {f"master {i}": flat.master.detach() for i, flat in enumerate(engine.optimizer.flat)}
        rank = engine.global_rank
        self.state = {f"{rank} {name}": value for name, value in {**weights, **masters, **kept}.items()}
        self.copies = [torch.empty_like(value) for value in self.state.values()]
        self.tokens = torch.randint(VOCAB, (2, SEQ + 1))

    def do(self, work: str) -> float | None:
        """Does the work 'save', 'start', 'finish', 'copy', 'dcp', 'step' or 'bytes'."""

        if work in ("save", "start"):
            self.iteration += 1
            state = TrainingState(self.iteration, 2 * self.iteration, 2 * self.iteration * SEQ)
            self.manager.save(state, in_background=work == "start")
        elif work == "finish":
            outcome = self.manager.finish_save()
            assert outcome is None or not outcome.problem, outcome
        elif work == "copy":
            for copy, value in zip(self.copies, self.state.values(), strict=True):
                copy.copy_(value)
        elif work == "dcp":
            import torch.distributed.checkpoint as dcp

            dcp.save(self.state, checkpoint_id=str(self.folder / "dcp"))
        elif work == "step":
            batches = micro_batches(self.tokens, self.engine.mesh, 1)
            self.engine.train_step(batches, 2, 0.0)
        elif work == "bytes":  # read and written so far by the rank and its writer
            writer = self.manager.background.writer
            pids = [os.getpid(), *([writer.process.pid] if writer is not None else [])]
            return float(sum(map(io_bytes, pids)))
        return None


# --- Loads ---


def direct_load(sizes: list[int], rounds: int) -> None:
    """Prints the table of loads on a layout different from the saved one."""

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
            # Reads and loads alternate without pauses. The host of a virtual machine takes memory back that
            # is free for seconds, and then the page faults of the next work take longer than the work.
            times: dict[str, list[float]] = {}
            for works in (("read", "load"), ("verify", "check")):
                times |= times_in_turns({work: partial(world.run, work) for work in works}, rounds)
            world.end()
            memory = ", ".join(path.read_text() for path in sorted(Path(folder).glob(f"{MEMORY_FILE}-*")))
        read, load, verify, check = (statistics.median(seconds) for seconds in times.values())
        print(
            f"{layers:6} {size_bytes / 1e9:5.2f}  {read:6.2f} {load:6.2f} {load / read:6.2f}  "
            f"{verify:6.2f} {check:6.2f}  {memory}",
            flush=True,
        )


# --- Processes ---


def make_checkpoint(folder: Path, layers: int) -> Path:
    """Writes a native checkpoint with two processes (TP=2, ZeRO-1); returns its folder."""

    world = World(__file__, f"{layers},tp2", TENSOR, {FOLDER: str(folder)})
    world.run("save")
    world.end()
    return folder / "global_step1"


def run_worker(layers: int, layout_name: str) -> None:
    """Runs one rank. With the layout 'tp2' it saves a checkpoint on request, with 'pp2' it reads and loads
    the checkpoint."""

    answers = begin_worker()
    import torch

    # The import is late, because torch takes seconds to import.
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
    """A rank that loads the checkpoint in a folder."""

    def __init__(self, engine: "GPTEngine", folder: Path) -> None:

        self.engine = engine
        self.folder = folder
        self.checkpoint = find_latest(folder)
        self.needed_bytes = 12 * sum(parameter.numel() for parameter in engine.optimizer.parameters)

    def do(self, work: str) -> None:
        """Does the work 'read', 'load', 'verify' or 'check'."""
        # The import is late, because torch and DeepSpeed take seconds to import.
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

        optimizer = self.engine.optimizer
        optimizer.optimizer.state.clear()
        with sampled(partial(status_bytes, "RssAnon")) as memory:
            optimizer.read_by_name(open_reader(self.checkpoint).read_parameter, None, with_moments=True)
            optimizer.exchange_loaded()
        bound = self.needed_bytes * 2 / 3 + 4 * VOCAB * HIDDEN
        note = self.folder / f"{MEMORY_FILE}-{self.engine.global_rank}"
        note.write_text(f"{(max(memory) - memory[0]) / 1e6:.0f} ({bound / 1e6:.0f})")


def make_config(layers: int, layout_name: str) -> "Config":

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


if __name__ == "__main__":
    main()
