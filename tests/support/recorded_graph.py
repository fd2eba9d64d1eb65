"""An accelerator's graph on a CPU: it records the operations of a pass, and repeats them without Python code.

As with a CUDA graph, a replay uses the addresses and the numbers of the capture, and a capture changes no
memory outside of the graph. Unlike a CUDA graph, this graph keeps all memory that it reads alive. `outside`
has the addresses of memory that the graph has not allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HOST_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}


def storages(values: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]


class RecordedGraph(TorchDispatchMode):
    """Records the operations that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.outside: set[int] = set()
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} makes the host wait for the device"
        self.outside |= {x.data_ptr() for x in storages((args, kwargs))} - self._made
        self._keep_written(func, args, kwargs)
        found = func(*args, **kwargs)
        self._made |= {x.data_ptr() for x in storages(found)} - self.outside
        self.calls.append((func, args, kwargs, found))
        return found

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copies the memory outside of the graph that an operation is about to write."""
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for storage in storages(values.get(argument.name)):
                    if storage.data_ptr() in self.outside and storage.data_ptr() not in self._before:
                        with _disable_current_modes():
                            self._before[storage.data_ptr()] = storage, storage.clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            addresses = {x.data_ptr() for x in storages((args, kwargs))}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in addresses:
                    old.copy_(new)


@contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """Gives the accelerator of this process graphs. Yields the list of graphs that were made."""
    made: list[RecordedGraph] = []

    def create() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    accelerator = get_accelerator()
    with (
        mock.patch.object(accelerator, "create_graph", create),
        mock.patch.object(accelerator, "capture_to_graph", lambda graph: graph),
        mock.patch.object(accelerator, "replay_graph", RecordedGraph.replay),
    ):
        yield made
