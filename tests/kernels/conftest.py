"""Kernels run on CPU tensors, in triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _bf16_products_are_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of triton 3.7.1 multiplies matrices of bf16 as if their bits were integers."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original(self, a, b, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _bf16_is_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of triton 3.7.1 truncates fp32 to bf16, a GPU rounds to the nearest, ties to even."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return original(values, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
