"""torch.compile, and the functions that it does not trace.

As decorators, `torch.compiler.disable` and `assume_constant_result` would load the compiler at every launch,
which doubles the import time. Instead `not_compiled` and `constant_when_compiled` mark a function, and
`compile_in_place` decorates the marked functions.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_marked: list["_Marked"] = []


class _Marked:
    """A marked function, and the function that is called instead of it in compiled modules."""

    def __init__(self, function: Callable, is_constant: bool) -> None:
        self.function = self.called = function
        self.is_constant = is_constant


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Marks `function` to run uncompiled inside compiled modules."""
    return _mark(function, is_constant=False)


def constant_when_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Marks `function` to run while a module is compiled. Its result becomes a constant of the graph. Its
    arguments must be constants."""
    return _mark(function, is_constant=True)


def _mark(function: Callable[Arguments, Result], is_constant: bool) -> Callable[Arguments, Result]:
    marked = _Marked(function, is_constant)
    _marked.append(marked)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return marked.called(*args, **kwargs)

    return call


def compile_in_place(module: nn.Module) -> None:
    """Compiles the forward function of `module` for fixed shapes. The module's hooks are not compiled. If the
    module has a method `before_compiled`, this method gets the input before each call of the compiled
    function."""
    for marked in _marked:
        if marked.called is marked.function:
            compiler = torch.compiler
            decorate = compiler.assume_constant_result if marked.is_constant else compiler.disable
            marked.called = decorate(marked.function)
    compiled, before = torch.compile(module.forward, dynamic=False), getattr(module, "before_compiled", None)

    def forward(*inputs: Any) -> Any:
        if before is not None:
            before(*inputs)
        return compiled(*inputs)

    module.forward = forward
