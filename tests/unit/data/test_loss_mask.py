"""Tests loss masks of token files: samples, blends, micro-batches, stamps, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.commands import merge_datasets
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.gpt_dataset import data_fingerprint, one_epoch
from megatron.data.indexed_dataset import IndexedDataset, check_loss_mask, loss_mask_prefix
from megatron.data.loader import GPTBatchLoader
from megatron.data.splits import verify_token_files
from megatron.errors import UserError
from megatron.training.data import loss_mask_note
from tests.unit.data.token_files import build, data_config, numbered_documents, write_documents

SIZES, SEQ, EOD = [5, 9, 1, 12, 4, 7], 8, 3


def counts_of(document: list[int]) -> list[int]:
    """Returns a document's loss mask: all tokens after the second count, except every fourth."""
    return [int(i > 1 and token % 4 != 0) for i, token in enumerate(document)]


def write_masked(prefix: Path, sizes: list[int] = SIZES, mask_sizes: list[int] | None = None) -> str:
    documents = numbered_documents(sizes)
    with IndexedDatasetBuilder(prefix, "uint16", has_loss_mask=mask_sizes is None) as builder:
        for document in documents:
            builder.add_documents(np.array(document), [len(document)], counts_of(document))
        builder.finalize(lambda digests: write_record(prefix, digests))
    if mask_sizes is not None:
        write_documents(Path(loss_mask_prefix(str(prefix))), numbered_documents(mask_sizes), "uint8")
    return str(prefix)


def write_record(prefix: Path, digests: dict[str, str]) -> None:
    record = {"tokenizer_type": "t", "vocab_size": 99, "vocabulary_sha256": "0", **digests}
    Path(f"{prefix}.tokenizer.json").write_text(json.dumps(record))


def test_whole_documents_of_a_sample_count_by_their_mask(tmp_path: Path) -> None:
    """Checks every token of one epoch in each sample that contains it. The first token of a document never
    counts, nor does any token of a document that began before the sample."""
    data = IndexedDataset(write_masked(tmp_path / "a"))
    samples = one_epoch(data, "all", range(len(SIZES)), SEQ, seed=1)
    starts = {int(document[0]): document for document in numbered_documents(SIZES)}
    counted = 0
    for i in range(len(samples)):
        tokens, counts, ids = samples.sample(i)
        assert np.array_equal(tokens, samples[i]) and counts is not None and ids is not None
        expected, document, number = [], None, -1
        for position, token in enumerate(tokens.tolist()):
            if token in starts or position == 0:
                document, number = starts.get(token), number + 1
            is_counted = document is not None and counts_of(document)[token - document[0]] == 1
            expected.append((is_counted and token != document[0], number))
        assert list(zip(counts.tolist(), ids.tolist(), strict=True)) == expected
        counted += int(counts.sum())
    assert counted > 5


def test_micro_batches_of_a_blend_have_masks_and_documents(tmp_path: Path) -> None:
    """All tokens of the component without a mask count, and its documents end with the end-of-document
    token."""
    masked, plain = write_masked(tmp_path / "a"), write_documents(tmp_path / "b", [[50, 51, EOD, 53] * 20])
    config = data_config("1", masked, "1", plain)
    blend = build(config, SEQ, 1, (8, 0, 0)).train
    assert blend is not None and blend.has_loss_mask
    options = {"micro_batch_size": 4, "dp_rank": 0, "dp_size": 1, "eod": EOD}
    loader = GPTBatchLoader(blend, needs_document_ids=True, **options)  # type: ignore[arg-type]
    assert loader.masks_tokens
    kinds = set()
    for batch in loader.micro_batches(0, 8):
        assert batch.document_ids is not None and batch.document_ids.shape == (4, SEQ)
        for row, i in enumerate(batch.samples):
            sample = blend.sample(i)
            ends = sample.tokens == EOD
            ids = np.cumsum(ends) - ends if sample.document_ids is None else sample.document_ids
            counts = np.ones(SEQ + 1) if sample.loss_mask is None else sample.loss_mask
            assert batch.document_ids[row].tolist() == ids[:-1].tolist()
            assert batch.loss_mask[row].tolist() == counts[1:].tolist()
            kinds.add(sample.loss_mask is None)
        assert [x.shape for x in batch.truncated(4).inputs] == [(4, 4), (4, 4)]
    assert kinds == {False, True}
    without = GPTBatchLoader(blend, **options)  # type: ignore[arg-type]
    assert len(next(without.micro_batches(0, 4)).inputs) == 1
    fingerprint = data_fingerprint(config, SEQ, 1, 8)
    assert fingerprint["loss_mask"] == [True, False]
    assert "loss_mask" not in data_fingerprint(data_config(plain), SEQ, 1, 8)


def test_a_mask_that_does_not_fit_or_is_lost_is_named(tmp_path: Path) -> None:
    for name, sizes, reason in (
        ("number", [38], "has 1 documents with 38 numbers of type uint8, expected 6 with 38"),
        ("sizes", [9, 5, 1, 12, 4, 7], "document 0 has 9 numbers, expected 5"),
    ):
        prefix = write_masked(tmp_path / name, mask_sizes=sizes)
        with pytest.raises(UserError, match=reason):
            check_loss_mask(IndexedDataset(prefix), {})
    prefix = write_masked(tmp_path / "a")
    counted = sum(sum(counts_of(document)) for document in numbered_documents(SIZES))
    share = f"{counted / sum(SIZES):.1%} of its first {sum(SIZES)} tokens count"
    assert share in loss_mask_note(IndexedDataset(prefix))
    stamp = verify_token_files(data_config(prefix))
    stamp.write()
    for suffix in (".bin", ".idx"):
        Path(loss_mask_prefix(prefix) + suffix).unlink()
    with pytest.raises(UserError, match="its loss mask, .*a_loss_mask.bin, does not exist"):
        verify_token_files(data_config(prefix))


def test_only_data_of_one_kind_are_merged(tmp_path: Path) -> None:
    masked, plain = write_masked(tmp_path / "a"), write_documents(tmp_path / "b", [[1, 2]])
    with pytest.raises(UserError, match="a has a loss mask, .*b has none: merge only data of one kind"):
        merge_datasets.merge([masked, plain], str(tmp_path / "c"))
    merge_datasets.merge([masked, masked], str(tmp_path / "c"))
    merged = IndexedDataset(tmp_path / "c")
    assert merged.loss_mask is not None and merged.loss_mask.num_tokens == 2 * sum(SIZES)
    merge_datasets.merge([plain, plain], str(tmp_path / "c"))
    assert IndexedDataset(tmp_path / "c").loss_mask is None
