"""A sample of training data, and the interface of the data sets that have them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Sample(NamedTuple):
    """Consecutive tokens of one or several documents, for seq_length inputs and their labels."""

    tokens: npt.NDArray[np.int64]
    """[seq_length + 1]"""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[seq_length + 1]: whether a token counts in the loss when it is the label; None if all do."""
    document_ids: npt.NDArray[np.int64] | None = None
    """[seq_length + 1]: each token's document in the sample; None if end-of-document tokens separate them."""


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
