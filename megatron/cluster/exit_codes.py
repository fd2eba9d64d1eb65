"""How a run ends: the exit code of every process, and on an error the one of them that says why.

0: finished, or left at --exit-interval. 75: to be continued, see `REQUEUE_EXIT_CODE`. 2: a user's
mistake. 124: hung, see `megatron.cluster.watchdog`. 1: any other failure. Needs no torch, so that a wrong
flag is answered at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from megatron.cluster.launch import RankError, has_torch_launcher, node_name
from megatron.cluster.rank_reports import ExitStatus, RankReport
from megatron.config.errors import CONFIG_ERROR_EXIT_CODE, ConfigError

FAILURE_EXIT_CODE = 1
# EX_TEMPFAIL of sysexits.h: the same command, given again, goes on from what was saved. Under torch's
# launcher, which takes every code but 0 for a failure and ends the other processes, it is 0.
REQUEUE_EXIT_CODE = 75
INTERRUPTED_EXIT_CODE = 130

# A launcher ends all processes as soon as one has ended, be it before the one that speaks has spoken: so the
# silent ones stay until the launcher ends them, and no longer than this.
_LONGEST_WAIT_S = 10.0


class RunStopped(Exception):
    """The run must not go on, by no fault of its flags: one sentence. Raised on every rank alike, unless not
    `everywhere`: then on the one that has met the cause."""

    def __init__(self, sentence: str, everywhere: bool = True) -> None:
        super().__init__(sentence)
        self.everywhere = everywhere


class SharedConfigError(ConfigError):
    """A mistake that every rank has found: rank 0 prints it."""


@contextmanager
def exit_on_error(report: RankReport, *, same_everywhere: bool = False) -> Iterator[None]:
    """End this process on an error, which one process of the run tells on stderr, or each in its report.

    A ConfigError ends with exit code 2, anything else with 1; a mistake is told in one sentence, the
    unforeseen with its traceback. With reports, all is said there, for the verdict to choose from. Else,
    once the processes have met, the first that fails speaks, and all end with its code, for what the others
    then run into is its consequence. Before, rank 0 speaks; another rank, which may see other files, does so
    if nobody has ended it after a while, unless its errors are the `same_everywhere`, as with flags. Of a
    SharedConfigError rank 0 speaks, of a RankError the rank itself.
    """
    is_own = False
    try:
        yield
    except ConfigError as error:
        by_rank_0 = isinstance(error, SharedConfigError)
        is_own = isinstance(error, RankError)
        end, sentence, code = ExitStatus.MISTAKE, f"error: {error}", CONFIG_ERROR_EXIT_CODE
    except RunStopped as error:
        end, sentence, code, by_rank_0 = (
            ExitStatus.STOPPED,
            f"error: {error}",
            FAILURE_EXIT_CODE,
            error.everywhere,
        )
    except KeyboardInterrupt:
        end, sentence, code, by_rank_0 = ExitStatus.SIGNALLED, "interrupted", INTERRUPTED_EXIT_CODE, True
    except Exception as error:
        where = f"rank {report.rank} on {node_name(os.environ)}"
        sentence = f"{traceback.format_exc()}error: {where}: {type(error).__name__}: {error}"
        end, code, by_rank_0 = ExitStatus.FAILED, FAILURE_EXIT_CODE, False
    else:
        return
    rank, met = report.rank, _is_distributed()
    speaks = rank == "0" or is_own
    first = rank
    if met and not by_rank_0:
        first, first_code = _first_failure(rank, code)
        code = code if report.is_enabled else first_code
        speaks = rank == first
    if report.end(end, sentence, first=rank == first):
        _end(None, code)
    if not speaks:
        _wait_to_be_ended(code)
        if not met and not same_everywhere and not by_rank_0:
            sentence, speaks = f"rank {rank} on {node_name(os.environ)}: {sentence}", True
    _end(sentence if speaks else None, code)


def exit_code(report: RankReport, should_requeue: bool, env: Mapping[str, str] = os.environ) -> int:
    """The code of a run that ended well, which is told in the report."""
    report.end(ExitStatus.CONTINUED if should_requeue else ExitStatus.FINISHED)
    return REQUEUE_EXIT_CODE if should_requeue and not has_torch_launcher(env) else 0


def _end(sentence: str | None, code: int) -> NoReturn:
    sys.stdout.flush()
    if sentence is not None:
        print(sentence, file=sys.stderr, flush=True)
    if _is_distributed():
        # Leaving the interpreter with a process group that still communicates aborts now and then.
        os._exit(code)
    sys.exit(code)


def _is_distributed() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _first_failure(rank: str, code: int) -> tuple[str, int]:
    """Rank and exit code of the first that failed, by the store through which the processes met."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        first = _get_default_store().compare_set("first failure", "", f"{rank} {code}").decode().split()
        return first[0], int(first[1])
    except Exception:
        # The process that held the store is gone, and whether it spoke cannot be known.
        return rank, code


def _wait_to_be_ended(code: int) -> None:
    """Wait for the launcher's SIGTERM, on which this process ends with `code`."""
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(_LONGEST_WAIT_S)
