"""Micro-batches: the assignment of samples to data-parallel ranks, and the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data.blended_dataset import SampleDataset
from megatron.errors import UserError

PREFETCH_PER_WORKER = 2


@dataclass(frozen=True)
class MicroBatch:
    """Consecutive samples of the run, for one forward and one backward pass.

    On pipeline ranks between the first and the last stage, which read no tokens, seq is 0.
    """

    samples: range
    """Numbers of the samples in the run. Dropout masks depend on these numbers."""
    tokens: Tensor
    """int64 [batch, seq]"""
    labels: Tensor
    """int64 [batch, seq]: the tokens shifted by one."""
    loss_mask: Tensor
    """float32 [batch, seq]"""

    @classmethod
    def from_rows(cls, rows: Tensor, first_sample: int, masked_token: int | None = None) -> MicroBatch:
        """Returns the micro-batch with the tokens `rows`, int64 [batch, seq + 1], of the samples from
        `first_sample` on. masked_token: the loss mask is 0 where the input is this token, otherwise 1."""
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if masked_token is not None:
            loss_mask[tokens == masked_token] = 0.0
        return cls(range(first_sample, first_sample + len(rows)), tokens, labels, loss_mask)

    def truncated(self, seq_length: int) -> MicroBatch:
        """Returns the first `seq_length` tokens of each sample."""
        if seq_length >= self.tokens.shape[1]:
            return self
        parts = (x[:, :seq_length].contiguous() for x in (self.tokens, self.labels, self.loss_mask))
        return MicroBatch(self.samples, *parts)


class GPTBatchLoader:
    """Reads the micro-batches of one data-parallel rank, starting at any sample.

    A global batch is the next `global_batch_size` samples after the consumed ones, on every layout.
    Micro-batch k of data-parallel rank r is the `micro_batch_size` samples from sample
    consumed + (k * dp_size + r) * micro_batch_size on, as in Megatron-LM.

    first_sample: number of the dataset's first sample in the run. reads_tokens: False for a rank that needs
    only the numbers of the samples. eod_mask_loss: whether the loss mask is 0 where the input token is `eod`.
    vocab_size: size of the vocabulary without padding; a token id at or above it raises UserError, since the
    data was made with a different tokenizer. num_workers: number of threads that prefetch micro-batches; 0
    for none. Threads suffice because the files are memory-mapped.
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
        self._masked_token = eod if eod_mask_loss else None
        self._vocab_size = vocab_size
        self._first_sample, self._reads_tokens = first_sample, reads_tokens
        self._workers = ThreadPoolExecutor(num_workers, "data-prefetch") if num_workers > 0 else None
        self._num_prefetched = num_workers * PREFETCH_PER_WORKER
        self._pending: dict[int, Future[MicroBatch]] = {}  # by the micro-batch's first sample

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
        # The distance between consecutive micro-batches of a rank, within a step and across steps.
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
        samples = np.stack([self.dataset[i] for i in range(start, start + self.micro_batch_size)])
        if self._vocab_size is not None and not 0 <= samples.min() <= samples.max() < self._vocab_size:
            raise UserError(
                f"the {self.dataset.name} data has token ids {samples.min()} to {samples.max()}, expected "
                f"0 to {self._vocab_size - 1}: use the tokenizer that the data was preprocessed with"
            )
        return MicroBatch.from_rows(torch.from_numpy(samples), self._first_sample + start, self._masked_token)
