#!/usr/bin/env python3
"""Measures the data pipeline: samples that are not in memory, and a start with thousands of token files.

    python benchmarks/data.py                     about four minutes
    python benchmarks/data.py --gigabytes 8       a token file of 8 GB

preprocessing   MB/s of tools/preprocess_data.py with each --tokenizer-backend, compared with the
                `tokenizers` library, which encodes batches on all cores and writes the ids to a file. The
                text is the Python code of the installed packages, and the tokenizer is a byte-level BPE of
                8,192 tokens that is trained on it. Also the peak memory of all processes for a line of 30 MB.
cold samples    Random samples of a token file that has no page in memory, compared with one `pread` per
                sample on a descriptor for random reads: microseconds, and bytes that the disk reads.
index           Seconds to build the document, sample and shuffle index of one data set of 5 million
                documents and 3 epochs, without writing the files.
many prefixes   A rank starts with a blend of token files whose indices tools/prepare_indices.py has prepared:
                seconds, files that it opens, and descriptors that stay open.

The folder of --folder should be on the disk that you want to measure; in a tmpfs all pages are in memory.
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
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks.machine import benchmark_parser, describe_machine, peak_bytes_of, times_in_turns
from megatron.config import DataConfig
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.gpt_dataset import build_gpt_datasets, data_fingerprint, prepare_index_files
from megatron.data.indexed_dataset import IndexedDataset, data_path
from megatron.data.indices import build_sample_order, plan_epochs
from megatron.data.splits import verify_token_files
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
    parser.add_argument("--documents", type=int, default=5_000_000, help="documents of the index")
    names = ["preprocessing", "cold-samples", "index", "many-prefixes"]
    parser.add_argument("--only", nargs="+", choices=names, help="measure only these parts")
    arguments = parser.parse_args()
    print(describe_machine(), flush=True)
    parts: dict[str, Callable[[Path], None]] = {
        "preprocessing": partial(preprocessing, megabytes=arguments.megabytes),
        "cold-samples": partial(cold_samples, gigabytes=arguments.gigabytes),
        "index": lambda _: index(arguments.documents),
        "many-prefixes": partial(many_prefixes, number=arguments.prefixes),
    }
    for name in arguments.only or names:
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
    silent = {"stdout": subprocess.DEVNULL}
    rows = [
        [backend, str(workers), f"{peak_bytes_of(_tool(path, backend, workers), **silent) / 1e6:,.0f} MB"]
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
    read: Callable[[int, int, int], np.ndarray], path: str, documents: int, length: int, places: random.Random
) -> tuple[float, int]:
    """Returns the microseconds per sample, and the bytes per sample that the disk read."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    before, start = _bytes_read(), time.perf_counter()
    for _ in range(READS):
        read(places.randrange(documents), places.randrange(DOCUMENT - length), length)
    seconds = time.perf_counter() - start
    return 1e6 * seconds / READS, (_bytes_read() - before) // READS


def _bytes_read() -> int:
    """Returns the number of bytes that the disk has read for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def index(documents: int) -> None:
    """Prints the time of the index of one data set."""
    sizes = np.random.default_rng(3).integers(1, 2000, documents).astype(np.int32)
    tokens, epochs, seq_length = int(sizes.sum()), 3, 2048
    plan = plan_epochs(tokens, seq_length, (epochs * tokens - 1) // seq_length, 0.8)

    def build() -> None:
        build_sample_order(sizes, range(documents), seq_length, 1, plan)

    seconds = times_in_turns({"index": build}, rounds=3, warm_up=0)["index"]
    print(
        f"index of {documents:,} documents x {epochs} epochs: {min(seconds):.2f} s, best of 3\n", flush=True
    )


def many_prefixes(folder: Path, number: int) -> None:
    """Prints the time, the opened files and the descriptors of a rank that starts with `number` prefixes."""
    generator = np.random.default_rng(2)
    words: list[str] = []
    for index in range(number):
        prefix = folder / f"set{index}"
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            sizes = generator.multinomial(PREFIX_TOKENS, np.full(40, 1 / 40))
            builder.add_documents(generator.integers(0, 50000, PREFIX_TOKENS, np.uint16), sizes)
            builder.finalize()
        words += ["1", os.fspath(prefix)]
    wanted = (number * PREFIX_TOKENS // 128 // 2, 0, 0)
    opened: list[str] = []
    sys.addaudithook(lambda event, arguments: opened.append(event) if event == "open" else None)
    rows = []
    for order in ("native", "megatron-core"):
        data = DataConfig(data_path=tuple(words), split="100,0,0", data_order=order)
        if order != "native":  # builds the index again
            for path in [*folder.glob("*_idx.npy"), *folder.glob("prepared-*")]:
                path.unlink()

        def prepare(data: DataConfig = data) -> None:
            prepare_index_files(data, 128, 1234, wanted, verify_token_files(data), os.cpu_count() or 1)

        def start(data: DataConfig = data) -> None:
            data_fingerprint(data, 128, 1234, wanted[0])
            datasets = build_gpt_datasets(data, 128, 1234, wanted)
            assert datasets.train is not None
            datasets.train[0]

        for name, work in (
            (f"{order}: prepare, {os.cpu_count()} threads", prepare),
            (f"{order}: first rank of a node, in addition", prepare),
            (f"{order}: a rank starts and reads a sample", start),
        ):
            opened.clear()
            began = time.perf_counter()
            work()
            rows.append([name, f"{time.perf_counter() - began:.2f} s", f"{len(opened):,}"])
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{number:,} prefixes\n{format_table([['', 'time', 'files opened'], *rows])}\n"
        f"descriptors that stay open: {descriptors}; peak memory: {memory:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
