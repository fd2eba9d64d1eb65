#!/usr/bin/env python3
"""Measures the speed of conversions of checkpoints, compared with a copy of the bytes and with DeepSpeed's
converter.

    python benchmarks/conversion.py                     0.8 GB; some minutes
    python benchmarks/conversion.py --layers 12         2 GB of weights and moments

Two processes (TP=2, ZeRO-1) save a native checkpoint with the trainer's engine: L layers, hidden 1024,
vocabulary 50,257 (padded to 50,432), Adam, fp32. The benchmark converts it to every format that keeps all
states, and back from each of these formats, with a comparison of all digests and without one
(--no-verify-digests). "copy" reads and writes as many bytes as the target has, with an equal number of
threads, and syncs the files. Conversions and copies take turns, and each figure is the median of --rounds.
The files are in the page cache. The times do not include the imports of a command.

The last table compares the commands deepspeed/checkpoint/ds_to_universal.py and tools/ds_to_universal.py,
with equal numbers of workers and including imports. The memory is the largest sampled sum of resident memory
over a command's processes (shared pages count in each process). The benchmark compares the files of both
commands.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.checkpoint import make_checkpoint
from benchmarks.machine import benchmark_parser, describe_machine, peak_bytes_of, times_in_turns
from megatron.files import sync_file
from megatron.text_table import format_table

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("universal", "dcp", "torch_dist")


def convert(source: Path, target: Path, name: str, workers: int, verify: bool) -> None:
    from megatron.checkpoint.conversion.pipeline import convert as run
    from megatron.checkpoint.conversion.source import open_any
    from megatron.checkpoint.formats.registry import writer_class

    for _ in run(open_any(source), writer_class(name), target, workers, verify):
        pass


def copy(files: list[Path], target: Path, workers: int) -> None:
    """Copies and syncs files, `workers` at a time."""
    target.mkdir()

    def work(number: int) -> None:
        shutil.copyfile(files[number], target / str(number))
        sync_file(target / str(number))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(len(files))))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def print_pairs(folder: Path, native: Path, arguments: Namespace) -> None:
    """Prints the time of each pair of formats, and of the copy."""
    workers = arguments.workers
    sources = {"native": native}
    for name in FORMATS:
        sources[name] = folder / f"source-{name}" / "global_step1"
        convert(native, sources[name], name, workers, verify=False)
    size = sum(path.stat().st_size for path in files_in(sources["dcp"]))
    print(f"{size / 1e9:.2f} GB of fp32 weights and moments, {workers} threads")
    rows = [["", "copy", "conversion", "", "without digests", ""]]
    for source, target in [("native", name) for name in FORMATS] + [(name, "native") for name in FORMATS]:

        def timed(kind: str, source: str = source, target: str = target) -> float:
            written = folder / "target" / "global_step1"
            written.parent.mkdir()
            began = time.perf_counter()
            if kind == "copy":
                copy(files_in(sources[target]), written, workers)
            else:
                convert(sources[source], written, target, workers, kind == "verified")
            seconds = time.perf_counter() - began
            shutil.rmtree(written.parent)
            return seconds

        works = {kind: partial(timed, kind) for kind in ("copy", "verified", "unverified")}
        times = times_in_turns(works, arguments.rounds, warm_up=0)
        copied, *converted = (statistics.median(seconds) for seconds in times.values())
        cells = [
            cell for seconds in converted for cell in (f"{seconds:.2f} s", f"({seconds / copied:.1f} x)")
        ]
        rows.append([f"{source} -> {target}", f"{copied:.2f} s", *cells])
    print(f"{format_table(rows)}\n", flush=True)


def print_commands(folder: Path, native: Path, arguments: Namespace) -> None:
    """Prints time and peak memory of the commands of DeepSpeed's converter and of this program's
    converter."""
    workers = str(arguments.workers)
    flags = ["--num_extract_workers", workers, "--num_merge_workers", workers, "--input_folder", str(native)]
    commands = {
        "deepspeed": [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *flags],
        "this program": [sys.executable, str(ROOT / "tools" / "ds_to_universal.py"), *flags],
    }
    peaks: dict[str, list[int]] = {name: [] for name in commands}

    def run(name: str) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        command = [*commands[name], "--output_folder", str(folder / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        peaks[name].append(peak_bytes_of(command, env=environment, stdout=subprocess.DEVNULL))

    times = times_in_turns({name: partial(run, name) for name in commands}, arguments.rounds, warm_up=0)
    compare(folder / "deepspeed" / "zero", folder / "this program" / "zero")
    theirs = statistics.median(times["deepspeed"])
    rows = [["to universal", "seconds", "deepspeed / this", "peak MB"]]
    for name, seconds in times.items():
        own = statistics.median(seconds)
        rows.append([name, f"{own:.2f}", f"{theirs / own:.1f}", f"{max(peaks[name]) / 1e6:.0f}"])
    print(format_table(rows))


def compare(theirs: Path, ours: Path) -> None:
    """Exits the program if a tensor differs between the two checkpoints."""
    import torch

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


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=1, help="transformer layers (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default: %(default)s)")
    arguments = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="conversion-", dir=os.environ.get("TMPDIR")) as folder:
        native = make_checkpoint(Path(folder), arguments.layers)
        print_pairs(Path(folder), native, arguments)
        print_commands(Path(folder), native, arguments)


if __name__ == "__main__":
    main()
