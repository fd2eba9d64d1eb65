"""The two-node Slurm of tests/slurm/cluster.sh on this machine, and jobs on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support import HANG_TIMEOUT_S

CLUSTER = Path(__file__).resolve().parents[1] / "slurm" / "cluster.sh"
# Variables that a job or a launcher around this process has set.
_OURS = (
    *("SLURM", "SBATCH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "NNODES", "GPUS_PER_NODE"),
    *("MAX_RESTARTS", "REQUEUE"),
)


def shell_environment() -> dict[str, str]:
    """Returns the environment of a shell outside of any job, with Slurm's programs in its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**env, "PATH": f"{env['PATH']}:/usr/sbin:/sbin"}


@contextmanager
def running_cluster(folder: Path, **settings: str) -> Iterator[dict[str, str]]:
    """Starts a cluster. Yields the environment of a shell that uses it. settings: variables of that shell."""
    env = {**shell_environment(), "SLURM_TEST_FOLDER": str(folder), "PYTHON": sys.executable}
    env |= {"DS_ACCELERATOR": "cpu", **settings}
    try:
        subprocess.run([CLUSTER, "start"], env=env, check=True, timeout=HANG_TIMEOUT_S)
        shown = subprocess.run([CLUSTER, "env"], env=env, check=True, capture_output=True, text=True).stdout
        name, _, value = shown.removeprefix("export ").strip().partition("=")
        yield {**env, name: value}
    finally:
        subprocess.run([CLUSTER, "stop"], env=env, check=True, timeout=HANG_TIMEOUT_S)


@dataclass(frozen=True)
class Job:
    """A submitted job. number: the id of the job or of the array."""

    number: str
    folder: Path
    env: dict[str, str]

    def log(self) -> str:
        """Returns the text of the log so far, for an array the texts of all logs."""
        names = re.compile(rf".*-{self.number}(_\d+)?\.out")
        logs = [path for path in sorted(self.folder.glob("*.out")) if names.fullmatch(path.name)]
        return "".join(path.read_text() for path in logs)

    def wait_for(self, words: str, times: int = 1) -> None:
        """Waits until the log contains `words` at least `times` times."""
        deadline = time.monotonic() + HANG_TIMEOUT_S
        while self.log().count(words) < times:
            assert time.monotonic() < deadline and self._exit_code() is None, self.log()
            time.sleep(0.2)

    def end(self) -> int:
        """Waits for the end. Returns the exit code, which is 128 or more after a signal. For an array,
        returns the largest exit code."""
        deadline = time.monotonic() + HANG_TIMEOUT_S
        # sbatch --wait would ask less and less often.
        while (code := self._exit_code()) is None:
            assert time.monotonic() < deadline, f"job {self.number} does not end:\n{self.log()}"
            time.sleep(0.5)
        return code

    def rank(self, rank: int) -> int:
        """Returns the process id of a rank, found by the variables of Slurm and the launcher."""
        found = self.processes(f"RANK={rank}")
        if not found:
            raise LookupError(f"job {self.number} has no rank {rank}")
        return found[0]

    def processes(self, *variables: str) -> list[int]:
        """Returns the ids of the job's processes with these variables in their environment."""
        words = {f"SLURM_CONF={self.env['SLURM_CONF']}", f"SLURM_JOB_ID={self.number}", *variables}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if words <= set(path.read_text(errors="replace").split("\0")):
                    found.append(int(path.parent.name))
        return found

    def control(self, *command: str) -> str:
        """Runs a command of Slurm on the job."""
        return subprocess.run(
            [*command, self.number], env=self.env, check=True, capture_output=True, text=True
        ).stdout

    def _exit_code(self) -> int | None:
        # No answer means that slurmctld is late: it shares the cores with the job.
        command = ["scontrol", "show", "job", "--oneliner", self.number]
        shown = subprocess.run(command, env=self.env, capture_output=True, text=True).stdout
        if not shown or re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", shown):
            return None
        codes = re.findall(r" ExitCode=(\d+):(\d+)", shown)
        return max(int(signal) + 128 if int(signal) else int(code) for code, signal in codes)
