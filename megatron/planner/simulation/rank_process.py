"""Turns a process into a rank of a run on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import _create_fake_pg

from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.planner.simulation.device import NAME, SimulatedDevice
from megatron.planner.simulation.torch_patches import patched_torch, register_device

_BACKEND = "simulated"
"""Name of the process group's backend."""


class SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the simulated device. It has the features of a GPU: it is asynchronous, and
    supports pinned host memory and fp16."""

    def __init__(self, simulated: SimulatedDevice, kernels: bool) -> None:
        """kernels: whether the device runs Triton kernels, as GPUs since the A100 do."""
        super().__init__()
        self.simulated, self._kernels = simulated, kernels
        self._name = NAME
        self._communication_backend_name = _BACKEND

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return self.simulated.device

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return str(self.simulated.device)

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        self.simulated.trace.add_sync("synchronize")

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.simulated.pin(tensor)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.simulated.memory.total

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self.simulated.memory.peak

    max_memory_reserved = max_memory_allocated

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME

    def is_triton_supported(self) -> bool:
        return self._kernels

    def is_fp16_supported(self) -> bool:
        return True

    @property
    def Event(self) -> type[_Event]:
        return _Event


class _Event:
    """A device event. Waiting for the event counts as a host synchronization."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        get_accelerator().synchronize()


@contextmanager
def simulated_process(mesh: Mesh, accelerator: SimulatedAccelerator) -> Iterator[None]:
    """Makes this process the rank of `mesh` on the accelerator's device, during the block. The process may
    have been a different rank before."""
    _register()
    if dist.is_initialized():
        dist.destroy_process_group()
    set_accelerator(accelerator)
    os.environ.update(
        RANK=str(mesh.rank),
        WORLD_SIZE=str(mesh.world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
    )
    # Backward passes must run in this thread, because the dispatch mode is active only in this thread.
    simulated = accelerator.simulated
    with patched_torch(simulated), torch.autograd.set_multithreading_enabled(False), simulated:
        yield


@cache
def _register() -> None:
    """Registers the device and its communication backend in this process."""
    register_device()
    dist.Backend.register_backend(_BACKEND, _create_fake_pg, extended_api=True, devices=["cpu", NAME])


def no_values(
    spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range | None = None
) -> Tensor:
    """Returns a parameter of the right shape that has no initial values. It replaces the initialization."""
    return torch.empty(spec.local_shape(axes))


def state_tensors(model: GPTModelPipe, optimizer: MixedPrecisionOptimizer) -> dict[str, list[Tensor]]:
    """Returns three lists: weights with their FP8 copies, gradients, and master weights with their
    moments."""
    copies = [] if model.fp8 is None else model.fp8.copies
    found: dict[str, list[Tensor]] = {"parameters": [*copies], "gradients": [], "optimizer": []}
    for flat in optimizer.flat:
        found["parameters"] += [flat.weights, flat.local_weights]
        found["gradients"] += [flat.gradients, flat.local_gradients, flat.reduced_grad_norms]
        moments = optimizer.optimizer.state.get(flat.master, {}).values()
        found["optimizer"] += [flat.master, *(x for moment in moments for x in _tensors_of(moment))]
    return found


def _tensors_of(state: Any) -> list[Tensor]:
    """Returns the tensors of a moment. A quantized moment has several."""
    if isinstance(state, Tensor):
        return [state]
    return [x for x in getattr(state, "__dict__", {}).values() if isinstance(x, Tensor)]
