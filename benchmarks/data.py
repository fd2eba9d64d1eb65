#!/usr/bin/env python3
"""Measures the data pipeline: samples that are not in memory, and a start with thousands of token files.

    python benchmarks/data.py                     about three minutes
    python benchmarks/data.py --gigabytes 8       a token file of 8 GB

preprocessing   MB/s of tools/preprocess_data.py with each --tokenizer-backend, against the `tokenizers`
                library in batches, on all cores, whose ids go into a file. The text is the Python code of the
                installed packages, tokenized with a byte-level BPE of 8,192 tokens trained on it. And the
                peak memory of all processes for one line of 30 MB.
cold samples    Random samples of a token file of which no page is in memory, against one `pread` per sample
                on a descriptor for random reads: microseconds, and bytes that the disk reads.
many prefixes   A rank opens a blend of token files whose index files exist and were verified: seconds, and
                descriptors that stay open.

The folder of --folder should be on the disk that is measured; in a tmpfs all pages are in memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import tokenizers

from benchmarks.machine import benchmark_parser, describe_machine
from megatron.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets, prepare_index_files
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, data_path
from megatron.text_table import format_table
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer

SEQ_LENGTHS = (2048, 8192)
READS = 400
DOCUMENT = 1 << 20  # tokens
LINE_CHARACTERS = 29_000_000
PREFIX_TOKENS = 20_000


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, help="folder for the token files (default: the temporary folder)"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the token file of cold samples")
    parser.add_argument("--megabytes", type=float, default=60.0, help="size of the text of preprocessing")
    parser.add_argument("--prefixes", type=int, default=3000, help="number of token files of a start")
    parser.add_argument(
        "--only", nargs="+", choices=["preprocessing", "cold-samples", "many-prefixes"], help="measure these"
    )
    arguments = parser.parse_args()
    print(describe_machine(), flush=True)
    parts: dict[str, Callable[[Path], None]] = {
        "preprocessing": partial(preprocessing, megabytes=arguments.megabytes),
        "cold-samples": partial(cold_samples, gigabytes=arguments.gigabytes),
        "many-prefixes": partial(many_prefixes, number=arguments.prefixes),
    }
    for name in arguments.only or parts:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            parts[name](Path(folder))


def preprocessing(folder: Path, megabytes: float) -> None:
    """Prints the speed of each backend and of `tokenizers` in batches, and the memory of a long line."""
    texts, size = [], 0
    for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        texts.append(source.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
        if size > megabytes * 1e6:
            break
    trainer = tokenizers.ByteLevelBPETokenizer()
    trainer.train_from_iterator(texts[::10], 8192, special_tokens=[END_OF_TEXT], show_progress=False)
    trainer.save_model(os.fspath(folder))
    path = folder / "text.jsonl"
    parts = (part for text in texts for part in text.split("\n\n") if part)
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    size = path.stat().st_size
    seconds = {}
    for backend in ("gigatoken", "words", "reference"):
        start = time.perf_counter()
        subprocess.run(_tool(path, backend, os.cpu_count() or 1), check=True, stdout=subprocess.DEVNULL)
        seconds[f"--tokenizer-backend {backend}, {os.cpu_count()} workers"] = time.perf_counter() - start
    start = time.perf_counter()
    tokenizer = GPT2BPETokenizer(os.fspath(folder / "vocab.json"), os.fspath(folder / "merges.txt"))
    with open(path, encoding="utf-8") as lines, open(folder / "ids", "wb") as ids:
        while batch := list(islice(lines, 1024)):
            for encoded in tokenizer.tokenize_batch([json.loads(line)["text"] for line in batch]):
                ids.write(np.array(encoded, np.uint16).data)
    base = time.perf_counter() - start
    seconds["tokenizers in batches"] = base
    speeds = {name: f"{size / 1e6 / value:.1f} MB/s" for name, value in seconds.items()}
    rows = [[name, speeds[name], f"{base / value:.2f}"] for name, value in seconds.items()]
    table = format_table([["", "speed", "against tokenizers in batches"], *rows])
    print(f"preprocessing {size / 1e6:,.0f} MB\n{table}\n", flush=True)
    path.write_text(json.dumps({"text": ("".join(texts) * 30)[:LINE_CHARACTERS]}) + "\n")
    rows = [
        [backend, str(workers), f"{_peak_bytes(_tool(path, backend, workers)) / 1e6:,.0f} MB"]
        for backend in ("gigatoken", "words", "reference")
        for workers in (1, 2)
    ]
    table = format_table([["--tokenizer-backend", "--workers", "peak memory"], *rows])
    print(f"one line of {path.stat().st_size / 1e6:.0f} MB\n{table}\n", flush=True)


def _tool(path: Path, backend: str, workers: int) -> list[str]:
    folder = path.parent
    for made in folder.glob("out*"):
        made.unlink()
    flags = ["--input", path, "--output-prefix", folder / "out", "--append-eod", "--workers", workers]
    flags += ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]
    command = [sys.executable, "tools/preprocess_data.py", "--tokenizer-backend", backend, *flags]
    return list(map(str, command))


def _peak_bytes(command: list[str]) -> int:
    """Runs a command; returns the largest sum of the resident memory of its processes, every 10 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as tool:
        main = psutil.Process(tool.pid)
        while tool.poll() is None:
            with suppress(psutil.Error):
                processes = [main, *main.children(recursive=True)]
                peak = max(peak, sum(process.memory_info().rss for process in processes))
            time.sleep(0.01)
    assert tool.returncode == 0
    return peak


