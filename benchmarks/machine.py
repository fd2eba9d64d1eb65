"""Functions for all benchmarks: a parser of flags, a description of the machine, rows of results, the times
of works that take turns, and the peak memory of a block or a command."""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --disable-bias-linear "
    "--group-query-attention "
)
"""Flags that select the layers of Llama, without sizes."""


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help begins with the docstring of a benchmark, with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def describe_machine() -> str:
    """Returns one line with the processor or GPU, the number of cores, the versions and the commit."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return (
        f"{device}, {os.cpu_count()} cores, torch {torch.__version__}, deepspeed {version('deepspeed')}, "
        f"commit {_commit()}"
    )


def add_row(folder: Path, table: str, **columns: Any) -> None:
    """Appends a row of the named table to rows.jsonl in the folder, and prints it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rows.jsonl", "a") as file:
        file.write(json.dumps({"table": table, **columns}) + "\n")
    print(", ".join(f"{name} {value}" for name, value in columns.items()), flush=True)


def read_rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Returns the rows of the named table in the folder. It leaves out a line that a killed process has not
    completed."""
    found = []
    file = folder / "rows.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            row = json.loads(line)
            if row.pop("table") == table:
                found.append(row)
    return found


def device_is_lost() -> bool:
    """Returns whether the device cannot be used any more in this process, as after an illegal memory access.
    Triton and cuBLAS raise a plain RuntimeError for it."""
    from deepspeed.accelerator import get_accelerator

    try:
        get_accelerator().synchronize()
    except RuntimeError:
        return True
    return False


def times_in_turns(
    works: Mapping[str, Callable[[], float | None]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs works in turns, so that other load on the machine slows all of them. Returns name of a work ->
    seconds in each round, without the first `warm_up` rounds. On a GPU the time ends when the GPU has
    finished. A work may return its own seconds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm_up + rounds):
        for name, work in works.items():
            _wait_for_gpu()
            start = time.perf_counter()
            found = work()
            _wait_for_gpu()
            seconds = time.perf_counter() - start if found is None else found
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def sampled(value: Callable[[], int]) -> Iterator[list[int]]:
    """Yields a list that gets the value at the beginning of the block, every 5 ms during the block, and at
    its end."""
    values, over = [value()], threading.Event()

    def sample() -> None:
        while not over.wait(0.005):
            values.append(value())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join()
        values.append(value())


def peak_bytes_of(command: Sequence[str], **options: Any) -> int:
    """Runs a command. Returns the largest sampled sum of the resident memory of its processes, in bytes; a
    shared page counts in each process. Exits the program if the command fails. options: options of
    `Popen`."""
    import psutil

    def resident_bytes() -> int:
        with suppress(psutil.Error):
            main = psutil.Process(process.pid)
            return sum(member.memory_info().rss for member in (main, *main.children(recursive=True)))
        return 0

    with subprocess.Popen(command, **options) as process, sampled(resident_bytes) as values:
        process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return max(values)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")


def _commit() -> str:
    """Returns the commit of this checkout, or $COMMIT for a copy without its history."""
    root = Path(__file__).resolve().parent
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get("COMMIT", "unknown")
