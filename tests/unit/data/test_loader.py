"""Tests the assignment of samples to ranks, and the tensors of micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.loader import GPTBatchLoader, MicroBatch
from megatron.errors import UserError
from tests.unit.data.token_files import build, data_config, numbered_documents, write_documents

SEQ_LENGTH = 8


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    data = data_config(write_documents(tmp_path / "data", numbered_documents([37, 20, 51, 9, 40])))
    train = build(data, SEQ_LENGTH, 3, (64, 0, 0)).train
    assert isinstance(train, GPTDataset)
    return train


def samples_of(dataset: GPTDataset, consumed: int, size: int, **options: int) -> list[list[int]]:
    loader = GPTBatchLoader(dataset, reads_tokens=False, **options)  # type: ignore[arg-type]
    found = list(loader.micro_batches(consumed, size))
    assert all(batch.tokens.shape == (options["micro_batch_size"], 0) for batch in found)
    return [list(batch.samples) for batch in found]


def test_samples_of_a_rank_equal_megatrons(dataset: GPTDataset) -> None:
    found = samples_of(dataset, 20, 12, micro_batch_size=2, dp_rank=1, dp_size=2)
    assert found == [[22, 23], [26, 27], [30, 31]]


@pytest.mark.parametrize("micro_batch_size, dp_size", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (8, 1)])
def test_a_global_batch_is_the_same_samples_on_every_layout(
    dataset: GPTDataset, micro_batch_size: int, dp_size: int
) -> None:
    sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size}
    ranks = [samples_of(dataset, 24, 8, dp_rank=rank, **sizes) for rank in range(dp_size)]
    in_order = [sample for number in zip(*ranks, strict=True) for batch in number for sample in batch]
    assert in_order == list(range(24, 32))


def test_the_data_may_begin_with_a_later_sample_of_the_run(dataset: GPTDataset) -> None:
    plain = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=0, dp_size=1)
    later = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=0, dp_size=1, first_sample=100)
    for ours, theirs in zip(run(later, [(104, 8)]), run(plain, [(4, 8)]), strict=True):
        assert [sample - 100 for sample in ours.samples] == list(theirs.samples)
        assert torch.equal(ours.tokens, theirs.tokens)


def run(loader: GPTBatchLoader, steps: list[tuple[int, int]]) -> list[MicroBatch]:
    batches = [batch for consumed, size in steps for batch in loader.micro_batches(consumed, size)]
    loader.close()
    return batches


def test_tensors_are_tokens_labels_and_mask(dataset: GPTDataset) -> None:
    loader = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=1, dp_size=2)
    batches = run(loader, [(4, 8)])
    assert len(batches) == 2
    for batch, first in zip(batches, (6, 10), strict=True):
        tokens, labels, mask = batch.tokens, batch.labels, batch.loss_mask
        assert batch.samples == range(first, first + 2)
        assert tokens.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
        assert tokens.shape == labels.shape == mask.shape == (2, SEQ_LENGTH)
        assert tokens.is_contiguous() and labels.is_contiguous()
        for row, number in enumerate((first, first + 1)):
            assert tokens[row].tolist() == dataset[number][:-1].tolist()
            assert labels[row].tolist() == dataset[number][1:].tolist()
        assert bool((mask == 1).all())


def test_loss_mask_is_0_at_the_end_of_document_token(dataset: GPTDataset) -> None:
    eod = int(dataset[0][3])
    loader = GPTBatchLoader(dataset, micro_batch_size=1, dp_rank=0, dp_size=1, eod=eod, eod_mask_loss=True)
    [batch] = run(loader, [(0, 1)])
    assert torch.equal(batch.loss_mask == 0, batch.tokens == eod)
    assert batch.loss_mask[0, 3] == 0
    unmasked = GPTBatchLoader(dataset, micro_batch_size=1, dp_rank=0, dp_size=1, eod=eod)
    assert bool((run(unmasked, [(0, 1)])[0].loss_mask == 1).all())


@pytest.mark.parametrize("workers", [1, 3])
def test_prefetching_does_not_change_the_batches(dataset: GPTDataset, workers: int) -> None:
    # A batch that grows, then an evaluation's jump back, then the end of the data.
    end = len(dataset)
    steps = [(0, 4), (4, 8), (12, 16), (0, 4), (2, 4), (end - 4, 4)]

    def read(num_workers: int) -> list[MicroBatch]:
        loader = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=1, dp_size=2, num_workers=num_workers)
        return run(loader, steps)

    for plain, ahead in zip(read(0), read(workers), strict=True):
        assert plain.samples == ahead.samples
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(getattr(plain, name), getattr(ahead, name))


@pytest.mark.parametrize("workers", [0, 2])
def test_too_few_samples_are_an_error_before_the_step(dataset: GPTDataset, workers: int) -> None:
    loader = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=workers)
    with pytest.raises(UserError, match=f"has {len(dataset)} samples.*--train-samples"):
        loader.micro_batches(len(dataset) - 2, 4)
    loader.close()


def test_an_indivisible_global_batch_is_refused(dataset: GPTDataset) -> None:
    loader = GPTBatchLoader(dataset, micro_batch_size=2, dp_rank=0, dp_size=2)
    with pytest.raises(
        UserError, match="global batch size 6 .*--micro-batch-size 2 times data-parallel size 2"
    ):
        loader.micro_batches(0, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_beyond_the_vocabulary_are_refused(dataset: GPTDataset, workers: int) -> None:
    loader = GPTBatchLoader(
        dataset, micro_batch_size=8, dp_rank=0, dp_size=1, vocab_size=100, num_workers=workers
    )
    with pytest.raises(UserError, match="expected 0 to 99: .*tokenizer"):
        run(loader, [(0, 16)])
    loader.close()


def test_masking_without_a_tokenizer_is_refused(dataset: GPTDataset) -> None:
    with pytest.raises(UserError, match="--eod-mask-loss"):
        GPTBatchLoader(dataset, micro_batch_size=1, dp_rank=0, dp_size=1, eod_mask_loss=True)
