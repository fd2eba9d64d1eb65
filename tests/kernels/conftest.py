"""The kernels run on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _bf16_products_are_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrects the interpreter of triton 3.7.1, which multiplies matrices of bf16 as if their bits were
    integers."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original(self, a, b, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _is_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrects the interpreter of triton 3.7.1, which truncates fp32 to bf16, and rounds ties to FP8 up. A
    GPU rounds to the nearest value, ties to even."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")

    original = interpreter._convert_float
    formats = {
        tl.bfloat16: (torch.bfloat16, torch.int16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.int8),
        tl.float8e5: (torch.float8_e5m2, torch.int8),
    }

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in formats:
            return original(values, source, target, rounding)
        dtype, bits = formats[target]
        rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(dtype)
        return rounded.view(bits).numpy().view(f"u{dtype.itemsize}").reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
