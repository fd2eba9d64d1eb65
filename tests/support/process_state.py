"""The state, beside files, that the tests of one process share. A test must leave it as it found it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from typing import Any

import torch

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_SIGNALS = sorted(signal.valid_signals())


def process_state() -> dict[str, Any]:
    """Returns the current state of this process, without its environment, by the name of each part."""
    return {
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
