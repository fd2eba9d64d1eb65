"""Statistics of token files: lengths of documents, duplicates, bytes per token, and examples.

A .bin file is read completely, once, in blocks. The memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import IndexedDataset, data_path
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.vocabulary_record import read_record

# Number of tokens (about) and largest number of documents in a block.
_BLOCK_TOKENS, _BLOCK_DOCUMENTS = 1 << 22, 1 << 20
# Number of hashes that are kept. Each takes 24 bytes, and about three times as much while hashes are sorted.
MAX_HASHES = 1 << 22
# Bytes per token are measured on this many documents of a data set, and on this many tokens of each document.
_DECODED_DOCUMENTS, _DECODED_TOKENS = 64, 2048
# Number of documents whose beginnings are shown: per data set, in all data sets, and of the most repeated
# ones.
_EXAMPLES, _MAX_EXAMPLES, _REPEATED = 3, 60, 10
_EXAMPLE_TOKENS, _EXAMPLE_CHARACTERS = 64, 240


def dataset_statistics(
    datasets: Sequence[IndexedDataset], tokenizer: Tokenizer | None = None, max_hashes: int = MAX_HASHES
) -> dict[str, Any]:
    """Returns statistics as JSON types, for the page of `tools/verify_dataset.py --html`.

    tokenizer: decodes texts; None: token ids are shown, and bytes per token are None. max_hashes: if the data
    sets have more documents than this, duplicates are counted in a sample of the documents.
    """
    hashes = DocumentHashes(max_hashes)
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    for number, dataset in enumerate(datasets):
        for first, block in _blocks(dataset):
            hashes.add(number, first, _digests(block, dataset.sizes[first : first + len(block)], dtype))
    within, across = hashes.duplicates(len(datasets))
    lengths = np.zeros((2, 33), np.int64)
    sets = []
    for number, dataset in enumerate(datasets):
        lengths += _lengths(dataset)
        record = read_record(dataset.prefix)
        sets.append(
            {
                "prefix": dataset.prefix,
                "documents": len(dataset),
                "empty": int(np.count_nonzero(dataset.sizes == 0)),
                "tokens": dataset.num_tokens,
                "shortest": int(dataset.sizes.min()),
                "longest": int(dataset.sizes.max()),
                "tokenizer": None if record is None else record["tokenizer_type"],
                "bytes_per_token": None if tokenizer is None else _bytes_per_token(dataset, tokenizer),
                "duplicates": within[number],
                "duplicates_of_others": across[number],
            }
        )
    occurring = np.flatnonzero(lengths[0])
    per_set = max(1, min(_EXAMPLES, _MAX_EXAMPLES // len(datasets)))
    return {
        "sets": sets,
        "lengths": [
            {
                "shortest": (1 << bits) >> 1,
                "documents": int(lengths[0, bits]),
                "tokens": int(lengths[1, bits]),
            }
            for bits in range(occurring.min(), occurring.max() + 1)
        ],
        "sampled": hashes.sampled,
        "repeated": [
            {**_example(datasets[number], document, tokenizer), "copies": copies}
            for copies, number, document in hashes.most_repeated(_REPEATED)
        ],
        "examples": [
            _example(dataset, document, tokenizer)
            for dataset in datasets[:_MAX_EXAMPLES]
            for document in _spread(dataset, per_set)
        ],
        "decoded": tokenizer is not None,
    }


class DocumentHashes:
    """Counts documents with equal tokens, by 64-bit hashes.

    If there are more than `capacity` documents, only documents whose hash is divisible by `sampled`, a power
    of two, are kept. Equal documents have equal hashes, so either all copies of a document are kept, or none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sampled = 1
        # Parts of an int64 array [3, documents]: hash, data set, document.
        self._parts = [np.zeros((3, 0), np.int64)]

    def add(self, number: int, first: int, hashes: npt.NDArray[np.int64]) -> None:
        """Adds the hashes of consecutive documents of data set `number`. The hash of an empty document is
        0."""
        documents = np.arange(first, first + len(hashes), dtype=np.int64)
        part = np.stack((hashes, np.full(len(hashes), number, np.int64), documents))
        self._parts.append(self._sample(part[:, hashes != 0]))
        while sum(part.shape[1] for part in self._parts) > self.capacity:
            self.sampled *= 2
            self._parts = [self._sample(np.concatenate(self._parts, axis=1))]

    def _sample(self, part: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return part[:, part[0] % self.sampled == 0]

    def duplicates(self, num_sets: int) -> tuple[list[int], list[int]]:
        """Returns for each data set how many documents repeat an earlier document of the set, and how many
        documents are also in another set. Both are counted, or estimated from the sample."""
        hashes, sets, _ = np.concatenate(self._parts, axis=1)
        order = np.lexsort((sets, hashes))
        hashes, sets = hashes[order], sets[order]
        new_content = np.diff(hashes, prepend=0) != 0  # no hash is 0
        new_set = new_content | (np.diff(sets, prepend=-1) != 0)
        content = np.cumsum(new_content) - 1
        shared = np.bincount(content[new_set], minlength=1)[content] > 1
        within, across = (
            (self.sampled * np.bincount(sets[chosen], minlength=num_sets)).tolist()
            for chosen in (~new_set, shared)
        )
        return within, across

    def most_repeated(self, limit: int) -> list[tuple[int, int, int]]:
        """Returns (number of copies, data set, document) for the most frequent documents, by their first
        copy."""
        hashes, sets, documents = np.concatenate(self._parts, axis=1)
        _, first, copies = np.unique(hashes, return_index=True, return_counts=True)
        most = np.argsort(-copies, kind="stable")[:limit]
        return [
            (int(copies[i]), int(sets[first[i]]), int(documents[first[i]])) for i in most if copies[i] > 1
        ]


def _blocks(dataset: IndexedDataset) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
    """Yields blocks of consecutive documents as (first document, tokens of each document)."""
    tokens = np.memmap(data_path(dataset.prefix), mode="r", dtype=dataset.dtype)
    for begin in range(0, len(dataset), _BLOCK_DOCUMENTS):
        part = slice(begin, begin + _BLOCK_DOCUMENTS)
        starts = dataset.pointers[part] // dataset.dtype.itemsize
        ends = starts + dataset.sizes[part]
        first = 0
        while first < len(ends):
            last = max(int(np.searchsorted(ends, starts[first] + _BLOCK_TOKENS, side="right")), first + 1)
            block = np.array(tokens[starts[first] : ends[last - 1]])
            yield begin + first, np.split(block, starts[first + 1 : last] - starts[first])
            first = last


def _digests(
    block: Sequence[npt.NDArray[Any]], sizes: npt.NDArray[Any], dtype: np.dtype[Any]
) -> npt.NDArray[np.int64]:
    """Returns a hash for each document; 0 for an empty one. dtype: the common dtype of token ids in all data
    sets."""
    digests = b"".join(
        hashlib.blake2b(document.astype(dtype, copy=False).data, digest_size=8).digest() for document in block
    )
    return np.where(sizes > 0, np.frombuffer(digests, np.int64), 0)


def _lengths(dataset: IndexedDataset) -> npt.NDArray[np.int64]:
    """Returns the numbers of documents and of tokens for each number of bits of a document's length, [2,
    33]."""
    counts = np.zeros((2, 33), np.int64)
    for first in range(0, len(dataset), _BLOCK_DOCUMENTS):
        sizes = dataset.sizes[first : first + _BLOCK_DOCUMENTS].astype(np.int64)
        bits = np.frexp(sizes.astype(np.float64))[1]
        counts[0] += np.bincount(bits, minlength=33)
        counts[1] += np.bincount(bits, sizes, minlength=33).astype(np.int64)
    return counts


def _spread(dataset: IndexedDataset, count: int) -> list[int]:
    """Returns up to `count` non-empty documents, spread evenly over the data set."""
    numbers = np.unique(np.linspace(0, len(dataset) - 1, 4 * count).astype(np.int64))
    full = numbers[dataset.sizes[numbers] > 0]
    chosen = full[np.unique(np.linspace(0, len(full) - 1, min(count, len(full))).astype(np.int64))]
    return [int(number) for number in chosen]


def _bytes_per_token(dataset: IndexedDataset, tokenizer: Tokenizer) -> float | None:
    """Returns the mean number of UTF-8 bytes per token in a sample of documents, without end-of-document
    tokens."""
    num_bytes = num_tokens = 0
    for document in _spread(dataset, _DECODED_DOCUMENTS):
        tokens = dataset.get(document, 0, min(int(dataset.sizes[document]), _DECODED_TOKENS))
        ids = [token for token in tokens.tolist() if token != tokenizer.eod]
        num_bytes += len(tokenizer.detokenize(ids).encode("utf-8", "replace"))
        num_tokens += len(ids)
    return num_bytes / num_tokens if num_tokens else None


def _example(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    size = int(dataset.sizes[document])
    ids = dataset.get(document, 0, min(size, _EXAMPLE_TOKENS)).tolist()
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.detokenize(ids)
    return {
        "prefix": dataset.prefix,
        "document": document,
        "tokens": size,
        "text": text[:_EXAMPLE_CHARACTERS]
        + ("..." if size > len(ids) or len(text) > _EXAMPLE_CHARACTERS else ""),
    }
