"""Which samples go where. The order does not depend on the layout.

A global batch is the next `global_batch_size` samples of the order. It is read in micro-batches: number k
gives every data rank r its `micro_batch_size` samples, those from consumed + (k * dp_size + r) *
micro_batch_size on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def micro_batch_samples(
    consumed: int, micro_batch_size: int, num_micro_batches: int, dp_rank: int, dp_size: int
) -> npt.NDArray[np.int64]:
    """Sample numbers of one step on one data rank, [num_micro_batches, micro_batch_size].

    `consumed` samples were read before this step, over all data ranks.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data rank {dp_rank} of {dp_size}")
    starts = consumed + (np.arange(num_micro_batches, dtype=np.int64) * dp_size + dp_rank) * micro_batch_size
    return starts[:, None] + np.arange(micro_batch_size, dtype=np.int64)
