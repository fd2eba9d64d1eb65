"""Micro-batches of tensors in the format of DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch

from megatron.config import ConfigError
from megatron.data.blended_dataset import SampleDataset
from megatron.data.sampler import micro_batch_samples

# (tokens int64 [batch, seq], (labels int64 [batch, seq], loss_mask float32 [batch, seq]))
MicroBatch: TypeAlias = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]

PREFETCH_PER_WORKER = 2


class GPTBatchLoader:
    """Reads the micro-batches of one data-parallel rank, starting at any sample.

    Labels are the tokens shifted by one. The loss mask is 1; with `eod_mask_loss` it is 0 where the input
    token is `eod`. `vocab_size` is the vocabulary size without padding: a token id at or above it raises
    ConfigError, since the data was made with another tokenizer. With `num_workers` > 0, as many threads
    prefetch micro-batches. Threads suffice because the files are memory-mapped.
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
    ) -> None:
        if eod_mask_loss and eod is None:
            raise ConfigError(
                "--eod-mask-loss needs the end-of-document token: set the flags of a tokenizer, or drop it"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._masked_token = eod if eod_mask_loss else None
        self._vocab_size = vocab_size
        self._workers = ThreadPoolExecutor(num_workers, "data-prefetch") if num_workers > 0 else None
        self._num_prefetched = num_workers * PREFETCH_PER_WORKER
        self._pending: dict[int, Future[MicroBatch]] = {}  # by the micro-batch's first sample

    def micro_batches(self, consumed_samples: int, global_batch_size: int) -> Iterator[MicroBatch]:
        """The micro-batches of this rank for the training step after `consumed_samples` samples.

        The global batch size may change between steps. Raises ConfigError if it is not a multiple of
        micro_batch_size * dp_size, or if the dataset has fewer samples than the step needs.
        """
        per_micro_batch = self.micro_batch_size * self.dp_size
        if global_batch_size % per_micro_batch:
            raise ConfigError(
                f"global batch size {global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} times data-parallel size {self.dp_size}: change "
                "--global-batch-size or --rampup-batch-size"
            )
        if consumed_samples + global_batch_size > len(self.dataset):
            raise ConfigError(
                f"the {self.dataset.name} dataset has {len(self.dataset):,} samples, and this step reads "
                f"samples {consumed_samples:,} to {consumed_samples + global_batch_size:,}: the datasets "
                "were built for a shorter run, check --train-iters or --train-samples"
            )
        steps = micro_batch_samples(
            consumed_samples,
            self.micro_batch_size,
            global_batch_size // per_micro_batch,
            self.dp_rank,
            self.dp_size,
        )
        return (self._next(int(samples[0])) for samples in steps)

    def close(self) -> None:
        """Stop the prefetch threads."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _next(self, start: int) -> MicroBatch:
        if self._workers is None:
            return self._read(start)
        # The distance between consecutive micro-batches of a rank, also across steps.
        stride = self.micro_batch_size * self.dp_size
        wanted = range(start, start + (self._num_prefetched + 1) * stride, stride)
        for other in [key for key in self._pending if key not in wanted]:
            self._pending.pop(other).cancel()
        for key in wanted:
            if key not in self._pending and key + self.micro_batch_size <= len(self.dataset):
                self._pending[key] = self._workers.submit(self._read, key)
        return self._pending.pop(start).result()

    def _read(self, start: int) -> MicroBatch:
        samples = np.stack([self.dataset[i] for i in range(start, start + self.micro_batch_size)])
        if self._vocab_size is not None and not 0 <= samples.min() <= samples.max() < self._vocab_size:
            raise ConfigError(
                f"the {self.dataset.name} data has token ids {samples.min()} to {samples.max()}, expected "
                f"0 to {self._vocab_size - 1}: use the tokenizer that the data was preprocessed with"
            )
        block = torch.from_numpy(samples)
        tokens, labels = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if self._masked_token is not None:
            loss_mask[tokens == self._masked_token] = 0.0
        return tokens, (labels, loss_mask)


def truncated(micro_batches: Iterator[MicroBatch], seq_length: int) -> Iterator[MicroBatch]:
    """Truncate tokens, labels and loss masks to the first `seq_length` tokens of each sample."""
    for tokens, (labels, mask) in micro_batches:
        if seq_length < tokens.shape[1]:
            tokens, labels, mask = (x[:, :seq_length].contiguous() for x in (tokens, labels, mask))
        yield tokens, (labels, mask)
