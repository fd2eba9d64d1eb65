"""Limits of the shell (ulimit), checked before anything else: libraries report their exhaustion as other
errors, or wait."""

from __future__ import annotations

import resource

from megatron.config.errors import ConfigError

# A process of a run has about 60 files and sockets, with many ranks on its node some hundreds.
LEAST_OPEN_FILES = 256
# The libraries alone take most of this on a CPU; CUDA reserves addresses of all memory of host and device.
LEAST_ADDRESS_SPACE_BYTES = 8 << 30


def check_limits() -> None:
    """Raises ConfigError if this process may open too few files, or use too little memory, for a run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < LEAST_OPEN_FILES:
        raise ConfigError(
            f"ulimit -n {limit}: a process may open {limit} files, expected {LEAST_OPEN_FILES} at least: "
            "raise the limit with ulimit -n 1024"
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < LEAST_ADDRESS_SPACE_BYTES:
        raise ConfigError(
            f"ulimit -v {space // 1024}: a process may use {space / 2**30:.1f} GiB of virtual memory, "
            f"expected {LEAST_ADDRESS_SPACE_BYTES / 2**30:.0f} GiB at least: raise the limit with ulimit -v "
            "unlimited"
        )
