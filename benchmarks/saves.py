"""Time of a save, for `benchmarks/checkpoint.py`: training stopped, checkpoint complete, and a model of both.

Two processes (TP=2, ZeRO-1) save at once, in the background, and with torch.distributed.checkpoint.save, in
turns. The model of a background save has a few rates. With the rates of this machine it is compared with the
measured times; with assumed rates it predicts a save of BLOOM on 384 GPUs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine

VOCAB, SEQ, TENSOR = 50257, 128, 2
# BLOOM's checkpoint with optimizer state, and the ranks that saved it.
BLOOM_BYTES, BLOOM_RANKS = 2.3e12, 384
FOLDER = "BENCHMARK_FOLDER"
STEPS_DURING_SAVE = 3
# Assumptions for BLOOM's 384 A100s, never measured by this repository, in bytes per second and rank: copies
# from a device to pinned memory over PCIe 4.0 x16, of a core from there to the ring, SHA-256 of a core with
# SHA instructions, and digests on a device (about 100 bytes of its memory per element). The canary passes 12
# stages. File systems: in bytes per second for all ranks.
PCIE_RATE, HOST_COPY_RATE, SHA_RATE, DEVICE_DIGEST_RATE = 25e9, 10e9, 1.8e9, 60e9
DEVICE_CANARY_S = 0.2
FILE_SYSTEM_RATES = (40e9, 100e9)


def print_saves(script: str, layers: int, rounds: int) -> None:
    """Prints how long a save of two ranks stops training, and what it reads and writes. script: starts a rank
    with --worker."""
    from tests.support.measured_worlds import World

    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=os.environ.get("TMPDIR")) as folder:
        world = World(script, f"{layers},tp2", TENSOR, {FOLDER: folder})
        checkpoint_bytes = 0
        times: dict[str, list[float]] = {}

        def do(work: str, kind: str = "") -> None:
            times.setdefault(kind or work, []).append(world.run(work))

        for work in ("save", "start", "finish", "copy", "dcp", "step"):  # once to warm up
            world.run(work)
        for _ in range(rounds):
            for work in ("canary", "digest", "write"):
                do(work)
            do("start", "start alone")
            do("finish", "finish alone")
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
    rows = [
        ("memory copy of the state", median["copy"], ""),
        ("save, training stopped", median["save"], ""),
        (
            "torch.distributed.checkpoint.save",
            median["dcp"],
            f"{median['save'] / median['dcp']:.2f} of it: save",
        ),
        (
            "save in the background, training stopped",
            median["start"],
            share_of(median, "start", "save", "copy"),
        ),
        ("save in the background, until the checkpoint is complete", median["durable"], ""),
        ("a step", median["step"], ""),
        (
            "a step while a save is written",
            median["step while saving"],
            share_of(median, "step while saving", "step"),
        ),
    ]
    for name, seconds, note in rows:
        print(f"  {name:44} {seconds:7.3f} s  {note}")
    ratio = 2 * median["bytes"] / checkpoint_bytes
    print(f"  bytes read and written per byte of the checkpoint: {ratio:.2f}", flush=True)
    print_model(median, checkpoint_bytes / 2)


@dataclass(frozen=True)
class Rates:
    """What the time of a background save depends on, in bytes per second and rank."""

    copy: float
    """From the memory of the state into the ring."""
    write: float
    """From the ring to the disk, with SHA-256."""
    digest: float
    """Digests of parameters and moments."""
    digests_stop_training: bool
    """On a device the digests are computed before training continues, on CPUs by the writer."""
    canary_s: float

    def stopped_s(self, size: float) -> float:
        """Returns how long training stops. size: bytes of a rank."""
        return self.canary_s + size / self.copy + (size / self.digest if self.digests_stop_training else 0.0)

    def complete_s(self, size: float) -> float:
        """Returns the time from the begin of the save until the checkpoint is complete."""
        writer = size / self.write + (0.0 if self.digests_stop_training else size / self.digest)
        return self.stopped_s(size) + writer


def print_model(median: dict[str, float], size: float) -> None:
    """Compares the model of a background save with this machine, and prints the model for 384 GPUs."""
    rates = Rates(
        size / median["copy"], size / median["write"], size / median["digest"], False, median["canary"]
    )
    measured = median["start alone"], median["start alone"] + median["finish alone"]
    rows = [
        ("this machine, measured without steps meanwhile", *measured),
        ("this machine, from its rates", rates.stopped_s(size), rates.complete_s(size)),
    ]
    size = BLOOM_BYTES / BLOOM_RANKS
    copy = 1 / (1 / PCIE_RATE + 1 / HOST_COPY_RATE)
    for file_system in FILE_SYSTEM_RATES:
        write = min(SHA_RATE, file_system / BLOOM_RANKS)
        rates = Rates(copy, write, DEVICE_DIGEST_RATE, True, DEVICE_CANARY_S)
        name = f"384 A100s, 2.3 TB, file system of {file_system / 1e9:.0f} GB/s"
        rows.append((name, rates.stopped_s(size), rates.complete_s(size)))
    print("\nmodel of a background save, seconds: training stopped, checkpoint complete")
    for name, stopped_s, complete_s in rows:
        print(f"  {name:48} {stopped_s:6.2f} {complete_s:6.2f}")


def share_of(times: dict[str, float], name: str, *others: str) -> str:
    """The time as a multiple of others."""
    return ", ".join(f"{times[name] / times[other]:.2f} x {other}" for other in others)


class Saver:
    """One rank that saves its state, in several ways."""

    def __init__(self, engine: GPTEngine, folder: Path) -> None:
        import torch
        from torch.distributed.distributed_c10d import _get_default_store

        from megatron.checkpoint.manager import CheckpointManager

        self.engine, self.folder, self.iteration = engine, folder, 0
        self.manager = CheckpointManager(engine, folder, VOCAB, 0, {}, store=_get_default_store())
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
        """Does the work 'save', 'start', 'finish', 'copy', 'canary', 'digest', 'write', 'dcp', 'step' or
        'bytes'."""
        from megatron.checkpoint.digests import digest_state
        from megatron.checkpoint.files import HashedFile
        from megatron.checkpoint.integrity import canary_loss
        from megatron.checkpoint.record import TrainingState
        from tests.support.measured_worlds import micro_batches

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
        elif work == "canary":
            canary_loss(self.engine, VOCAB)
        elif work == "digest":
            digest_state(self.engine.optimizer, self.engine.mesh)
        elif work == "write":
            path = self.folder / f"written-{self.engine.global_rank}"
            file = HashedFile(path)
            for copy in self.copies:
                file.write(copy.numpy())
            file.close()
            path.unlink()
        elif work == "dcp":
            import torch.distributed.checkpoint as dcp

            dcp.save(self.state, checkpoint_id=str(self.folder / "dcp"))
        elif work == "step":
            batches = micro_batches(self.tokens, self.engine.mesh, 1)
            self.engine.train_step(batches, 2, 0.0)
        elif work == "bytes":  # of the rank and its writer so far, read and written
            writer = self.manager.background.writer
            pids = [os.getpid(), *([writer.process.pid] if writer is not None else [])]
            return float(sum(io_bytes_of(pid) for pid in pids))
        return None


def io_bytes_of(pid: int) -> int:
    """The bytes that a process has read and written, of files and of the page cache, but not of sockets."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
