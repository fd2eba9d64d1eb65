"""Operators: functions that launch a kernel, and that the simulated accelerator counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=type[torch.autograd.Function])


class Operator(Generic[Arguments, Result]):
    """A function that launches a kernel, registered with PyTorch as `megatron::name`.

    A call through PyTorch's dispatcher takes 40 us of host time (measured 2026-11-26). Only dispatch modes,
    such as the simulated accelerator and FLOP counters, and compiled functions need it. All other calls go
    directly to the function.
    """

    def __init__(self, launch: Callable[Arguments, Result], name: str, mutates_args: Iterable[str]) -> None:
        self._launch = launch
        self._registered = torch.library.custom_op(f"megatron::{name}", launch, mutates_args=mutates_args)
        self.register_fake = self._registered.register_fake
        update_wrapper(self, launch)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self._registered(*args, **kwargs)
        return self._launch(*args, **kwargs)


def operator(
    name: str, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Makes an `Operator` of the decorated function. mutates_args: names of the arguments that it changes."""
    return lambda launch: Operator(launch, name, mutates_args)


def first_order(function: Function) -> Function:
    """Makes an autograd function that has no second derivative and ignores the transforms of torch.func (a
    class decorator). It replaces `once_differentiable` and the Python part of `apply`, which take 4 and 5 us
    of host time (measured 2026-11-26)."""
    compute = function.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{function.__name__} has no second derivative: remove create_graph=True")
        return compute(ctx, *grads)

    function.apply = staticmethod(super(torch.autograd.Function, function).apply)  # type: ignore[misc, method-assign]
    function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return function
