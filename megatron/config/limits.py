"""Limits of the shell (ulimit), checked before anything else: libraries report their exhaustion as other
errors, or wait."""

from __future__ import annotations

import resource

from megatron.errors import ConfigError

# A process of a run has about 60 files and sockets, with many ranks on its node some hundreds.
LEAST_OPEN_FILES = 256
# torch and DeepSpeed alone take 0.8 GiB; a small model trains on a CPU with 2.5 GB.
LEAST_ADDRESS_SPACE_BYTES = 2 << 30


def check_limits() -> None:
    """Raises ConfigError if this process may open too few files, or use too little memory, for a run. Raises
    the soft limit of open files to the hard one if it is too low."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_OPEN_FILES:
        raise ConfigError(
            f"ulimit -Hn {hard}: a process may open {hard} files, expected {LEAST_OPEN_FILES} at least: "
            "start in a shell with a higher limit"
        )
    if 0 <= limit < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= space < LEAST_ADDRESS_SPACE_BYTES:
        raise ConfigError(
            f"ulimit -v {space // 1024}: a process may use {space / 2**30:.1f} GiB of virtual memory, "
            f"expected {LEAST_ADDRESS_SPACE_BYTES / 2**30:.0f} GiB at least: raise the limit with ulimit -v "
            "unlimited"
        )
