"""Exit statuses of ranks, and exit codes. The module does not import torch, so that a wrong flag is reported
at once.

Exit code 0: the run has finished, or was stopped by --exit-interval or --kill-switch-path. 1: the run has
failed, and a restart may help. 2: the run has failed because of a user's mistake or too little memory, and a
restart would fail again. 75, 124, 130: see the constants.
"""

from __future__ import annotations

import re
from enum import Enum

from megatron.errors import USER_ERROR_EXIT_CODE as USER_ERROR_EXIT_CODE

# Messages of gloo and NCCL after a process at the other end of a connection has ended.
_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL.*(remote|abort)"
)
# Errors that a rank may also raise after another rank was killed: errors of torch.distributed, its backends
# and its store, and of CUDA, whose kernels read the memory of other GPUs.
_COMMUNICATION = re.compile(r"\bDist\w*Error|NCCL|[Gg]loo|[Tt]imed? ?out|CUDA error")

FAILURE_EXIT_CODE = 1
# Exit code of a run that has saved and that the same command resumes (EX_TEMPFAIL of sysexits.h). Under
# torch's launcher the code is 0, because the launcher treats every other code as a failure and ends the other
# processes.
REQUEUE_EXIT_CODE = 75
# Exit code of a run that hangs, as of timeout(1).
HANG_EXIT_CODE = 124
# Exit code of a run that SIGINT (Ctrl-C) has stopped.
INTERRUPTED_EXIT_CODE = 130


class ExitStatus(str, Enum):
    """How a rank ended. A report without a status belongs to a rank that was killed or still runs."""

    FINISHED = "finished"
    REQUEUE = "requeue"
    """The run stopped early and saved. Its command resumes it."""
    INTERRUPTED = "interrupted"
    """SIGINT (Ctrl-C) stopped the run after the current step. The run saved if --save is set."""
    USER_ERROR = "config error"
    STOPPED = "stopped"
    """The rank raised RunStopped. A restart would fail again."""
    FAILED = "failed"
    HANG = "hang"
    SIGNALLED = "signalled"
    """A signal ended the rank at once, without a save."""
    ABORTED = "aborted"
    """The rank ended because another rank of its node had failed or was killed."""


NOT_FAILED = frozenset({ExitStatus.FINISHED, ExitStatus.REQUEUE, ExitStatus.INTERRUPTED})
"""The statuses of ranks that ended without an error, after a complete step."""


def sentence_of(error: BaseException) -> str:
    """Returns the class and the message of an error in one line. The line contains all lines of the message,
    because in messages of NCCL and CUDA no single line is sufficient."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_lost_connection(error: str) -> bool:
    """Returns whether an error is the consequence of the end of another process."""
    return _LOST_CONNECTION.search(error) is not None


def is_own_error(sentence: str) -> bool:
    """Returns whether an error (its `sentence_of`) cannot be caused by the end of another process."""
    return bool(sentence) and not is_lost_connection(sentence) and not _COMMUNICATION.search(sentence)
