"""Peak memory of tensors on any device, including 'meta', where tensors of any size need no memory."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that operations create within its context. `peak` is the maximum.

    Earlier tensors and temporary memory inside an operation do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Callable, types: Sequence, args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given:
                storage = leaf.untyped_storage()
                given.add(_storage(leaf))
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
