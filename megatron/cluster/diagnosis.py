"""How a job ended, and which rank was the first cause, from the reports of its ranks.

    python -m megatron.cluster.diagnosis FOLDER --processes N [--ended-by-slurm] [--slurm JOB NODES]

FOLDER is what RANK_REPORTS was for the ranks. Prints nothing on a run that ended well, else the error once
and, as the last line, the cause. Exit code 0: finished; 75: to be continued; 1: failed, and a restart may
help; 2: failed, and a person has to act, since the same would happen again. Needs no torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cluster.exit_codes import FAILURE_EXIT_CODE, REQUEUE_EXIT_CODE
from megatron.cluster.rank_reports import ExitStatus, read_reports
from megatron.config.errors import CONFIG_ERROR_EXIT_CODE
from megatron.text_table import rank_list

Report = dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    """code: see above. text: what to print; the last line names the cause."""

    code: int
    text: str = ""


@dataclass(frozen=True)
class Slurm:
    """What Slurm knows of the job. state: as 'CANCELLED', '' if unknown. lost_nodes: of its nodes, those that
    are down or do not answer."""

    state: str = ""
    lost_nodes: tuple[str, ...] = ()


def diagnose(
    reports: Sequence[Report], processes: int, slurm: Slurm = Slurm(), ended_by_slurm: bool = False
) -> Diagnosis:
    """The verdict over a job of so many processes. ended_by_slurm: it has told the job's script to end."""
    ends = {report.get("end") for report in reports}
    if len(reports) == processes and ends == {ExitStatus.FINISHED}:
        return Diagnosis(0)
    if len(reports) == processes and ends <= {ExitStatus.FINISHED, ExitStatus.CONTINUED}:
        if not ended_by_slurm and not slurm.lost_nodes:
            return _stopped_on_request(reports)
        text = f"{_ended(slurm)}{_progress(reports)}: checkpoint saved, resumes after requeue"
        return Diagnosis(REQUEUE_EXIT_CODE, text)
    if found := _first([report for report in reports if report.get("end") == ExitStatus.MISTAKE]):
        return Diagnosis(CONFIG_ERROR_EXIT_CODE, _error_text(found, reports))
    if slurm.lost_nodes:
        return Diagnosis(FAILURE_EXIT_CODE, f"error: {_ended(slurm)}{_progress(reports)}")
    if found := _first([report for report in reports if report.get("end") == ExitStatus.STOPPED]):
        return Diagnosis(CONFIG_ERROR_EXIT_CODE, _error_text(found, reports))
    if reports and ends <= {ExitStatus.FINISHED, ExitStatus.CONTINUED}:
        missing = sorted(set(range(processes)) - {report["rank"] for report in reports})
        text = f"error: {rank_list(missing)} left no report: the nodes do not share the folder of the reports"
        return Diagnosis(CONFIG_ERROR_EXIT_CODE, f"{text} (RUN_DIR)")
    if ended_by_slurm:
        return Diagnosis(FAILURE_EXIT_CODE, f"error: {_ended(slurm)}{_progress(reports)}")
    return Diagnosis(FAILURE_EXIT_CODE, _fault(reports, processes))


def _stopped_on_request(reports: Sequence[Report]) -> Diagnosis:
    """Of a run that was asked to leave. If no step was done, the next start would fare no better."""
    if any("iteration" in report for report in reports):
        return Diagnosis(REQUEUE_EXIT_CODE)
    return Diagnosis(
        CONFIG_ERROR_EXIT_CODE,
        "error: the run was told to leave before its first step: give the job more time than starting takes "
        "and the warning before its end (#SBATCH --signal, --exit-duration-in-mins)",
    )


def _error_text(found: Report, reports: Sequence[Report]) -> str:
    """The sentence of a rank, with who it is unless all nodes say the same."""
    told_on = {report["host"] for report in reports if report.get("text") == found["text"]}
    if told_on == {report["host"] for report in reports}:
        return found["text"]
    return f"error: {_who(found)}{_progress([found])}: {found['text'].removeprefix('error: ')}"


def _ended(slurm: Slurm) -> str:
    if slurm.lost_nodes:
        return f"lost the node {', '.join(slurm.lost_nodes)}, which does not answer Slurm"
    # While it ends, the job's state need not say yet what it ends of.
    state = "" if slurm.state in ("", "RUNNING", "COMPLETING") else f" ({slurm.state})"
    return f"Slurm ended the job{state}"


