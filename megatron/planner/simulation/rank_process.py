"""Makes a process a rank of a run on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import _create_fake_pg

from megatron.engine.profiler_ranges import TRAIN_STEP
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.planner.simulation.device import NAME, SimulatedDevice
from megatron.planner.simulation.memory_tracker import MemoryTracker
from megatron.planner.simulation.record import Instruction
from megatron.planner.simulation.torch_patches import patched_torch, register_device
from megatron.planner.simulation.trace import StepTrace

_BACKEND = "simulated"
"""Name of the process group's backend."""


class _Ranges:
    """Reads the profiler ranges of the engine, which mark the beginning and end of steps and instructions."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self._simulated = simulated
        self._open: list[Any] = []
        self.on_step = lambda: None

    def push(self, message: str) -> None:
        name, *arguments = message.split(" ")
        context: Any = nullcontext()
        if name == TRAIN_STEP:
            self.on_step()
            self._simulated.memory.begin_step()
            self._simulated.trace.begin_step()
        elif name.isidentifier():
            values = {key: int(value) for key, _, value in (part.partition("=") for part in arguments)}
            instruction = Instruction(name, values.get("model_chunk_id", 0))
            context = self._simulated.trace.instruction(instruction, values.get("buffer_id", 0))
        self._open.append(context)
        context.__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


class _SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the simulated device. It has the features of a GPU: it is asynchronous, and
    supports pinned host memory and fp16."""

    def __init__(self, simulated: SimulatedDevice, ranges: _Ranges, kernels: bool) -> None:
        """kernels: whether the device runs Triton kernels, as GPUs since the A100 do."""
        super().__init__()
        self._kernels = kernels
        self._name = NAME
        self._communication_backend_name = _BACKEND
        self._simulated = simulated
        self._ranges = ranges

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return self._simulated.device

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return str(self._simulated.device)

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        self._simulated.trace.add_sync("synchronize")

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._simulated.pin(tensor)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._simulated.memory.total

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._simulated.memory.peak

    max_memory_reserved = max_memory_allocated

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME

    def is_triton_supported(self) -> bool:
        return self._kernels

    def is_fp16_supported(self) -> bool:
        return True

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        self._ranges.push(msg)

    def range_pop(self, domain: Any = None) -> None:
        self._ranges.pop()

    @property
    def Event(self) -> type[_Event]:
        return _Event


class _Event:
    """A device event. Waiting for it counts as a host synchronization."""

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
def simulated_process(
    mesh: Mesh,
    kernels: bool,
    make_trace: Callable[[MemoryTracker], Any] = StepTrace,
) -> Iterator[tuple[SimulatedDevice, _Ranges]]:
    """Makes this process the rank of `layout` on a simulated device, within this context. The process may
    have been another rank before. make_trace: see `SimulatedDevice`. kernels: whether the device runs
    Triton kernels."""
    _register()
    if dist.is_initialized():
        dist.destroy_process_group()
    simulated = SimulatedDevice(make_trace)
    ranges = _Ranges(simulated)
    set_accelerator(_SimulatedAccelerator(simulated, ranges, kernels))
    os.environ.update(
        RANK=str(mesh.rank),
        WORLD_SIZE=str(mesh.world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
    )
    # Backward passes must run in this thread, since the dispatch mode is active only here.
    with patched_torch(simulated), torch.autograd.set_multithreading_enabled(False), simulated:
        yield simulated, ranges


@cache
def _register() -> None:
    """Registers the device and its communication backend in this process."""
    register_device()
    dist.Backend.register_backend(_BACKEND, _create_fake_pg, extended_api=True, devices=["cpu", NAME])


def no_values(
    spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range | None = None
) -> Tensor:
    """Returns a parameter of the right shape without initial values."""
    return torch.empty(spec.local_shape(axes))


def mark_state(simulated: SimulatedDevice, optimizer: MixedPrecisionOptimizer) -> None:
    """Marks the optimizer's weights, gradients, master weights and moments as state of the rank."""
    for flat in optimizer.flat:
        simulated.memory.mark_state("parameters", [flat.weights, flat.local_weights])
        simulated.memory.mark_state(
            "gradients", [flat.gradients, flat.local_gradients, flat.reduced_grad_norms]
        )
        moments = [
            x for value in optimizer.optimizer.state.get(flat.master, {}).values() for x in _tensors_of(value)
        ]
        simulated.memory.mark_state("optimizer", [flat.master, *moments])


def _tensors_of(state: Any) -> list[Tensor]:
    """Returns the tensors of a moment, which has several if it is quantized."""
    if isinstance(state, Tensor):
        return [state]
    return [x for x in getattr(state, "__dict__", {}).values() if isinstance(x, Tensor)]
