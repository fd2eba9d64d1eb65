"""Functions that end a process: they write its error to the rank's report and set the exit code. The module
does not import torch.

With temporary reports (see `rank_reports`), the first rank of a node that fails prints the diagnosis. It
prints at once if the error is its own. If the end of another rank may have caused the error, it first waits
until the other ranks have ended. The cause is therefore in the log before torch's launcher prints its
summary.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from megatron.cluster.diagnosis import is_own_failure, print_diagnosis, running
from megatron.cluster.exit_status import (
    FAILURE_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    REQUEUE_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ExitStatus,
    is_lost_connection,
    sentence_of,
)
from megatron.cluster.launch import has_torch_launcher, local_world_size_of, wait_until, world_size_of
from megatron.cluster.rank_reports import RankReport, ended_well, read_reports
from megatron.errors import UserError, print_error, write_error_file
from megatron.files import open_own
from megatron.torch_versions import missing_name

# A rank waits this long for the other ranks of its node. A rank without an error ends 10 s after the failure
# of another rank, and torch's launcher sends SIGKILL 30 s after SIGTERM.
_MAX_WAIT_FOR_RANKS_S = 15.0
# A rank that does not hang records a signal within this time.
_MAX_WAIT_FOR_SIGNALS_S = 3.0
# Maximum wait for the reports of all ranks, if the number of ranks on the node is not known.
_MAX_WAIT_FOR_REPORTS_S = 5.0
# This file exists once a rank is responsible for the diagnosis, and has content once this rank has printed
# it.
_CLAIM_FILE = "diagnosis"


class RunStopped(Exception):
    """An error with which a run stops although its flags are valid; the message is one sentence. All ranks
    raise it, or with on_all_ranks=False only the rank that found the cause."""

    exit_code = FAILURE_EXIT_CODE

    def __init__(self, sentence: str, on_all_ranks: bool = True) -> None:
        super().__init__(sentence)
        self.on_all_ranks = on_all_ranks


class RankStopped(RunStopped):
    """An error with which one rank stops, for example because of a full disk. A restart would fail again."""

    exit_code = USER_ERROR_EXIT_CODE

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, on_all_ranks=False)


class SharedUserError(UserError):
    """A UserError that is raised on every rank."""


@contextmanager
def exit_on_error(report: RankReport, *, same_on_all_ranks: bool = False) -> Iterator[None]:
    """Ends this process if the block raises, and writes the error to the rank's report.

    The exit code is 2 for a UserError, the error's `exit_code` for a RunStopped, 130 for Ctrl-C, and
    otherwise 1. The text of UserError and RunStopped is one sentence; the text of any other error is its
    traceback and a sentence. The diagnosis of the reports selects which text is printed; a process without a
    report prints its own text. same_on_all_ranks: whether all ranks raise equal errors in this block, for
    example about flags.
    """
    entries: dict[str, Any] = {"on_all_ranks": same_on_all_ranks}
    try:
        yield
    except UserError as error:
        end, text, code = ExitStatus.USER_ERROR, f"error: {error}", USER_ERROR_EXIT_CODE
        entries["on_all_ranks"] |= isinstance(error, SharedUserError)
    except RunStopped as error:
        end, text, code = ExitStatus.STOPPED, f"error: {error}", error.exit_code
        entries["on_all_ranks"] |= error.on_all_ranks
    except KeyboardInterrupt:
        report.note(signal="SIGINT")
        end, text, code = ExitStatus.SIGNALLED, "interrupted", INTERRUPTED_EXIT_CODE
    except Exception as error:
        if sentence := missing_name(error):
            with exit_on_error(report, same_on_all_ranks=True):
                raise UserError(sentence) from error
        text = f"{traceback.format_exc()}error: {report.rank_and_node}: {sentence_of(error)}"
        end, code = ExitStatus.FAILED, FAILURE_EXIT_CODE
    else:
        return
    # A rank that lost a connection is not the first that failed. It does not ask torch's store, which may
    # print stacks if the process that hosts the store has ended.
    if end is not ExitStatus.SIGNALLED and _is_distributed() and not is_lost_connection(text):
        entries["first_rank"] = _first_failed_rank(report.rank)
        entries["first"] = entries["first_rank"] == int(report.rank)
    sys.stdout.flush()
    end_rank(report, end, text, **entries)
    _exit(code)


def exit_code(report: RankReport, status: ExitStatus, env: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code of a run that ended without an error, and writes its status to the report.
    status: FINISHED, REQUEUE, INTERRUPTED, or USER_ERROR for a dry run whose plan does not fit the device."""
    report.end(status)
    finish_rank_reports(report)
    if status is ExitStatus.REQUEUE and has_torch_launcher(env):
        # The exit code of the launcher does not show the script that the run will resume.
        write_error_file("stopped and saved: the same command resumes the run", env)
    codes = {
        ExitStatus.USER_ERROR: USER_ERROR_EXIT_CODE,
        ExitStatus.INTERRUPTED: INTERRUPTED_EXIT_CODE,
        ExitStatus.REQUEUE: 0 if has_torch_launcher(env) else REQUEUE_EXIT_CODE,
    }
    return codes.get(status, 0)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    if _is_distributed():
        # A normal exit with an open process group sometimes aborts.
        os._exit(code)
    sys.exit(code)


