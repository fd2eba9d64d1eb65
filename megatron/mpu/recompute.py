"""Recomputation of single operations whose outputs take little time to compute: norms and activations.

The linear layer after a norm or an activation saves its input, to compute the weight's gradient. The norm or
activation saves its own input, from which it can compute its output again. Therefore the context `recomputed`
replaces this output, among the tensors that autograd saves, with the function and its input. The backward
pass computes the output when the first linear layer needs it, and frees it after the last one has read it.
(Megatron-LM frees and refills the tensor instead, in `CheckpointWithoutOutput`; arXiv 2205.05198 describes
the idea.)

The recomputation runs the kernels of the forward pass on equal inputs, so no bit of a gradient changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_Kept = tuple[Tensor, int]
"""A tensor without a graph, and its version counter."""


def recomputed(
    function: Callable[[Tensor], Tensor], x: Tensor, output: Tensor, enabled: bool
) -> AbstractContextManager[None]:
    """Returns a context in which autograd saves `x` instead of output = function(x).

        normed = norm(x)
        with recomputed(norm, x, normed, enabled=True):
            y = linear(normed)

    function: must return equal bits each time. Memory is saved only if its own backward pass saves `x` and
    not the result. enabled: whether to recompute; if false, or without gradients, the context does nothing.
    The result and views of it are recomputed, while copies are stored. Outer hooks on saved tensors do not
    see the tensors of this context. The backward pass raises RuntimeError if `x` or another tensor saved in
    the context was changed in place.
    """
    is_new = enabled and torch.is_grad_enabled() and output is not x
    return _Recomputed(function, x, output) if is_new else nullcontext()


class _Recomputed:
    """The context of `recomputed`, with hooks on the tensors that autograd saves."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        self._output = output
        self._recipe = _Recipe(function, _kept(x))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        # The hooks and this object refer to each other, and would stay in memory until a garbage collection.
        del self._hooks, self._output

    def _pack(self, x: Tensor) -> _Kept | _View:
        if x.untyped_storage() is not self._output.untyped_storage():
            return _kept(x)
        self._recipe.readers += 1
        return _View(self._recipe, x)


class _Recipe:
    """Computes a tensor that several functions may read in the backward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor], kept: _Kept) -> None:
        self.readers = 0
        self._function, self._kept = function, kept
        self._result: Tensor | None = None

    @torch.no_grad()
    def read(self) -> Tensor:
        """Returns the tensor. It computes the tensor for the first reader, and frees it after the last
        one."""
        result = self._function(_unpack(self._kept)) if self._result is None else self._result
        self.readers -= 1
        self._result = result if self.readers > 0 else None
        return result


class _View:
    """A view of a recipe's result, with the shape and strides of the tensor that a function has saved."""

    def __init__(self, recipe: _Recipe, x: Tensor) -> None:
        self._recipe = recipe
        self._shape = x.size(), x.stride(), x.storage_offset()

    def read(self) -> Tensor:
        """Returns the view of the recipe's result."""
        return self._recipe.read().as_strided(*self._shape)


def _kept(x: Tensor) -> _Kept:
    return x.detach(), x._version


def _unpack(kept: _Kept | _View) -> Tensor:
    if isinstance(kept, _View):
        return kept.read()
    x, version = kept
    if x._version != version:
        raise RuntimeError("a tensor that the backward pass needs was changed in place")
    return x
