"""Finds how a job ended, and which rank failed first, from the reports of its ranks, and prints it.

    python -m megatron.cluster.diagnosis FOLDER --processes N [--ended-by-slurm] [--slurm JOB NODES]

`diagnose` selects the first cause. This command prints the cause of a job that sets RANK_REPORTS. In a job
without the variable, `print_diagnosis` prints the cause on each node.

FOLDER is the value of RANK_REPORTS in the environment of the ranks. If the run ended well, the command prints
nothing. Otherwise it prints the error once, and the last line is the cause. Exit codes: 0 finished; 75
requeue the job; 1 failed, a restart may help; 2 failed, and a restart would fail again; 130 interrupted.
Needs no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.child_processes import is_running
from megatron.cluster.exit_status import (
    FAILURE_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    NOT_FAILED,
    REQUEUE_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ExitStatus,
    is_lost_connection,
    is_own_error,
)
from megatron.cluster.launch import (
    MAX_PROCESSES,
    local_world_size_of,
    node_rank_of,
    output_of,
    world_size_of,
)
from megatron.cluster.rank_reports import Record, read_reports
from megatron.errors import print_error, printable, write_error_file
from megatron.text_table import first_few, rank_list

# Maximum number of positions of hung ranks that are printed.
_MOST_POSITIONS = 20
_ELSEWHERE = "the cause may be on another node, or a rank that was started from another shell: see its error"


@dataclass(frozen=True)
class Diagnosis:
    """The reason why a job ended. code: exit code, see the module's docstring. text: text to print; its last
    line is the cause."""

    code: int
    text: str = ""
    cause: Record | None = None
    """The report of the rank that failed, if one is known."""


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm reports about a job. state: for example 'CANCELLED'; '' if unknown. lost_nodes: nodes of the
    job that are down or not responding."""

    state: str = ""
    lost_nodes: tuple[str, ...] = ()


def diagnose(
    reports: Sequence[Record], processes: int, slurm: SlurmJob = SlurmJob(), ended_by_slurm: bool = False
) -> Diagnosis:
    """Returns the diagnosis of a job of `processes` ranks from their reports. ended_by_slurm: whether Slurm
    has sent SIGTERM to the job's script."""
    ends = {report.get("end") for report in reports}
    if len(reports) == processes and ends <= NOT_FAILED:
        if not ended_by_slurm and not slurm.lost_nodes or ends == {ExitStatus.FINISHED}:
            return _diagnose_requested_stop(reports)
        text = f"{_slurm_end(slurm)}{_progress(reports)}: checkpoint saved, resumes after requeue"
        return Diagnosis(REQUEUE_EXIT_CODE, text)
    if found := _first_with_end(reports, ExitStatus.USER_ERROR):
        return Diagnosis(USER_ERROR_EXIT_CODE, _error_text(found, reports), found)
    if slurm.lost_nodes:
        return Diagnosis(FAILURE_EXIT_CODE, f"error: {_slurm_end(slurm)}{_progress(reports)}")
    if found := _first_with_end(reports, ExitStatus.STOPPED):
        return Diagnosis(USER_ERROR_EXIT_CODE, _error_text(found, reports), found)
    if reports and ends <= NOT_FAILED:
        problem = "wrote no report: the nodes do not share the folder of the reports (RUN_DIR)"
        return Diagnosis(USER_ERROR_EXIT_CODE, f"error: {rank_list(_missing(reports, processes))} {problem}")
    if ended_by_slurm:
        return Diagnosis(FAILURE_EXIT_CODE, f"error: {_slurm_end(slurm)}{_progress(reports)}")
    return _diagnose_failure(reports, processes)


