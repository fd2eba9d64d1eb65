"""Runs functions of tests on a simulated device, each in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from megatron.planner.simulation import torch_patches
from tests.support.simulation.rank import StepDevice
from tests.support.simulation.stages import run_in_processes


@contextmanager
def simulated_device(patched: bool = True) -> Any:
    """Makes a simulated device in this process, with or without the patches of PyTorch."""
    torch_patches.register_device()
    device = StepDevice()
    patches = torch_patches.patched_torch(device) if patched else nullcontext()
    with patches, torch.autograd.set_multithreading_enabled(False), device:
        yield device


def operation_sums(simulated: StepDevice) -> tuple[int, ...]:
    """Returns (launches, FLOPs, bytes read, bytes written) of all operations so far."""
    counts = simulated.trace.outside.operations.values()
    names = ("calls", "flops", "bytes_read", "bytes_written")
    return tuple(sum(getattr(count, name) for count in counts) for name in names)


def run_all(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of functions without arguments. Each function runs in its own process. Each is a
    function of a module, or a `functools.partial` object of one."""
    return run_in_processes(_call, [(function,) for function in functions])


def _call(function: Callable[[], Any]) -> Any:
    return function()
