"""The limit of open files, checked before anything opens sockets: libraries report its exhaustion as other
errors, or wait."""

from __future__ import annotations

import resource

from megatron.config.errors import ConfigError

# A process of a run has about 60 files and sockets, with many ranks on its node some hundreds.
LEAST_OPEN_FILES = 256


def check_open_files() -> None:
    """Raises ConfigError if this process may open too few files for a run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < LEAST_OPEN_FILES:
        raise ConfigError(
            f"ulimit -n {limit}: a process may open {limit} files, expected {LEAST_OPEN_FILES} at least: "
            "raise the limit with ulimit -n 1024"
        )