def _diagnose_requested_stop(reports: Sequence[Record]) -> Diagnosis:
    """Returns the diagnosis of a run that finished or stopped on request. A stop before the first step is
    an error, since the next launch would not reach its first step either."""
    ends = {report["end"] for report in reports}
    if ends == {ExitStatus.FINISHED}:
        return Diagnosis(0)
    names = ", ".join(_signals(reports))
    if ExitStatus.INTERRUPTED in ends:
        return Diagnosis(
            INTERRUPTED_EXIT_CODE, f"interrupted by SIGINT{_progress(reports)}: {_saved(reports)}"
        )
    if any("iteration" in report for report in reports):
        text = f"stopped by {names}{_progress(reports)}: {_saved(reports)}" if names else ""
        return Diagnosis(REQUEUE_EXIT_CODE, text)
    return Diagnosis(
        USER_ERROR_EXIT_CODE,
        "error: the run was asked to stop before its first step: the job's time limit must be longer than "
        "the start plus the warning time (#SBATCH --signal, --exit-duration-in-mins)",
    )


def _saved(reports: Sequence[Record]) -> str:
    saved = max(
        (report["saved_iteration"] for report in reports if "saved_iteration" in report), default=None
    )
    if saved is None:
        return "nothing was saved"
    if folders := [report["load_to_resume"] for report in reports if "load_to_resume" in report]:
        return f"saved iteration {saved}; to resume, add --load {folders[0]}"
    return f"the same command resumes from iteration {saved}"


def _error_text(found: Record, reports: Sequence[Record]) -> str:
    """Returns the error of a rank, prefixed with the rank unless all nodes report the same error."""
    same_error = [report for report in reports if report.get("text") == found["text"]]
    on_all_nodes = {report["host"] for report in same_error} == {report["host"] for report in reports}
    is_of_one_rank = found["end"] == ExitStatus.STOPPED and len(same_error) < len(reports)
    if found.get("on_all_ranks") or (on_all_nodes and not is_of_one_rank):
        return found["text"]
    return _error_of_rank(found, found["text"].removeprefix("error: "))


def _error_of_rank(report: Record, sentence: str) -> str:
    return f"error: {_describe_rank(report)}{_progress([report])}: {sentence}"


def _slurm_end(slurm: SlurmJob) -> str:
    if slurm.lost_nodes:
        noun, verb = ("node", "is") if len(slurm.lost_nodes) == 1 else ("nodes", "are")
        return f"{noun} {', '.join(slurm.lost_nodes)} {verb} down or not responding to Slurm"
    # While the job ends, Slurm may not show the final state yet.
    state = "" if slurm.state in ("", "RUNNING", "COMPLETING") else f" ({slurm.state})"
    return f"Slurm ended the job{state}"


def _diagnose_failure(reports: Sequence[Record], processes: int) -> Diagnosis:
    """Returns the diagnosis of a failure inside the job. A rank that could not report how it ended (hang,
    SIGKILL) causes the communication errors of the others, so such a rank is considered first. After any
    other error the launcher and srun end the remaining ranks. A rank that has just started then has no status
    either."""
    hung = [report for report in reports if report.get("end") == ExitStatus.HANG]
    if hung:
        return Diagnosis(FAILURE_EXIT_CODE, _diagnose_hang(hung, reports))
    silent = [report for report in reports if "end" not in report and "signal" not in report]
    own_errors = [report for report in reports if is_own_error(_sentence(report))]
    found = _first_with_end(own_errors, ExitStatus.FAILED)
    if any(_has_crashed(report) for report in silent) or (silent and not found):
        return Diagnosis(FAILURE_EXIT_CODE, _diagnose_killed(silent, reports))
    if found := found or _first_with_end(reports, ExitStatus.FAILED):
        trace = found["text"].rpartition("\n")[0]
        text = f"{trace}\n{_error_of_rank(found, _sentence(found))}".lstrip("\n")
        return Diagnosis(FAILURE_EXIT_CODE, text, found)
    if len(reports) < processes and (missing := _missing(reports, processes)):
        text = f"error: {rank_list(missing)} of {processes} never started: see the messages of srun above"
        return Diagnosis(FAILURE_EXIT_CODE, text)
    signals = _signals(reports)
    if signals == ["SIGINT"]:
        return Diagnosis(INTERRUPTED_EXIT_CODE, f"interrupted by SIGINT{_progress(reports)}")
    names = ", ".join(signals) or "no signal"
    ended = [report for report in reports if report.get("end") == ExitStatus.SIGNALLED]
    who = f"{_describe_ranks(ended)} was" if 0 < len(ended) < len(reports) else "all processes were"
    return Diagnosis(FAILURE_EXIT_CODE, f"error: {who} ended by {names}{_progress(reports)}")


