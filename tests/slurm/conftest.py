"""The two-node Slurm of cluster.sh, and jobs on it as users submit them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
EXAMPLES = ROOT / "examples" / "slurm"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts a cluster; returns the environment of a shell that uses it."""
    # Without what a job or a launcher around these tests has set.
    ours = (
        "SLURM",
        "SBATCH",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "NNODES",
        "GPUS_PER_NODE",
        "MAX_RESTARTS",
        "REQUEUE",
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["PATH"] += ":/usr/sbin:/sbin"
    if shutil.which("slurmctld", path=env["PATH"]) is None:
        reason = "Slurm is not installed: apt-get install munge slurmctld slurmd slurm-client"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    env["SLURM_TEST_FOLDER"] = str(tmp_path_factory.mktemp("slurm") / "cluster")
    subprocess.run([CLUSTER, "start"], env=env, check=True, timeout=HANG_TIMEOUT_S)
    shown = subprocess.run([CLUSTER, "env"], env=env, check=True, capture_output=True, text=True).stdout
    name, _, value = shown.removeprefix("export ").strip().partition("=")
    env[name] = value
    env |= {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    try:
        yield env
    finally:
        subprocess.run([CLUSTER, "stop"], env=env, check=True, timeout=HANG_TIMEOUT_S)


@dataclass(frozen=True)
class Job:
    """A submitted job. number: the id of the job or of the array."""

    number: str
    folder: Path
    env: dict[str, str]

    def log(self) -> str:
        """The text of the log so far; for an array, the texts of all logs."""
        names = re.compile(rf".*-{self.number}(_\d+)?\.out")
        logs = [path for path in sorted(self.folder.glob("*.out")) if names.fullmatch(path.name)]
        return "".join(path.read_text() for path in logs)

    def wait_for(self, words: str, times: int = 1) -> None:
        """Waits until the log contains `words` as many `times`."""
        deadline = time.monotonic() + HANG_TIMEOUT_S
        while self.log().count(words) < times:
            assert time.monotonic() < deadline and self._exit_code() is None, self.log()
            time.sleep(0.2)

    def end(self) -> int:
        """Waits for the end; returns the exit code, 128 and more for a signal; the largest of an array."""
        deadline = time.monotonic() + HANG_TIMEOUT_S
        # sbatch --wait would ask ever more rarely.
        while (code := self._exit_code()) is None:
            assert time.monotonic() < deadline, f"job {self.number} does not end:\n{self.log()}"
            time.sleep(0.5)
        return code

    def rank(self, rank: int) -> int:
        """The process id of a rank, found by the variables of Slurm and the launcher."""
        found = self.processes(f"RANK={rank}")
        if not found:
            raise LookupError(f"job {self.number} has no rank {rank}")
        return found[0]

    def processes(self, variable: str) -> list[int]:
        """The ids of the job's processes with this in their environment."""
        words = {f"SLURM_CONF={self.env['SLURM_CONF']}", f"SLURM_JOB_ID={self.number}", variable}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if words <= set(path.read_text(errors="replace").split("\0")):
                    found.append(int(path.parent.name))
        return found

    def control(self, *command: str) -> str:
        """Runs a command of Slurm's on the job."""
        return subprocess.run(
            [*command, self.number], env=self.env, check=True, capture_output=True, text=True
        ).stdout

    def _exit_code(self) -> int | None:
        # Without an answer, slurmctld is late: it shares the cores with the job.
        command = ["scontrol", "show", "job", "--oneliner", self.number]
        shown = subprocess.run(command, env=self.env, capture_output=True, text=True).stdout
        if not shown or re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", shown):
            return None
        codes = re.findall(r" ExitCode=(\d+):(\d+)", shown)
        return max(int(signal) + 128 if int(signal) else int(code) for code, signal in codes)


@pytest.fixture
def submit(slurm: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Returns submit(script, *flags, options=(), **variables): `VARIABLES sbatch OPTIONS SCRIPT FLAGS`."""
    jobs = []

    def submit(script: str, *flags: str, options: tuple[str, ...] = (), **variables: object) -> Job:
        submitted = subprocess.run(
            ["sbatch", "--parsable", *options, str(EXAMPLES / script), *flags],
            cwd=tmp_path,
            env={**slurm, **{name: str(value) for name, value in variables.items()}},
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        jobs.append(Job(submitted.stdout.strip(), tmp_path, slurm))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.control("scancel")