def cold_samples(folder: Path, gigabytes: float) -> None:
    """Prints time and bytes per sample of `IndexedDataset` and of `pread`, in turns."""
    prefix = folder / "tokens"
    generator = np.random.default_rng(1)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(max(round(gigabytes * 1e9 / 2 / DOCUMENT), 1)):
            builder.add_documents(generator.integers(0, 50000, DOCUMENT, np.uint16), [DOCUMENT])
        builder.finalize()
    dataset, path = IndexedDataset(prefix), data_path(os.fspath(prefix))
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def mapped(document: int, offset: int, length: int) -> np.ndarray:
        return dataset.get(document, offset, length).astype(np.int64)

    def pread(document: int, offset: int, length: int) -> np.ndarray:
        first = 2 * (document * DOCUMENT + offset)
        return np.frombuffer(os.pread(descriptor, 2 * length, first), np.uint16).astype(np.int64)

    rows = []
    for seq_length in SEQ_LENGTHS:
        places = random.Random(seq_length)
        found: dict[str, list[tuple[float, int]]] = {"mapped": [], "pread": []}
        for _ in range(3):
            for name, read in (("mapped", mapped), ("pread", pread)):
                found[name].append(_read_cold(read, path, len(dataset), seq_length + 1, places))
        (own, own_bytes), (other, other_bytes) = min(found["mapped"]), min(found["pread"])
        rows.append(
            [f"{2 * seq_length:,}", f"{own:.0f} us", f"{other:.0f} us", f"{own / other:.2f}"]
            + [f"{own_bytes:,}", f"{other_bytes:,}"]
        )
    os.close(descriptor)
    header = ["bytes of a sample", "IndexedDataset", "pread", "ratio", "bytes read", "with pread"]
    print(
        f"cold samples, {READS} of {gigabytes:g} GB, best of 3\n{format_table([header, *rows])}\n", flush=True
    )


def _read_cold(
    read: Callable[[int, int, int], np.ndarray],
    path: str,
    documents: int,
    length: int,
    places: random.Random,
) -> tuple[float, int]:
    """Returns the microseconds and the bytes that the disk read, per sample."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before, start = _bytes_read(), time.perf_counter()
    for _ in range(READS):
        read(places.randrange(documents), places.randrange(DOCUMENT - length), length)
    seconds = time.perf_counter() - start
    return 1e6 * seconds / READS, (_bytes_read() - before) // READS


def _bytes_read() -> int:
    """Returns the bytes that the disk has read for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def many_prefixes(folder: Path, number: int) -> None:
    """Prints the time and the descriptors of a rank that opens a blend of `number` prefixes."""
    generator = np.random.default_rng(2)
    words: list[str] = []
    for index in range(number):
        prefix = folder / f"set{index}"
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            sizes = generator.multinomial(PREFIX_TOKENS, np.full(40, 1 / 40))
            builder.add_documents(generator.integers(0, 50000, PREFIX_TOKENS, np.uint16), sizes)
            builder.finalize()
        words += ["1", os.fspath(prefix)]
    data = DataConfig(data_path=tuple(words), split="100,0,0")
    wanted = (number * PREFIX_TOKENS // 128 // 2, 0, 0)
    seconds = {}
    for name, work in (
        ("all index files are built", prepare_index_files),
        ("they exist and are checked, once per node", prepare_index_files),
        ("a rank opens them", build_gpt_datasets),
    ):
        start = time.perf_counter()
        datasets = work(data, 128, 1234, wanted)
        seconds[name] = time.perf_counter() - start
    descriptors = len(os.listdir("/proc/self/fd"))
    start = time.perf_counter()
    assert datasets is not None and datasets.train is not None
    datasets.train[0]
    seconds["the first sample"] = time.perf_counter() - start
    rows = [[name, f"{value:.2f} s"] for name, value in seconds.items()]
    rows.append(["descriptors that stay open", f"{descriptors:,}"])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(["peak memory of the process", f"{memory:,.0f} MB"])
    print(f"{number:,} prefixes\n{format_table(rows)}", flush=True)


if __name__ == "__main__":
    main()
