"""Operators (functions that launch a kernel, and that the simulated accelerator counts), and helpers with
which autograd functions need little host time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

from megatron.torch_versions import launches_directly

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=type[torch.autograd.Function])

# These names are private in torch: `megatron.torch_versions` lists what happens if torch lacks them.
is_in_torch_dispatch_mode = getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: True)
_active_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Operator(Generic[Arguments, Result]):
    """A function that launches a kernel, registered with PyTorch as `megatron::name`.

    A call through PyTorch's dispatcher takes 40 us of host time (measured 2026-11-26). Only compiled
    functions and dispatch modes, such as the simulated accelerator and FLOP counters, need the dispatcher.
    All other calls go directly to the function.

    With tensors without memory, which dispatch modes and the compiler pass, the function only allocates its
    results, because `Launch` does not launch for them. A function that does more needs `register_fake`.
    """

    def __init__(self, launch: Callable[Arguments, Result], name: str, mutates_args: Iterable[str]) -> None:
        self._launch = launch
        self._registered = torch.library.custom_op(f"megatron::{name}", launch, mutates_args=mutates_args)
        self._registered.register_fake(launch)
        self.register_fake = self._registered.register_fake
        self.register_autograd = self._registered.register_autograd
        update_wrapper(self, launch)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if is_in_torch_dispatch_mode() or torch.compiler.is_compiling():
            return self._registered(*args, **kwargs)
        return self._launch(*args, **kwargs)


def operator(
    name: str, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[Arguments, Result]], Operator[Arguments, Result]]:
    """Makes an `Operator` of the decorated function. mutates_args: names of the arguments that the function
    changes."""
    return lambda launch: Operator(launch, name, mutates_args)


class Launch:
    """A launch of a Triton kernel with fixed numbers. A call passes the tensors, then the numbers that
    change, and the grid unless it is fixed. Triton must not specialize the kernel for numbers that change:
    they are floats, or integers that the kernel lists in `do_not_specialize`.

    At each launch Triton examines all arguments and options to find the compiled variant of the kernel, which
    takes 13 to 24 us of host time (measured 2026-11-26). With fixed numbers the variant depends only on the
    tensors: on their device and dtypes, on which of them are None, and on which addresses are multiples of
    16. Triton performs the first launch and returns the variant. Later launches with aligned tensors of the
    same dtypes call this variant directly, with all arguments. If the launcher of the installed Triton
    version is unknown, Triton performs every launch.
    """

    def __init__(
        self, kernel: str, grid: tuple[int, int] | None, options: Mapping[str, Any], **numbers: Any
    ) -> None:
        """kernel: 'module.name' in this package; the arguments of a call are its first parameters. grid: None
        if each call passes the grid. options: options of Triton's compiler. numbers: the kernel's other
        arguments, which are numbers, texts, or tuples of numbers. An empty grid launches nothing."""
        self.name, self.grid, self.options, self.numbers = kernel, grid, options, numbers
        self._arguments: list[Any] = []
        self._variants: dict[tuple, Any] = {}

    @cached_property
    def kernel(self) -> Any:
        """The Triton function. Its module is imported on first use: triton is optional, and its import takes
        0.4 s."""
        module, _, name = self.name.partition(".")
        return getattr(import_module(f"megatron.kernels.{module}"), name)

    def __call__(self, *arguments: Tensor | float | None, grid: tuple[int, int] | None = None) -> None:
        first = arguments[0]
        assert first is not None and not isinstance(first, float | int)
        if isinstance(first, FakeTensor):
            return
        kinds: list[Any] = [first.device]
        addresses = 0
        for argument in arguments:
            if argument is None:
                kinds.append(None)
            elif isinstance(argument, float):
                kinds.append(float)
            elif isinstance(argument, int):
                kinds.append(argument.bit_length() > 31)  # Triton passes such integers in 64 bits
            else:
                kinds.append(argument.dtype)
                addresses |= argument.data_ptr()
        variant = None if addresses % 16 else self._variants.get(tuple(kinds))
        if variant is not None and grid is None:
            variant(*arguments, *self._arguments)
            return
        programs = (*(grid or self.grid or ()), 1)
        if 0 in programs:
            return
        if variant is not None:
            variant[programs](*arguments, *self._arguments)
            return
        is_current = not first.is_cuda or first.device.index == torch.cuda.current_device()
        assert is_current, f"Triton launches on the current device, which is not {first.device}"
        variant = self.kernel[programs](*arguments, **self.numbers, **self.options)
        # Triton's interpreter returns None.
        if variant is not None and not addresses % 16 and launches_directly():
            self._arguments = [self.numbers[name] for name in self.kernel.arg_names[len(arguments) :]]
            self._variants[tuple(kinds)] = variant[programs] if grid is None else variant


def first_order(function: Function) -> Function:
    """Decorates the class of an autograd function that has no second derivative and ignores the transforms of
    torch.func. It replaces `once_differentiable` and the Python part of `apply`, which take 4 and 5 us of
    host time (measured 2026-11-26)."""
    compute = function.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{function.__name__} has no second derivative: remove create_graph=True")
        return compute(ctx, *grads)

    function.apply = staticmethod(super(torch.autograd.Function, function).apply)  # type: ignore[misc, method-assign]
    function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return function


def keep_input(ctx: Any, x: Tensor) -> None:
    """Saves an input of an autograd function for the backward pass, like `ctx.save_for_backward(x)`, with two
    differences. First, hooks on saved tensors get `x` at once instead of when the function ends. Activation
    recomputation stops after the last saved tensor, so it then skips the product that follows in the
    function. Second, it takes 1 instead of 5 us of host time (measured 2026-11-26). The tensor must not be an
    output of the function: an output would never be freed.

    torch has no public function for the active hooks, nor for a tensor's version counter.
    """
    if _active_hooks is None:
        ctx.save_for_backward(x)
        return
    hooks = _active_hooks(False)
    if hooks is None:
        ctx.kept, ctx.unpack, ctx.version = x, None, x._version
    else:
        ctx.kept, ctx.unpack, ctx.version = hooks[0](x), hooks[1], None


def take_input(ctx: Any) -> Tensor:
    """Returns, in the backward pass, the tensor that `keep_input` has saved, and frees it. Raises
    RuntimeError in a second backward pass, or if the tensor was changed in place."""
    if _active_hooks is None:
        return ctx.saved_tensors[0]
    x, ctx.kept = ctx.kept, None
    if x is None:
        raise RuntimeError("a second backward pass needs an input that the first has freed")
    if ctx.unpack is not None:
        x = ctx.unpack(x)
    elif x._version != ctx.version:
        raise RuntimeError("an input that the backward pass needs was changed in place")
    return x