def _diagnose_hang(hung: Sequence[Record], reports: Sequence[Record]) -> str:
    """Returns the text for a hang: the position of each rank, the rarest position first, and the ranks that
    cause the hang (see `_causes_of_hang`)."""
    lines = [f"{hung[0]['text']}{_progress(hung)} (--hang-timeout)", *_position_lines(hung)]
    causes, what = _causes_of_hang(hung, reports)
    shown = causes[0] if causes else hung[0]
    if stacks := shown["stacks"].strip():
        lines[0:0] = [f"stacks of rank {shown['rank']}:", stacks]
    if not causes:
        what = "all ranks wait at the same place, for the network or for each other"
        return "\n".join([*lines, f"error: hang: {what}"])
    return "\n".join([*lines, f"error: hang: {_describe_ranks(causes)}: {what}"])


def _causes_of_hang(hung: Sequence[Record], reports: Sequence[Record]) -> tuple[list[Record], str]:
    """Returns the ranks that cause a hang, and what is wrong with the first of these ranks. Returns no rank
    if all ranks wait for each other.

    It returns the first of these sets that is not empty: ranks that are stopped or do not answer; ranks whose
    device does not answer; ranks that wait for no other rank; ranks whose main thread is at the rarest place.
    """
    stopped = {rank for report in hung for rank in report.get("stopped", ())}
    if silent := [report for report in reports if report["rank"] in stopped or "end" not in report]:
        is_stopped = silent[0]["rank"] in stopped
        return silent, "stopped by a signal (SIGSTOP)" if is_stopped else "does not answer"
    # A rank adds `waits_in` to its report when its device has answered.
    mute = [report for report in hung if "waits_in" not in report]
    if mute and len(mute) < len(hung):
        return mute, "its device does not answer"
    if free := _not_waiting(hung):
        return free, f"at {hang_position(free[0])}, waits for no other rank"
    places = Counter(report["place"] for report in hung)
    if len(places) == 1:
        return [], ""
    rarest = min(places, key=lambda place: places[place])
    return [report for report in hung if report["place"] == rarest], f"at {rarest}, where the others are not"


def _position_lines(hung: Sequence[Record]) -> list[str]:
    """Returns a line for each position, the rarest position first. A line has the ranks at the position, and
    the calls in which the first of these ranks waits. (Calls name process groups, so ranks at one position
    have different calls.)"""
    at: dict[str, list[Record]] = {}
    for report in hung:
        at.setdefault(hang_position(report), []).append(report)
    lines = []
    for position, ranks in sorted(at.items(), key=lambda item: len(item[1]))[:_MOST_POSITIONS]:
        calls = ranks[0].get("waits_in")
        waits = f"; rank {ranks[0]['rank']} waits in {calls}" if calls else ""
        lines.append(f"  {rank_list([report['rank'] for report in ranks])}: at {position}{waits}")
    more = len(at) - len(lines)
    return [*lines, f"  ranks at {more} more positions"] if more else lines


def hang_position(report: Mapping[str, object]) -> str:
    """Returns a text about where a rank hangs: the location of its main thread, and what its device does."""
    device = f"; device {report['device']}" if report.get("device") else ""
    return f"{report.get('place', 'an unknown place')}{device}"