def _is_distributed() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _first_failed_rank(rank: str) -> int:
    """Returns the rank that failed first in this run, according to the rendezvous store."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        return int(_get_default_store().compare_set("first failure", "", rank).decode())
    except Exception:
        return int(rank)  # the process that hosted the store has ended


def end_rank(report: RankReport, end: ExitStatus, text: str, **entries: Any) -> None:
    """Writes to the report how this rank ends. The diagnosis of the reports then selects what is printed.
    Without a report, prints the text."""
    if report.end(end, text, **entries):
        finish_rank_reports(report)
    else:
        print_error(text)


def finish_rank_reports(report: RankReport, env: Mapping[str, str] = os.environ) -> None:
    """Prints the diagnosis if this rank is responsible for it, and deletes the reports if this rank is the
    last of its node. Does nothing if RANK_REPORTS is set. Every rank calls this function after
    `report.end`."""
    if report.folder is None or not (report.is_temporary and report.is_enabled):
        return
    claim = report.folder / _CLAIM_FILE
    with suppress(OSError), report.diagnosis_lock:
        with report.folder_lock():
            is_responsible = not (claim.exists() or ended_well(report.record))
            if is_responsible:
                os.close(open_own(claim))
        if is_responsible:
            if not is_own_failure(report.record):
                _wait_for_ranks(report, env)
            print_diagnosis(report.folder, env)
            if not has_torch_launcher(env):  # the next run of the same shell would use the same folder
                _wait_for_ranks(report, env)
                report.remove_folder()
                return
            claim.write_text("printed")
        with report.folder_lock():
            reports = read_reports(report.folder)
            if claim.exists():
                # The folder stays until all ranks have reported: a rank that starts late must find the claim.
                is_done = claim.stat().st_size > 0 and len(reports) >= (local_world_size_of(env) or 0)
            else:
                # A rank that has not ended well is about to claim.
                is_done = all(ended_well(other) for other in reports if "end" in other)
            if is_done and not running(reports):
                report.remove_folder()


def _wait_for_ranks(report: RankReport, env: Mapping[str, str]) -> None:
    """Waits until the other ranks of this node have ended, or until this rank must end too. After a signal,
    does not wait for ranks without a report, because they may never write one."""
    assert report.folder is not None
    folder, expected = report.folder, local_world_size_of(env)

    def wait(condition: Callable[[], bool], max_s: float) -> None:
        wait_until(lambda: report.stop_waiting.is_set() or condition(), max_s)

    if "signal" not in report.record:
        num_ranks = expected or world_size_of(env)
        wait(
            lambda: len(read_reports(folder)) >= num_ranks,
            _MAX_WAIT_FOR_RANKS_S if expected else _MAX_WAIT_FOR_REPORTS_S,
        )
    wait(lambda: not running(read_reports(folder)), _MAX_WAIT_FOR_RANKS_S)
    if report.record["end"] == ExitStatus.HANG:
        wait_until(
            lambda: all("signal" in other for other in running(read_reports(folder))), _MAX_WAIT_FOR_SIGNALS_S
        )
