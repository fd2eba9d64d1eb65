"""The order of samples: document, sample and shuffle index, computed as in Megatron.

The same data, seed, sequence length and number of samples give Megatron's arrays. They are computed in this
order from one `numpy.random.RandomState(seed)`:

document index  The documents of all epochs, shuffled together. If less than 95 % of the last epoch is used,
                the last epoch is shuffled separately and appended. Then no document is repeated before all
                documents have been read.
sample index    The documents are concatenated in this order and split every seq_length tokens. Row i is the
                first token of sample i (position in the document index, offset in that document). Row i + 1
                is its last token: a sample has seq_length + 1 tokens and shares one with the next sample.
shuffle index   A permutation of the samples. A separate last epoch is permuted separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# As in Megatron-DeepSpeed of BigScience. NVIDIA's Megatron-LM has 0.80.
SEPARATE_LAST_EPOCH_THRESHOLD = 0.95


@dataclass(frozen=True)
class EpochPlan:
    """The number of epochs over the documents of a split, and the samples that they give."""

    num_epochs: int
    tokens_per_epoch: int
    total_samples: int
    """Complete samples in all epochs, at least the requested number."""
    samples_before_last_epoch: int
    """Complete samples in all epochs but the last."""
    separate_last_epoch: bool
    """Whether the last epoch is shuffled separately."""


@dataclass(frozen=True)
class SampleIndex:
    """The document, sample and shuffle index."""

    documents: npt.NDArray[Any]
    """Document index, [num_epochs * documents]: document numbers."""
    samples: npt.NDArray[Any]
    """Sample index, [total_samples + 1, 2]: position in `documents`, token offset in that document."""
    shuffle: npt.NDArray[Any]
    """Shuffle index, [total_samples]: row of `samples` for each sample in training order."""


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """Plan at least `num_samples` samples of `seq_length` + 1 tokens; adjacent samples share one token.

    Raises ValueError unless all arguments are positive.
    """
    if tokens_per_epoch < 1 or seq_length < 1 or num_samples < 1:
        raise ValueError(f"{tokens_per_epoch} tokens, sequence length {seq_length}, {num_samples} samples")
    num_epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)
    before_last = max(((num_epochs - 1) * tokens_per_epoch - 1) // seq_length, 0)
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    return EpochPlan(
        num_epochs=num_epochs,
        tokens_per_epoch=tokens_per_epoch,
        total_samples=(num_epochs * tokens_per_epoch - 1) // seq_length,
        samples_before_last_epoch=before_last,
        separate_last_epoch=num_epochs > 1
        and num_samples - before_last < int(SEPARATE_LAST_EPOCH_THRESHOLD * samples_per_epoch),
    )


def build_sample_order(
    sizes: npt.NDArray[Any], documents: range, seq_length: int, seed: int, plan: EpochPlan
) -> SampleIndex:
    """Compute the three arrays for `documents` of a dataset. sizes: tokens of each of its documents."""
    generator = np.random.RandomState(seed)
    order = build_document_index(documents, plan, generator)
    samples = build_sample_index(sizes, order, seq_length, plan.total_samples)
    return SampleIndex(order, samples, build_shuffle_index(plan, generator))


def build_document_index(
    documents: range, plan: EpochPlan, generator: np.random.RandomState
) -> npt.NDArray[Any]:
    """The shuffled documents of all epochs, [num_epochs * documents]."""
    epoch = np.arange(documents.start, documents.stop, dtype=_index_dtype(documents.stop))
    last = 1 if plan.separate_last_epoch else 0
    order = np.tile(epoch, plan.num_epochs - last)
    generator.shuffle(order)
    if last:
        generator.shuffle(epoch)
        order = np.concatenate((order, epoch))
    return order


def build_sample_index(
    sizes: npt.NDArray[Any], document_index: npt.NDArray[Any], seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    """The first token of each sample and the last token of the last sample, [num_samples + 1, 2].

    Row: position in `document_index`, token offset in that document. The documents must have at least
    num_samples * seq_length + 1 tokens. Row 0 is the first document, also if it is empty. No other row refers
    to an empty document.
    """
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, boundaries, side="right")
    positions[0] = 0
    starts = ends[positions] - sizes[document_index[positions]]
    samples = np.empty((num_samples + 1, 2), dtype=_index_dtype(len(document_index)))
    samples[:, 0] = positions
    samples[:, 1] = boundaries - starts
    return samples


def build_shuffle_index(plan: EpochPlan, generator: np.random.RandomState) -> npt.NDArray[Any]:
    """A permutation of the rows of the sample index, [total_samples]."""
    total = plan.total_samples
    order = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    first = plan.samples_before_last_epoch if plan.separate_last_epoch else total
    generator.shuffle(order[:first])
    if first < total:
        generator.shuffle(order[first:])
    return order


def _index_dtype(limit: int) -> type[np.signedinteger[Any]]:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64
