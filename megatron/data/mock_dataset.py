"""The samples of --mock-data, which need no files."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.data.flags import SPLIT_NAMES
from megatron.data.sample import Sample


class MockDataset:
    """Random tokens of the vocabulary, int64 [seq_length + 1]. A sample is a function of the seed, the split
    and its number, so every layout and every resumed run reads equal samples.

    If `eod`, the end-of-document token, is known, a sample contains one end of a document on average.
    """

    has_loss_mask = False

    def __init__(
        self, name: str, num_samples: int, seq_length: int, seed: int, vocab_size: int, eod: int | None
    ) -> None:
        self.name = name
        self._num_samples, self._seq_length = num_samples, seq_length
        self._key = seed * len(SPLIT_NAMES) + SPLIT_NAMES.index(name)
        self._vocab_size, self._eod = vocab_size, eod

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, i: int) -> Sample:
        return Sample(self[i])

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} mock data, which have {len(self)}")
        # Uses the raw bits of Philox, which are equal in all versions of numpy. A Generator's numbers may
        # change.
        key = np.array([self._key, i], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(self._seq_length + 1)
        tokens = (bits % np.uint64(self._vocab_size)).astype(np.int64)
        if self._eod is not None:
            tokens[(bits >> np.uint64(32)) % np.uint64(self._seq_length) == 0] = self._eod
        return tokens