def _fault(reports: Sequence[Report], processes: int) -> str:
    """What went wrong inside the job: what a rank cannot tell of itself comes before what others tell."""
    hung = [report for report in reports if report.get("end") == ExitStatus.HANG]
    if hung:
        return _hang(hung, reports)
    silent = [report for report in reports if "end" not in report and "signal" not in report]
    if silent:
        return _killed(silent, reports)
    if found := _first([report for report in reports if report.get("end") == ExitStatus.FAILED]):
        trace, _, error = found["text"].rpartition("\n")
        error = re.sub(r"^error: rank \d+ on [^:]*: ", "", error)
        return f"{trace}\nerror: {_who(found)}{_progress([found])}: {error}".lstrip("\n")
    missing = sorted(set(range(processes)) - {report["rank"] for report in reports})
    if missing:
        return f"error: {rank_list(missing)} of {processes} never started: see the messages of srun above"
    signalled = [report for report in reports if "signal" in report]
    names = ", ".join(sorted({report["signal"] for report in signalled})) or "no signal"
    return f"error: all processes were ended by {names}{_progress(reports)}"


def _hang(hung: Sequence[Report], reports: Sequence[Report]) -> str:
    """Where each rank stood, the rarest place first; ranks that told nothing are the cause."""
    places = Counter(report["place"] for report in hung)
    lines = [f"{hung[0]['text']}{_progress(hung)} (--hang-timeout); stacks beside the reports"]
    for place, _ in sorted(places.items(), key=lambda item: item[1]):
        ranks = [report["rank"] for report in hung if report["place"] == place]
        lines.append(f"  {rank_list(ranks)}: at {place}")
    stopped = {rank for report in hung for rank in report.get("stopped", ())}
    told = {report["rank"] for report in hung}
    suspects = [report for report in reports if report["rank"] in stopped or "end" not in report]
    if not suspects and len(places) > 1:
        rarest = min(places, key=lambda place: places[place])
        suspects = [report for report in hung if report["place"] == rarest]
    if not suspects:
        return "\n".join(
            [*lines, "error: hang: all ranks wait in the same place, for the network or each other"]
        )
    first = suspects[0]
    what = f"at {first.get('place')}, where the others are not"
    if first["rank"] in stopped:
        what = "stopped by a signal (SIGSTOP)"
    elif first["rank"] not in told:
        what = "does not answer"
    return "\n".join([*lines, f"error: hang: {_several(suspects)}: {what}"])


def _killed(silent: Sequence[Report], reports: Sequence[Report]) -> str:
    crashes = [report for report in silent if "Fatal Python error" in report["stacks"]]
    if crashes:
        stacks = crashes[0]["stacks"].strip()
        name = stacks.partition("Fatal Python error: ")[2].splitlines()[0]
        return f"{stacks}\nerror: {_who(crashes[0])}{_progress(reports)}: crashed: {name}"
    host = silent[0]["host"]
    on_host = [report for report in reports if report["host"] == host]
    cause = "killed (SIGKILL), as by a kernel that is out of memory"
    if len(silent) == len(on_host) > 1 and len(on_host) < len(reports):
        cause = "all processes of the node ended at once: killed, or the node is lost"
    return f"error: {_several(silent)}{_progress(reports)}: {cause}"


def _first(reports: Sequence[Report]) -> Report | None:
    """Who failed first: by the store of the run, if it could be asked, else by the clocks of the nodes."""
    return min(reports, key=lambda report: (not report.get("first"), report["ended"]), default=None)


def _several(reports: Sequence[Report]) -> str:
    more = (
        f" (and {len(reports) - 1} more: {rank_list([r['rank'] for r in reports[1:]])})"
        if reports[1:]
        else ""
    )
    return _who(reports[0]) + more


def _who(report: Report) -> str:
    stage = f", stage {report['stage']}" if "stage" in report else ""
    return f"rank {report['rank']} on {report['host']}{stage} (pid {report['pid']})"


def _progress(reports: Sequence[Report]) -> str:
    steps = max((report.get("iteration", 0) for report in reports), default=0)
    return f", after iteration {steps}" if steps else ", before the first step"


def ask_slurm(job: str, nodes: str) -> Slurm:
    """What Slurm says now of a job and of the nodes that it had (both as Slurm writes them); nothing where it
    does not answer."""
    state = re.search(r"\bJobState=(\w+)", _answer("scontrol", "show", "job", "--oneliner", job))
    # A state with * does not answer.
    listed = _answer("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format=%N %t").splitlines()
    lost = {line.split()[0] for line in listed if re.search(r" (down|fail|unk)|\*", line)}
    return Slurm(state[1] if state else "", tuple(sorted(lost)))


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, required=True, help="of the whole job")
    parser.add_argument(
        "--ended-by-slurm", action="store_true", help="Slurm has told the job's script to end"
    )
    parser.add_argument("--slurm", nargs=2, metavar=("JOB", "NODES"), help="what to ask Slurm about")
    arguments = parser.parse_args()
    slurm = ask_slurm(*arguments.slurm) if arguments.slurm else Slurm()
    verdict = diagnose(read_reports(arguments.folder), arguments.processes, slurm, arguments.ended_by_slurm)
    if verdict.text:
        print(verdict.text, file=sys.stderr, flush=True)
    sys.exit(verdict.code)


if __name__ == "__main__":
    main()
