"""Writes tests/assets/core_data.tar.gz with Megatron-Core, in an environment that has it:

    pip install megatron-core==0.16.1
    python tests/reference/write_core_data.py core_data && tar -czf tests/assets/core_data.tar.gz core_data

The folder has token files, the cache folder of a run with a blend, and `cases.json`. It contains digests of
the samples that Megatron-Core reads in 117 orders of one data set, in 20 blends, in blends without weights,
and in blends with a data set that is shorter than one sample. It also contains digests of longer tables of
blends, and later samples of the run with the cache folder.
"""

import hashlib
import json
import os
import sys
from collections import OrderedDict

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import normalize

SEQ = 16
DOCUMENTS = {"a": 1003, "b": 737, "c": 551}
SHORT = [2, 3, 1]  # documents' tokens in data set d: fewer than one sample
SPLITS = ("949,50,1", "969,30,1", "8,1,1")
# An epoch has about 300, 220 or 160 samples. The numbers give one to eight epochs, and use 1 to 100 % of the
# last epoch.
SAMPLES = (1, 100, 150, 200, 260, 290, 330, 400, 444, 500, 640, 777, 1000)
BLENDS = [
    [0.3, "a", 0.7, "b"],
    [3, "a", 7, "b"],
    [1, "a", 1, "b", 1, "c"],
    [0.1, "a", 0.2, "b"],
    [0.123456789, "c", 0.7, "a", 0.33, "b"],
    [1, "a"],
    [2.5, "b"],
    [0.001, "a", 0.999, "b"],
    [1, "a", 2, "b", 3, "c", 4, "a", 5, "b", 6, "c", 7, "a", 8, "b", 9, "c"],
    [weight_or_name for i in range(1, 12) for weight_or_name in (1 / (3 * i), "abc"[i % 3])],
]
SIZED = [["a", "b"], ["b", "c", "a"], ["c", "a", "b", "a", "c"]]
SIZED_SAMPLES = ([100, 20, 10], [333, 30, 20], [10**6, 10**6, 10**6])  # the last: all samples of one epoch
SHORT_BLENDS = [[0.3, "a", 0.01, "d", 0.7, "b"], [1, "d", 5, "c"]]
TABLES = [[0.3, 0.7], [1, 1, 1, 1], [0.1] * 10, [1 / 3, 1 / 7, 1 / 11], [i**1.5 for i in range(1, 31)]]
TABLE_SAMPLES = 100_000
CACHED = {"blend": BLENDS[4], "samples": 700, "seed": 4321, "split": "8,1,1", "first": 333, "count": 8}


class Tokenizer:
    """A tokenizer with only what the data sets of Megatron-Core need."""

    vocab_size = 60_000
    unique_identifiers = OrderedDict({"class": "Tokenizer"})


def digest(*arrays: np.ndarray) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return content.hexdigest()[:16]


def write_tokens(folder: str) -> None:
    generator = np.random.RandomState(1)
    first = 0
    for name, documents in DOCUMENTS.items():
        builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=np.uint16)
        sizes = generator.randint(0, 11, documents)
        sizes[-1] = 60  # Megatron-Core hangs on a split without tokens
        for size in sizes:
            builder.add_document(np.arange(first, first + size), [size])
            first += size
        builder.finalize(f"{folder}/{name}.idx")
    builder = IndexedDatasetBuilder(f"{folder}/d.bin", dtype=np.uint16)
    for size in SHORT:
        builder.add_document(np.arange(first, first + size), [size])
        first += size
    builder.finalize(f"{folder}/d.idx")


def build(folder, seed, sizes, cache=None, **blend):
    """Returns the data sets of train, valid and test."""
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=SEQ, tokenizer=Tokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, path_to_cache=cache, **blend,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def sample(dataset, i):
    if isinstance(dataset, BlendedDataset):
        return sample(dataset.datasets[dataset.dataset_index[i]], dataset.dataset_sample_index[i])
    return dataset._query_document_sample_shuffle_indices(i)[0]


def digests(datasets, sizes):
    """Returns the digests of the samples. A data set that is not a blend contributes all its samples."""
    return [
        digest(*(sample(data, i) for i in range(size if isinstance(data, BlendedDataset) else len(data))))
        for data, size in zip(datasets, sizes, strict=True)
        if data is not None
    ]


def tables(datasets):
    return [
        digest(data.dataset_index, data.dataset_sample_index)
        for data in datasets
        if isinstance(data, BlendedDataset)
    ]


