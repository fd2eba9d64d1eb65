"""Decides whether Triton kernels or PyTorch compute with the tensors of a device.

The environment variable MEGATRON_KERNELS changes the decision: `pytorch` selects PyTorch on every device;
`interpreter` also runs the kernels on CPU tensors, in triton's interpreter (with TRITON_INTERPRET=1). The
interpreter is slow, but with it a run with kernels can be compared with a run without kernels on any machine.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from deepspeed.accelerator import get_accelerator

from megatron.errors import one_line
from megatron.kernels.optimizer import fused_norms
from megatron.torch_versions import interpreter_problem

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether a kernel computes with this tensor. If not, the reference implementation does.

    Kernels need triton and a device that triton supports: CUDA with compute capability 8.0 or newer. The
    first call for a device other than a CPU logs the decision and its reason.
    """
    return tensor.dtype in _DTYPES and _device_uses_kernels(tensor.device.type)


@lru_cache
def _device_uses_kernels(device_type: str) -> bool:
    reason = reason_against_kernels(device_type)
    if device_type != "cpu" or reason is None:
        _LOG.info("kernels: %s", "triton" if reason is None else f"PyTorch, {reason}")
    return reason is None


def forget_decisions() -> None:
    """Clears the cached decisions. It is for a process in which MEGATRON_KERNELS changes."""
    _device_uses_kernels.cache_clear()


def use_pytorch() -> None:
    """Makes this process compute only with PyTorch from this call on."""
    os.environ["MEGATRON_KERNELS"] = "pytorch"
    forget_decisions()


def reason_against_kernels(device_type: str) -> str | None:
    """Returns the reason why kernels do not run on the accelerator (or CPU) of this type; None if they run.

    The simulated accelerator runs no kernels and does not need triton.
    """
    setting = os.environ.get("MEGATRON_KERNELS")
    if setting == "pytorch":
        return "MEGATRON_KERNELS=pytorch is set"
    if device_type == "cpu":
        if setting != "interpreter":
            return "the device is a CPU"
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return interpreter_problem() if interprets else "TRITON_INTERPRET=1 is not set"
    if not get_accelerator().is_triton_supported():
        return f"triton does not support this {device_type} device (compute capability 8.0 or newer)"
    if device_type == "cuda" and find_spec("triton") is None:
        return "triton is not installed (pip install triton, or the extra [gpu])"
    return _launch_failure(device_type) if device_type == "cuda" else None


@lru_cache
def _launch_failure(device_type: str) -> str | None:
    """Launches one kernel, and returns its error in one line, or None if it runs.

    At its first launch on a node, triton compiles a C library, and it writes to its cache.
    """

    try:
        norm = fused_norms([torch.ones(1, device=device_type)]).item()
        problem = None if norm == 1.0 else f"the norm of 1 is {norm}"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the device cannot be used at all
    except Exception as error:  # from triton, the C compiler or the file system
        problem = one_line(f"{type(error).__name__}: {' '.join(str(error).split())}")
    if problem is None:
        return None
    return (
        f"triton cannot launch a kernel ({problem}): it needs a C compiler ($CC, gcc or clang), Python's "
        "header files and a cache folder to write to and load libraries from (TRITON_CACHE_DIR)"
    )
