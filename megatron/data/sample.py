"""A sample of training data, and the interface of datasets of samples."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Sample(NamedTuple):
    """Consecutive tokens of one or more documents: seq_length inputs and their labels."""

    tokens: npt.NDArray[np.int64]
    """[seq_length + 1]: token ids. The labels are the inputs shifted by one."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[seq_length + 1]: whether a token counts in the loss when it is the label. None if all tokens count."""
    document_ids: npt.NDArray[np.int64] | None = None
    """[seq_length + 1]: number of each token's document within the sample. None if end-of-document tokens
    separate the documents."""


class SampleDataset(Protocol):
    """A map-style dataset of one split. Training reads the samples in order."""

    @property
    def name(self) -> str:
        """Name of the split or of the weighted group."""

    @property
    def has_loss_mask(self) -> bool:
        """Whether a sample may have a loss mask and document ids."""

    def __len__(self) -> int: ...

    def sample(self, i: int) -> Sample: ...

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        """Returns the tokens of sample i, [seq_length + 1]."""
