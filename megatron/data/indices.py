"""The order in which samples are read: Megatron's, for the same data, seed, sequence length and number of
samples.

Three arrays, made in this order from one `numpy.random.RandomState(seed)`:

document index  The documents of all epochs, shuffled together. If less than 95 % of the last epoch is used,
                the last epoch is shuffled separately and appended, so that no document is repeated before
                all documents were read.
sample index    The documents are concatenated in that order and split every seq_length tokens. Row i holds
                the start of sample i (position in the document index, token in that document). Row i + 1
                holds its last token: a sample has seq_length + 1 tokens and shares one with the next.
shuffle index   The shuffled order of the samples; the last epoch again separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# As in BigScience's fork; NVIDIA's Megatron-LM has 0.80.
LAST_EPOCH_CUTOFF = 0.95


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are passed over to make a number of samples."""

    num_epochs: int
    tokens_per_epoch: int
    total_samples: int
    """Whole samples in all epochs: at least as many as were asked for."""
    samples_before_last_epoch: int
    """Whole samples in all epochs but the last."""
    separate_last_epoch: bool
    """The last epoch is shuffled apart."""


@dataclass(frozen=True)
class SampleIndex:
    """The three arrays."""

    documents: npt.NDArray[Any]
    """[epochs * documents]: numbers of documents."""
    samples: npt.NDArray[Any]
    """[total_samples + 1, 2]: place in `documents`, and token in that document."""
    shuffle: npt.NDArray[Any]
    """[total_samples]: row of `samples` for each step of the order."""


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """Plan `num_samples` (>= 1) samples of `seq_length` + 1 tokens, neighbours sharing one token."""
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
        and num_samples - before_last < int(LAST_EPOCH_CUTOFF * samples_per_epoch),
    )


def build_sample_order(
    sizes: npt.NDArray[Any], documents: range, seq_length: int, seed: int, plan: EpochPlan
) -> SampleIndex:
    """Make the three arrays for `documents` of a dataset with `sizes` tokens per document."""
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
    """Where samples begin, [num_samples + 1, 2]; the documents in order must hold num_samples * seq_length +
    1 tokens.

    A boundary lies in the document that holds its token, so never in an empty one, except the first: that is
    the first document, whatever its size.
    """
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, boundaries, side="right")
    places[0] = 0
    starts = ends[places] - sizes[document_index[places]]
    samples = np.empty((num_samples + 1, 2), dtype=_index_dtype(len(document_index)))
    samples[:, 0] = places
    samples[:, 1] = boundaries - starts
    return samples


def build_shuffle_index(plan: EpochPlan, generator: np.random.RandomState) -> npt.NDArray[Any]:
    """The shuffled numbers of all samples, [total_samples]."""
    total = plan.total_samples
    order = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    first = plan.samples_before_last_epoch if plan.separate_last_epoch else total
    generator.shuffle(order[:first])
    if first < total:
        generator.shuffle(order[first:])
    return order


def _index_dtype(limit: int) -> type[np.signedinteger[Any]]:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64
