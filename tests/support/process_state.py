"""What the tests of one process share, beside files: a test must leave it as it found it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from typing import Any

import torch

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
# By pytest for each test, and by torch when its compiler is imported.
_SET_BY_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
_SIGNALS = sorted(signal.valid_signals())


def process_state() -> dict[str, Any]:
    """Returns the current state of this process, by the name of each part."""
    environment = {f"${name}": value for name, value in os.environ.items() if name not in _SET_BY_LIBRARIES}
    return {
        **environment,
        "working directory": os.getcwd(),
        "limits": [resource.getrlimit(kind) for kind in _LIMITS],
        "signal handlers": [signal.getsignal(number) for number in _SIGNALS],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "module search path": list(sys.path),
        "garbage collection": gc.isenabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_initialized(),
    }
