"""Assigns samples to data-parallel ranks, and builds the tensors of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.data.sample import Sample, SampleDataset
from megatron.errors import UserError

PREFETCH_PER_WORKER = 2


@dataclass(frozen=True)
class MicroBatch:
    """Consecutive samples of the run, for one forward and one backward pass.

    On pipeline ranks between the first and the last stage, which read no tokens, the tensors have seq 0.
    """

    samples: range
    """Numbers of these samples in the run. Dropout masks depend on the numbers."""
    tokens: Tensor
    """int64 [batch, seq]: the input tokens."""
    labels: Tensor
    """int64 [batch, seq]: for each input the next token."""
    loss_mask: Tensor
    """float32 [batch, seq]: 1 where the label counts in the loss, else 0."""
    document_ids: Tensor | None = None
    """int64 [batch, seq]: number of each token's document within its sample. None if end-of-document tokens
    separate the documents, or if the model does not need the numbers."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the first pipeline stage."""
        return (self.tokens,) if self.document_ids is None else (self.tokens, self.document_ids)

    @classmethod
    def from_rows(cls, rows: Tensor, first_sample: int, masked_token: int | None = None) -> MicroBatch:
        """Returns the micro-batch with the tokens `rows`, int64 [batch, seq + 1]. first_sample: number of the
        first row's sample in the run. masked_token: the loss mask is 0 where the input is this token,
        otherwise 1."""
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if masked_token is not None:
            loss_mask[tokens == masked_token] = 0.0
        return cls(range(first_sample, first_sample + len(rows)), tokens, labels, loss_mask)

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], first_sample: int, eod: int | None, masks_eod: bool, has_ids: bool
    ) -> MicroBatch:
        """Returns the micro-batch with these samples. first_sample: number of the first sample in the run.
        eod: the token that ends the documents of a sample without document ids. masks_eod: whether the loss
        mask is 0 where the input is `eod`. has_ids: whether the micro-batch has document ids."""
        rows = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        batch = cls.from_rows(rows, first_sample, eod if masks_eod else None)
        document_ids = []
        for row, sample in enumerate(samples):
            if sample.loss_mask is not None:
                batch.loss_mask[row] *= torch.from_numpy(sample.loss_mask[1:].astype(np.float32))
            if has_ids:
                ends = sample.tokens == eod
                ids = np.cumsum(ends) - ends if sample.document_ids is None else sample.document_ids
                document_ids.append(ids[:-1])
        return replace(batch, document_ids=torch.from_numpy(np.stack(document_ids))) if has_ids else batch

    def truncated(self, seq_length: int) -> MicroBatch:
        """Returns the micro-batch with only the first `seq_length` tokens of each sample."""
        if seq_length >= self.tokens.shape[1]:
            return self
        parts = (x[:, :seq_length].contiguous() for x in (self.tokens, self.labels, self.loss_mask))
        ids = None if self.document_ids is None else self.document_ids[:, :seq_length].contiguous()
        return replace(MicroBatch(self.samples, *parts), document_ids=ids)


class GPTBatchLoader:
    """Reads the micro-batches of one data-parallel rank, starting at any sample.

    On every layout a global batch consists of the next `global_batch_size` samples after the consumed ones.
    Micro-batch k of data-parallel rank r consists of the `micro_batch_size` samples from sample consumed + (k
    * dp_size + r) * micro_batch_size on, as in Megatron-LM.

    first_sample: number of the dataset's first sample in the run. reads_tokens: False for a rank that needs
    only the numbers of the samples. eod_mask_loss: whether the loss mask is 0 where the input token is `eod`.
    needs_document_ids: whether micro-batches have document ids, if the data set knows its documents.
    vocab_size: size of the vocabulary without padding; a token id at or above it raises UserError, because
    the data was made with a different tokenizer. num_workers: number of threads that prefetch micro-batches;
    0 for no prefetching. Threads suffice because the files are memory-mapped.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        eod: int | None = None,
        eod_mask_loss: bool = False,
        needs_document_ids: bool = False,
        vocab_size: int | None = None,
        num_workers: int = 0,
        first_sample: int = 0,
        reads_tokens: bool = True,
    ) -> None:
        if eod_mask_loss and eod is None:
            raise UserError(
                "--eod-mask-loss needs the end-of-document token: set the flags of a tokenizer, or remove "
                "--eod-mask-loss"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.masks_tokens = eod_mask_loss or dataset.has_loss_mask
        """Whether loss masks may contain zeros."""
        self._eod, self._masks_eod = eod, eod_mask_loss
        self._has_document_ids = needs_document_ids and dataset.has_loss_mask
        self._vocab_size = vocab_size
        self._first_sample, self._reads_tokens = first_sample, reads_tokens
        self._workers = ThreadPoolExecutor(num_workers, "data-prefetch") if num_workers > 0 else None
        self._num_prefetched = num_workers * PREFETCH_PER_WORKER
        self._pending: dict[int, Future[MicroBatch]] = {}  # key: first sample of the micro-batch

    def micro_batches(self, consumed_samples: int, global_batch_size: int) -> Iterator[MicroBatch]:
        """Returns the micro-batches of this rank for the training step after `consumed_samples` samples.

        The global batch size may change between steps. Raises UserError if it is not a multiple of
        micro_batch_size * dp_size, or if the dataset has fewer samples than the step needs.
        """
        per_micro_batch = self.micro_batch_size * self.dp_size
        if global_batch_size % per_micro_batch:
            raise UserError(
                f"global batch size {global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} times data-parallel size {self.dp_size}: change "
                "--global-batch-size or --rampup-batch-size"
            )
        consumed = consumed_samples - self._first_sample
        if consumed + global_batch_size > len(self.dataset):
            raise UserError(
                f"the {self.dataset.name} dataset has {len(self.dataset):,} samples, and this step reads "
                f"samples {consumed:,} to {consumed + global_batch_size:,}: the datasets "
                "were built for a shorter run, check --train-iters or --train-samples"
            )
        own = consumed + self.dp_rank * self.micro_batch_size
        return map(self._next, range(own, consumed + global_batch_size, per_micro_batch))

    def close(self) -> None:
        """Stops the prefetch threads."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _next(self, start: int) -> MicroBatch:
        if self._workers is None:
            return self._read(start)
        # Distance in samples between consecutive micro-batches of a rank, within a step and across steps.
        stride = self.micro_batch_size * self.dp_size
        wanted = range(start, start + (self._num_prefetched + 1) * stride, stride)
        for other in [key for key in self._pending if key not in wanted]:
            self._pending.pop(other).cancel()
        for key in wanted:
            if key not in self._pending and key + self.micro_batch_size <= len(self.dataset):
                self._pending[key] = self._workers.submit(self._read, key)
        return self._pending.pop(start).result()

    def _read(self, start: int) -> MicroBatch:
        if not self._reads_tokens:
            rows = torch.empty(self.micro_batch_size, 1, dtype=torch.int64)
            return MicroBatch.from_rows(rows, self._first_sample + start)
        samples = [self.dataset.sample(i) for i in range(start, start + self.micro_batch_size)]
        smallest = min(sample.tokens.min() for sample in samples)
        largest = max(sample.tokens.max() for sample in samples)
        if self._vocab_size is not None and not 0 <= smallest <= largest < self._vocab_size:
            raise UserError(
                f"the {self.dataset.name} data has token ids {smallest} to {largest}, expected "
                f"0 to {self._vocab_size - 1}: use the tokenizer that the data was preprocessed with"
            )
        return MicroBatch.from_samples(
            samples, self._first_sample + start, self._eod, self._masks_eod, self._has_document_ids
        )
