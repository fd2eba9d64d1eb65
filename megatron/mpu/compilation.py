"""torch.compile, and the functions that it leaves out.

`torch.compiler.disable` as a decorator would load the compiler with every start of the program, which doubles
the time of its imports. `not_compiled` marks a function, which is disabled when the first module is compiled.
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
    """A function, and what is called in its place."""

    def __init__(self, function: Callable) -> None:
        self.function = self.called = function


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, which runs as it is written in modules that are compiled."""
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
