#!/usr/bin/env python3
"""Speed of tools/convert_checkpoint.py for pairs of formats, compared with a copy of the same bytes.

    python benchmarks/conversion.py                     0.8 GB; some minutes
    python benchmarks/conversion.py --layers 12         2 GB of weights and moments
    python benchmarks/conversion.py --profile dcp       where the time of native -> dcp goes

Two processes (TP=2, ZeRO-1) save a native checkpoint with the trainer's engine: L layers, hidden 1024,
vocabulary 50,257, Adam, fp32. It is converted to every format that keeps all states, and from each of them
back, with all digests compared and without (--no-verify-digests). "copy" reads and writes as many bytes as
the target has, in as many threads, in blocks of 8 MB, and syncs the files. Conversions and copies take
turns, and each figure is the median of --rounds. The files are in the page cache. The imports of a command
are not counted.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from benchmarks.checkpoint import make_checkpoint
from benchmarks.machine import benchmark_parser, describe_machine

FORMATS = ("universal", "dcp", "torch_dist")
BLOCK_BYTES = 1 << 23


def convert(source: Path, target: Path, name: str, workers: int, verify: bool) -> None:
    from megatron.checkpoint.formats.registry import writer_class
    from megatron.commands.convert_checkpoint import open_source

    for _ in writer_class(name).write_checkpoint(open_source(source), target, workers, verify):
        pass


def copy(files: list[Path], target: Path, workers: int) -> None:
    """Copies files, cut into pieces of about equal size, one per thread."""
    target.mkdir()
    total = sum(path.stat().st_size for path in files)
    share = -(-total // workers)
    pieces = [
        (path, start, min(share, path.stat().st_size - start))
        for path in files
        for start in range(0, path.stat().st_size, share)
    ]

    def work(number: int) -> None:
        path, start, length = pieces[number]
        block = memoryview(bytearray(BLOCK_BYTES))
        with open(path, "rb") as source, open(target / str(number), "wb") as output:
            source.seek(start)
            while length:
                done = source.readinto(block[: min(length, BLOCK_BYTES)])
                output.write(block[:done])
                length -= done
            output.flush()
            os.fsync(output.fileno())

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(len(pieces))))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def measure(folder: Path, arguments: Namespace) -> None:
    native = make_checkpoint(folder, arguments.layers)
    sources = {"native": native}
    for name in FORMATS:
        sources[name] = folder / f"source-{name}" / "global_step1"
        convert(native, sources[name], name, arguments.workers, verify=False)
    size = sum(path.stat().st_size for path in files_in(sources["dcp"]))
    print(
        f"{describe_machine()}\n{size / 1e9:.2f} GB of fp32 weights and moments, {arguments.workers} threads"
    )
    pairs = [("native", name) for name in FORMATS] + [(name, "native") for name in FORMATS]
    times: dict[tuple[str, str, str], list[float]] = {}
    for _, (source, target) in product(range(arguments.rounds), pairs):
        for kind in ("copy", "verified", "unverified"):
            written = folder / "target" / "global_step1"
            written.parent.mkdir()
            began = time.perf_counter()
            if kind == "copy":
                copy(files_in(sources[target]), written, arguments.workers)
            else:
                convert(sources[source], written, target, arguments.workers, kind == "verified")
            times.setdefault((source, target, kind), []).append(time.perf_counter() - began)
            shutil.rmtree(written.parent)
    print(f"{'':24}{'copy':>8}{'conversion':>14}{'without digests':>20}")
    for source, target in pairs:
        copied, verified, unverified = (
            statistics.median(times[source, target, kind]) for kind in ("copy", "verified", "unverified")
        )
        print(
            f"{source + ' -> ' + target:24}{copied:6.2f} s{verified:6.2f} s ({verified / copied:.1f} x)"
            f"{unverified:10.2f} s ({unverified / copied:.1f} x)"
        )


def profile(folder: Path, arguments: Namespace) -> None:
    """Prints the functions that take most time of a conversion in one thread."""
    import cProfile
    import pstats

    native = make_checkpoint(folder, arguments.layers)
    with cProfile.Profile() as profiler:
        # In this thread: a profiler sees only its own.
        from megatron.checkpoint.formats import writing
        from megatron.checkpoint.formats.registry import writer_class
        from megatron.commands.convert_checkpoint import open_source

        target = folder / "target"
        target.mkdir()
        writer = writer_class(arguments.profile)(target, open_source(native))
        for name in writer.reader.specs:
            writing.copy_parameter(writer, name, verify=True)
        writer.complete()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=1, help="transformer layers (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default: %(default)s)")
    parser.add_argument("--profile", choices=FORMATS, help="profile the conversion from native instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conversion-", dir=os.environ.get("TMPDIR")) as folder:
        (profile if arguments.profile else measure)(Path(folder), arguments)


if __name__ == "__main__":
    main()
