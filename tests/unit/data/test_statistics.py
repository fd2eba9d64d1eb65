"""Statistics of token files (tools/verify_dataset.py --html) equal counts of all documents in Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data import statistics
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.statistics import DocumentHashes, dataset_statistics
from tests.unit.data.token_files import write_documents

Documents = list[list[int]]


def tokenizer() -> Any:
    """Returns a tokenizer whose tokens are two letters each. Token 0 ends a document."""
    return SimpleNamespace(
        eod=0, detokenize=lambda ids: "".join("<eod>" if i == 0 else f"{i:02d}" for i in ids)
    )


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Documents]:
    """Returns two data sets of different types, with empty documents, copies, and ids that both have."""
    generator = np.random.default_rng(5)
    sets: dict[str, Documents] = {}
    for name, dtype, count in (("a", "uint16", 900), ("b", "int32", 500)):
        documents = [
            [*generator.integers(1, 4, size).tolist(), 0] for size in generator.integers(0, 5, count)
        ]
        documents += [[], [7] * 70, []]
        sets[write_documents(tmp_path / name, documents, dtype)] = documents
    return sets


def test_numbers_equal_a_count_of_all_documents(
    sets: dict[str, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_BLOCK_TOKENS", 100)
    monkeypatch.setattr(statistics, "_BLOCK_DOCUMENTS", 150)
    found = dataset_statistics([IndexedDataset(prefix) for prefix in sets], tokenizer())
    everything = [tuple(document) for documents in sets.values() for document in documents]
    contents = {
        prefix: {tuple(document) for document in documents if document} for prefix, documents in sets.items()
    }
    for row, (prefix, documents) in zip(found["sets"], sets.items(), strict=True):
        sizes = [len(document) for document in documents]
        full = [tuple(document) for document in documents if document]
        (others,) = (content for other, content in contents.items() if other != prefix)
        expected = {
            "prefix": prefix,
            "documents": len(documents),
            "empty": sizes.count(0),
            "tokens": sum(sizes),
            "shortest": 0,
            "longest": 70,
            "tokenizer": None,
            "bytes_per_token": 2.0,
            "duplicates": len(full) - len(set(full)),
            "duplicates_of_others": sum(document in others for document in full),
        }
        assert {name: row[name] for name in expected} == expected
        assert row["duplicates"] > 100
    for row in found["lengths"]:
        least = row["shortest"]
        inside = [d for d in everything if least <= len(d) < max(2 * least, least + 1)]
        assert (row["documents"], row["tokens"]) == (len(inside), sum(map(len, inside)))
    assert sum(row["documents"] for row in found["lengths"]) == len(everything)
    assert found["lengths"][-1] == {"shortest": 64, "documents": 2, "tokens": 140}
    copies = Counter(document for document in everything if document)
    assert [row["copies"] for row in found["repeated"]] == [count for _, count in copies.most_common(10)]
    for row in (*found["repeated"], *found["examples"]):
        document = sets[row["prefix"]][row["document"]]
        assert row["tokens"] == len(document) and tokenizer().detokenize(document[:64]) == row["text"].rstrip(
            "."
        )
    assert len(found["examples"]) == 6 and found["sampled"] == 1


def test_the_hashes_of_many_documents_are_a_sample_of_bounded_size() -> None:
    """The sample keeps at most 8,192 of 300,000 documents, 100,000 of them copies, and still estimates the
    number of copies."""
    generator = np.random.default_rng(1)
    contents = generator.integers(1, 2**62, 200_000)
    documents = generator.permutation(np.concatenate((contents, contents[:100_000])))
    hashes = DocumentHashes(8192)
    for first in range(0, len(documents), 1000):
        hashes.add(0, first, documents[first : first + 1000])
        assert sum(part.shape[1] for part in hashes._parts) <= 8192
    assert hashes.sampled == 64
    ((duplicates,), (shared,)) = hashes.duplicates(1)
    assert duplicates == pytest.approx(100_000, rel=0.1) and shared == 0
    copies, number, document = hashes.most_repeated(1)[0]
    assert (copies, number) == (2, 0) and np.count_nonzero(documents == documents[document]) == 2