def prefixes_and_weights(folder, words):
    return [f"{folder}/{name}" for name in words[1::2]], [float(weight) for weight in words[::2]]


def sized_cases(folder):
    """Yields blends without weights, whose shares are the samples in one epoch of each data set. samples:
    None if Megatron-Core stops because its table needs more samples of a data set than exist."""
    for names in SIZED:
        blend = [f"{folder}/{name}" for name in names], None
        for number, sizes in enumerate(SIZED_SAMPLES):
            for given in ({"blend": blend, "split": "8,1,1"}, {"blend_per_split": [blend, blend, None]}):
                temporary, seed = f"{folder}/sized-cache", 7 + number
                case = {"blend": names, "split": given.get("split"), "sizes": sizes, "seed": seed}
                try:
                    found = build(folder, seed, sizes, temporary, **given)
                    lengths = [0 if data is None else len(data) for data in found]
                    yield {**case, "lengths": lengths, "samples": digests(found, lengths)}
                except IndexError:
                    yield {**case, "lengths": None, "samples": None}
                remove(temporary)


def short_cases(folder):
    """Yields blends with data set d, whose documents are repeated within a sample."""
    for words in SHORT_BLENDS:
        blend, sizes, seed = prefixes_and_weights(folder, words), [400, 40, 0], 77
        for given in ({"blend": blend, "split": "1,0,0"}, {"blend_per_split": [blend, blend, None]}):
            found = build(folder, seed, sizes, f"{folder}/short-cache", **given)
            case = {"blend": words, "split": given.get("split"), "sizes": sizes, "seed": seed}
            yield {**case, "samples": digests(found, sizes)}
            remove(f"{folder}/short-cache")


def main(folder: str) -> None:
    os.makedirs(folder)
    write_tokens(folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    single, blends = [], []
    for split in SPLITS:
        for name in DOCUMENTS:
            for samples in SAMPLES:
                sizes, seed = [samples, samples // 3 + 1, 2], 1234 + samples
                temporary = f"{folder}/{name}-cache"
                found = build(folder, seed, sizes, temporary, blend=([f"{folder}/{name}"], None), split=split)
                case = {"data": name, "split": split, "sizes": sizes, "seed": seed}
                single.append({**case, "samples": digests(found, sizes)})
                remove(temporary)
    for number, words in enumerate(BLENDS):
        blend = prefixes_and_weights(folder, words)
        sizes, seed = [350 + 77 * number, 40 + number, 3], 99 + number
        for given in ({"blend": blend, "split": "8,1,1"}, {"blend_per_split": [blend, blend, None]}):
            temporary = f"{folder}/blend-cache"
            found = build(folder, seed, sizes, temporary, **given)
            case = {"blend": words, "split": given.get("split"), "sizes": sizes, "seed": seed}
            blends.append({**case, "samples": digests(found, sizes), "tables": tables(found)})
            remove(temporary)
    long_tables = []
    for weights in TABLES:
        table = np.zeros(TABLE_SAMPLES, np.int16), np.zeros(TABLE_SAMPLES, np.int64)
        twice = normalize(normalize(weights))
        helpers.build_blending_indices(*table, np.array(twice), len(weights), TABLE_SAMPLES, False)
        long_tables.append({"weights": weights, "samples": TABLE_SAMPLES, "table": digest(*table)})
    blend = prefixes_and_weights(folder, CACHED["blend"])
    run = build(
        folder,
        CACHED["seed"],
        [CACHED["samples"], 20, 3],
        f"{folder}/cache",
        blend=blend,
        split=CACHED["split"],
    )
    window = range(CACHED["first"], CACHED["first"] + CACHED["count"])
    next_samples = [sample(run[0], i).tolist() for i in window]
    content = {
        "seq_length": SEQ, "single": single, "blends": blends, "tables": long_tables,
        "sized": list(sized_cases(folder)), "short": list(short_cases(folder)),
        "cached": {**CACHED, "sizes": [CACHED["samples"], 20, 3], "next_samples": next_samples},
    }  # fmt: skip
    with open(f"{folder}/cases.json", "w") as file:
        json.dump(content, file, indent=1)


def remove(folder: str) -> None:
    for name in os.listdir(folder):
        os.remove(f"{folder}/{name}")
    os.rmdir(folder)


if __name__ == "__main__":
    main(sys.argv[1])
