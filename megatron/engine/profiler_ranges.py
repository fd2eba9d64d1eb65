"""Named ranges for profilers. On NVIDIA GPUs these are NVTX ranges, which Nsight Systems shows on its time
line.

The simulation reads the same ranges to assign the work of a step to the instructions of the schedule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from deepspeed.accelerator import get_accelerator

TRAIN_STEP = "train_step"


@contextmanager
def profiler_range(message: str) -> Iterator[None]:
    """Returns a context that marks everything that runs within it."""
    get_accelerator().range_push(message)
    try:
        yield
    finally:
        get_accelerator().range_pop()


def in_profiler_range(name: str, method: Callable) -> Callable:
    """Returns a method that runs an instruction of a schedule in a range such as 'ForwardPass buffer_id=0',
    and records the instruction in the engine's `device_progress`."""

    @wraps(method)
    def run(self: Any, **arguments: int) -> Any:
        message = " ".join([name, *(f"{key}={value}" for key, value in arguments.items())])
        with profiler_range(message):
            result = method(self, **arguments)
        self.device_progress.record(message)
        return result

    return run
