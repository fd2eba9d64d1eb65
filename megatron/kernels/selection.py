"""Decides whether tensors of a device are computed with Triton kernels or with PyTorch."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from deepspeed.accelerator import get_accelerator

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_kernels(tensor: torch.Tensor) -> bool:
    """Whether a kernel computes with this tensor; otherwise the PyTorch twin does.

    Kernels need triton and a device that it supports: CUDA with compute capability 8.0 or newer. The first
    call for a device other than a CPU logs the decision and its reason.
    """
    if tensor.device.type == "cpu":
        return False
    return tensor.dtype in _DTYPES and _device_uses_kernels(tensor.device.type)


@lru_cache
def _device_uses_kernels(device_type: str) -> bool:
    reason = reason_against_kernels(device_type)
    _LOG.info("kernels: %s", "triton" if reason is None else f"PyTorch, {reason}")
    return reason is None


def reason_against_kernels(device_type: str) -> str | None:
    """Why kernels do not run on the current accelerator of this type; None if they do.

    MEGATRON_KERNELS=pytorch in the environment selects PyTorch on every device. The simulated accelerator
    runs no kernel and does not need the package.
    """
    if os.environ.get("MEGATRON_KERNELS") == "pytorch":
        return "MEGATRON_KERNELS=pytorch is set"
    if not get_accelerator().is_triton_supported():
        return f"triton does not support this {device_type} device (compute capability 8.0 or newer)"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton is not installed (pip install triton, or the extra [gpu])"
    return None
