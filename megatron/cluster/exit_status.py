"""Exit statuses of ranks, and exit codes. Needs no torch, so that a wrong flag is reported at once.

Exit code 0: finished, or stopped by --exit-interval or --kill-switch-path. 1: a failure; a restart may help.
2: a user's mistake, or not enough memory: a restart would fail again. 75, 124, 130: see the constants.
"""

from __future__ import annotations

import re
from enum import Enum

from megatron.errors import USER_ERROR_EXIT_CODE as USER_ERROR_EXIT_CODE

# Errors of gloo and NCCL after another process has ended.
_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL.*(remote|abort)"
)
# Errors that a rank may also raise after another rank was killed: errors of torch.distributed, its backends
# and its store, and of CUDA, whose kernels read the memory of other GPUs.
_COMMUNICATION = re.compile(r"\bDist\w*Error|NCCL|[Gg]loo|[Tt]imed? ?out|CUDA error")

FAILURE_EXIT_CODE = 1
# EX_TEMPFAIL of sysexits.h: the run has saved, and its command resumes it. Under torch's launcher the code is
# 0: the launcher treats every other code as a failure and ends the other processes.
REQUEUE_EXIT_CODE = 75
# The exit code of timeout(1).
HANG_EXIT_CODE = 124
# Stopped by SIGINT (Ctrl-C).
INTERRUPTED_EXIT_CODE = 130


class ExitStatus(str, Enum):
    """How a rank ended. A report without a status belongs to a rank that was killed or still runs."""

    FINISHED = "finished"
    REQUEUE = "requeue"
    """Stopped early and saved: the command of the run resumes it."""
    INTERRUPTED = "interrupted"
    """Stopped by SIGINT (Ctrl-C) after the current step, and saved if there is --save."""
    USER_ERROR = "config error"
    STOPPED = "stopped"
    """RunStopped: a restart would fail again."""
    FAILED = "failed"
    HANG = "hang"
    SIGNALLED = "signalled"
    """Ended at once by a signal, without a save."""
    ABORTED = "aborted"
    """Ended because another rank of the node failed or was killed."""


NOT_FAILED = frozenset({ExitStatus.FINISHED, ExitStatus.REQUEUE, ExitStatus.INTERRUPTED})
"""The statuses of ranks that have ended at the end of a step, as they should."""


def sentence_of(error: BaseException) -> str:
    """Returns class and message in one line. It contains all lines of the message: NCCL and CUDA write
    several, and no single line is sufficient."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_lost_connection(error: str) -> bool:
    """Returns whether an error is the consequence of the end of another process."""
    return _LOST_CONNECTION.search(error) is not None


def is_own_error(sentence: str) -> bool:
    """Returns whether an error (its `sentence_of`) cannot be caused by the end of another process."""
    return bool(sentence) and not is_lost_connection(sentence) and not _COMMUNICATION.search(sentence)