def _not_waiting(hung: Sequence[Record]) -> list[Record]:
    """Returns the ranks that wait in no call, if at least one rank waits in a call; otherwise none.

    The ranks need a device, because gloo records no point-to-point calls. They need a finished step, because
    NCCL waits for the other ranks of a new communicator before it records a call.
    """
    if not all("device" in report and report.get("iteration") for report in hung):
        return []
    free = [report for report in hung if not report.get("waits_in")]
    return free if len(free) < len(hung) else []


def _diagnose_killed(silent: Sequence[Record], reports: Sequence[Record]) -> str:
    killed = [report for report in silent if not _crash(report)]
    if crashes := [report for report in silent if _has_crashed(report)] or ([] if killed else silent):
        where = f"{_describe_rank(crashes[0])}{_progress(reports)}"
        return f"{crashes[0]['stacks'].strip()}\nerror: {where}: crashed: {_crash(crashes[0])}"
    host = killed[0]["host"]
    on_host = [report for report in reports if report["host"] == host]
    cause = "killed (SIGKILL), possibly by the kernel's out-of-memory killer"
    if len(killed) == len(on_host) > 1 and len(on_host) < len(reports):
        cause = "all processes of the node ended at once: killed, or the node is lost"
    return f"error: {_describe_ranks(killed)}{_progress(reports)}: {cause}"


def _sentence(report: Record) -> str:
    """Returns the error of a report in one line, without the rank."""
    return re.sub(r"^error: (rank \d+ on [^:]*: )?", "", report.get("text", "").rpartition("\n")[2])


def is_own_failure(report: Record) -> bool:
    """Returns whether a rank has ended by an error that the end of another rank cannot have caused, and that
    is not known to be later than the error of another rank."""
    end = report.get("end")
    is_own = end in (ExitStatus.USER_ERROR, ExitStatus.STOPPED)
    is_own = is_own or (end == ExitStatus.FAILED and is_own_error(_sentence(report)))
    return is_own and report.get("first", True)


def _crash(report: Record) -> str:
    """Returns Python's name of a crash in native code, such as "Segmentation fault"; "" without a crash."""
    return report["stacks"].partition("Fatal Python error: ")[2].partition("\n")[0]


def _has_crashed(report: Record) -> bool:
    """Returns whether the rank itself has crashed. (The NCCL watchdog aborts ranks that lose a connection,
    which is not a crash of the rank itself.)"""
    return _crash(report) not in ("", "Aborted")


def _first_with_end(reports: Sequence[Record], end: ExitStatus) -> Record | None:
    """Returns the report of the first rank with this exit status: first in the order of the rendezvous store,
    or of the nodes' clocks if the store did not answer."""
    failed = [report for report in reports if report.get("end") == end]
    return min(failed, key=lambda report: (not report.get("first"), report["ended"]), default=None)


def _missing(reports: Sequence[Record], processes: int) -> list[int]:
    return sorted(set(range(processes)) - {report["rank"] for report in reports})


def _signals(reports: Sequence[Record]) -> list[str]:
    return sorted({report["signal"] for report in reports if "signal" in report})


def _describe_ranks(reports: Sequence[Record]) -> str:
    first, *others = reports
    more = f" (and {len(others)} more: {rank_list([other['rank'] for other in others])})" if others else ""
    return _describe_rank(first) + more


def _describe_rank(report: Record) -> str:
    stage = f", stage {report['stage']}" if "stage" in report else ""
    context = f", CP rank {report['cp_rank']}" if "cp_rank" in report else ""
    return f"rank {report['rank']} on {report['host']}{stage}{context} (pid {report['pid']})"


def _progress(reports: Sequence[Record]) -> str:
    steps = max((report.get("iteration", 0) for report in reports), default=0)
    return f", after iteration {steps}" if steps else ", before the first step"


def running(reports: Sequence[Record]) -> list[Record]:
    """Returns the reports of ranks of this node that have not ended."""
    return [report for report in reports if "end" not in report and is_running(report["pid"])]


