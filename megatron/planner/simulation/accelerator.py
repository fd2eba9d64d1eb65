"""DeepSpeed's accelerator for the simulated device."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

from megatron.planner.simulation.device import NAME, SimulatedDevice

BACKEND = "simulated"
"""Name of the process group's backend, see `world`."""


class SimulatedAccelerator(CPU_Accelerator):
    """Answers as a GPU would: asynchronous, with page-locked host memory and with fp16."""

    def __init__(self, simulated: SimulatedDevice, on_range: Any, kernels: bool) -> None:
        """on_range: object with `push(message)` and `pop()`, called for the ranges that the program marks for
        profilers. kernels: whether it runs Triton kernels, as GPUs since the A100 do."""
        super().__init__()
        self._kernels = kernels
        self._name = NAME
        self._communication_backend_name = BACKEND
        self._simulated = simulated
        self._on_range = on_range

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

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._simulated.memory.peak

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME

    def is_triton_supported(self) -> bool:
        return self._kernels

    def is_fp16_supported(self) -> bool:
        return True

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        self._on_range.push(msg)

    def range_pop(self, domain: Any = None) -> None:
        self._on_range.pop()

    @property
    def Event(self) -> type[_Event]:
        return _Event


class _Event:
    """A device event; waiting for one synchronizes with the device."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().synchronize()
