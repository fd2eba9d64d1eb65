"""Assignment of samples to data-parallel ranks and micro-batches, as in Megatron.

A global batch is the next `global_batch_size` samples after the consumed ones, on every layout. Micro-batch k
of data-parallel rank r consists of `micro_batch_size` consecutive samples, starting at sample
consumed + (k * dp_size + r) * micro_batch_size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def micro_batch_samples(
    consumed: int, micro_batch_size: int, num_micro_batches: int, dp_rank: int, dp_size: int
) -> npt.NDArray[np.int64]:
    """Sample numbers of one step on one data-parallel rank, [num_micro_batches, micro_batch_size].

    consumed: samples read before this step by all ranks together.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data-parallel rank {dp_rank}, expected 0 to {dp_size - 1}")
    starts = consumed + (np.arange(num_micro_batches, dtype=np.int64) * dp_size + dp_rank) * micro_batch_size
    return starts[:, None] + np.arange(micro_batch_size, dtype=np.int64)
