"""torch.compile, and the functions that are excluded from it.

As a decorator, `torch.compiler.disable` would load the compiler at every launch, which doubles the import
time. Instead `not_compiled` marks a function, and `compile_in_place` disables the marked functions.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_marked: list["_Marked"] = []


class _Marked:
    """A marked function, and the function that is called instead of it."""

    def __init__(self, function: Callable) -> None:
        self.function = self.called = function


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Marks `function`, so that it runs uncompiled inside compiled modules."""
    marked = _Marked(function)
    _marked.append(marked)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return marked.called(*args, **kwargs)

    return call


def compile_in_place(module: nn.Module) -> None:
    """Compiles the forward pass of `module`, for fixed shapes. Its parameters keep their names."""
    for marked in _marked:
        if marked.called is marked.function:
            marked.called = torch.compiler.disable(marked.function)
    module.compile(dynamic=False)