def print_diagnosis(folder: Path, env: Mapping[str, str]) -> None:
    """Prints the diagnosis of the reports in a node's temporary folder, and writes it to torch's error file.
    Does not print a cause that a different node prints."""
    reports, world_size = read_reports(folder), world_size_of(env)
    is_hang = any(report.get("end") == ExitStatus.HANG for report in reports)
    for report in running(reports):
        # A running rank is not the cause, unless it hangs so that it does not even record a signal.
        if not is_hang or "signal" in report:
            report["end"] = ExitStatus.ABORTED
    is_whole = local_world_size_of(env) == world_size
    diagnosis = diagnose(reports, world_size if is_whole else len(reports))
    text, is_printed = diagnosis.text, True
    if not is_whole:
        text, is_printed = _of_one_node(diagnosis, {report["rank"] for report in reports}, env)
    if text:
        (print_error if is_printed else write_error_file)(text)


def _of_one_node(diagnosis: Diagnosis, local_ranks: set[int], env: Mapping[str, str]) -> tuple[str, bool]:
    """Returns the text of one node in a run of several nodes, and whether this node prints it. The first node
    prints an error that all ranks have; without node numbers, every node prints it. Any other error is
    printed by the node of the rank that failed first. The error of a connection that another node has closed
    is printed without its traceback."""
    cause, (*_, error) = diagnosis.cause, diagnosis.text.splitlines() or [""]
    if cause is None:
        return diagnosis.text, True
    is_lost = cause["end"] == ExitStatus.FAILED and is_lost_connection(error)
    text = f"{error} ({_ELSEWHERE})" if is_lost else diagnosis.text
    # The decision does not need rank 0's report, because rank 0 may have ended before it opened the report.
    if cause.get("on_all_ranks"):
        return text, node_rank_of(env) in (0, None)
    return text, cause.get("first_rank") in {None, *local_ranks}


def ask_slurm(job: str, nodes: str) -> SlurmJob:
    """Returns the state of a job and of its nodes. nodes: names in Slurm's notation. Fields are empty if
    Slurm does not answer."""
    shown = output_of("scontrol", "show", "job", "--oneliner", job, timeout_s=3)
    state = re.search(r"\bJobState=(\w+)", shown)
    listed = output_of("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format=%N %t", timeout_s=3)
    # Slurm marks a node that does not answer with *.
    lost = {line.split()[0] for line in listed.splitlines() if re.search(r" (down|fail|unk)|\*", line)}
    return SlurmJob(state[1] if state else "", tuple(sorted(lost)))


def main() -> None:
    """Runs the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, required=True, help="number of processes of the job")
    parser.add_argument(
        "--ended-by-slurm", action="store_true", help="Slurm has sent SIGTERM to the job's script"
    )
    parser.add_argument("--slurm", nargs=2, metavar=("JOB", "NODES"), help="job and nodes to ask Slurm about")
    arguments = parser.parse_args()
    if not 1 <= arguments.processes <= MAX_PROCESSES:
        parser.error(f"--processes {arguments.processes}: expected 1 to {MAX_PROCESSES:,}")
    slurm = ask_slurm(*arguments.slurm) if arguments.slurm else SlurmJob()
    reports = read_reports(arguments.folder)
    diagnosis = diagnose(reports, arguments.processes, slurm, arguments.ended_by_slurm)
    read = {f"rank-{report['rank']}.json" for report in reports}
    damaged = sorted({path.name for path in arguments.folder.glob("rank-*.json")} - read)
    if damaged and diagnosis.code:
        text = f"note: {first_few(damaged)} in {arguments.folder} cannot be read as reports of a rank"
        print(printable(text), file=sys.stderr)
    if diagnosis.text:
        print_error(diagnosis.text)
    sys.exit(diagnosis.code)


if __name__ == "__main__":
    main()
