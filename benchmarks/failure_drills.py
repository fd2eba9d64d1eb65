"""Injects failures into Slurm jobs: does the job end soon, name the cause, and resume from its checkpoint?

    .venv/bin/python benchmarks/failure_drills.py              # 20 of each: 2 hours on 2 cores
    .venv/bin/python benchmarks/failure_drills.py --each 2 --faults kill stop

Needs Slurm's programs. tests/slurm/cluster.sh starts the cluster: two emulated nodes on this machine with two
processes each. A tiny model trains and saves every 10 steps. The fault is injected at a random time after the
first step. The next sbatch must resume, and the next fault is injected into this job. `disk` fills a small
file system and needs root. The exit code is 1 if a drill fails.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import benchmark_parser, describe_machine
from megatron.data.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parent.parent

CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
FAULTS = ("scancel", "kill", "stop", "node", "disk")
SAVE_INTERVAL = 10
HANG_TIMEOUT_S = 10
LIMIT_S = 60.0
JOB = f"""#!/usr/bin/env bash
#SBATCH --job-name=drill --nodes=2 --exclusive --no-requeue --output=%x-%j.out
set -euo pipefail
source "$REPO/examples/slurm/common.sh"
NNODES=2 GPUS_PER_NODE=2 RUN_DIR=run
launch --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 \\
    --seq-length 64 --position-embedding-type rotary --vocab-size 256 \\
    --micro-batch-size 1 --global-batch-size 8 --train-iters 50_000 --lr 1e-3 --lr-decay-style constant \\
    --data-path bytes --split 100,0,0 --eval-iters 0 --log-interval 1 --hang-timeout {HANG_TIMEOUT_S} \\
    --save disk/checkpoints --load disk/checkpoints --save-interval {SAVE_INTERVAL} --keep-last 2
"""


def main() -> None:
    """Prints a line per drill and a row per kind of fault."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--each", type=int, default=20, metavar="N", help="drills per fault (default: 20)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0, help="seed of times and victims (default: 0)")
    arguments = parser.parse_args()
    print(describe_machine())
    rng = random.Random(arguments.seed)
    drills: list[Drill] = []
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        try:
            for round in range(arguments.each):
                for fault in arguments.faults:
                    drills.append(drill(cluster, fault, rng, drills[-1] if drills else None))
                    print(f"round {round + 1}: {drills[-1].describe()}", flush=True)
            start(cluster, drills[-1]).end("scancel", cluster)
        except KeyboardInterrupt:
            drills = drills[:-1]  # the next job was not observed
    print(f"\nfault    drills  ended in {LIMIT_S:.0f} s  median  most  cause named  resumed  most steps lost")
    for fault in arguments.faults:
        if of_kind := [done for done in drills if done.fault == fault]:
            print(row(fault, of_kind))
    sys.exit(0 if all(done.good for done in drills) else 1)


@dataclass
class Drill:
    """One injected fault. seconds: from the fault until the job and all its processes had ended. reached: the
    last step in the log. resumed_at: the step from which the next job resumed; None if it did not resume."""

    fault: str
    seconds: float
    expected: str
    last_line: str
    reached: int
    resumed_at: int | None = None

    @property
    def named(self) -> bool:
        """Whether the last line of the log names the cause."""
        return re.search(self.expected, self.last_line) is not None

    @property
    def lost(self) -> int | None:
        """The number of steps that must be repeated."""
        return None if self.resumed_at is None else max(self.reached - self.resumed_at, 0)

    @property
    def good(self) -> bool:
        """Whether the drill succeeded in every respect."""
        return self.seconds <= LIMIT_S and self.named and self.lost is not None and self.lost <= SAVE_INTERVAL

    def describe(self) -> str:
        """Returns the result in one line, before the next job has started."""
        verdict = "cause named" if self.named else "CAUSE NOT NAMED"
        return f"{self.fault}: {self.seconds:.1f} s, {verdict}: {self.last_line}"


def row(fault: str, drills: list[Drill]) -> str:
    """Returns the row of the table for the drills of one fault."""
    seconds = [done.seconds for done in drills]
    lost = [done.lost for done in drills if done.lost is not None]
    in_time, named = sum(s <= LIMIT_S for s in seconds), sum(done.named for done in drills)
    median, most = statistics.median(seconds), max(seconds)
    return (
        f"{fault:8} {len(drills):6} {in_time:14} {median:7.1f} {most:5.1f} {named:12} {len(lost):8} "
        f"{max(lost, default=0):16}"
    )


@dataclass(frozen=True)
class Cluster:
    """Where jobs run: the folder, and the environment of a shell that uses the cluster."""

    folder: Path
    env: dict[str, str]

    def call(self, *command: str) -> str:
        """Runs a command in that shell; returns its output."""
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True).stdout


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster that detects a dead node daemon after 10 seconds, with data and a disk of 24 MB."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    env |= {"SLURM_TEST_FOLDER": str(folder / "cluster"), "SLURM_TEST_SLURMD_TIMEOUT": "10"}
    env |= {"SLURM_CONF": str(folder / "cluster" / "slurm.conf"), "REPO": str(ROOT)}
    env |= {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "MAX_RESTARTS": "0", "REQUEUE": "no"}
    cluster = Cluster(folder, env)
    (folder / "job.slurm").write_text(JOB)
    write_data(folder / "bytes")
    (folder / "disk").mkdir()
    mounted = os.geteuid() == 0 and mount(folder / "disk")
    try:
        subprocess.run([CLUSTER, "start"], env=cluster.env, check=True)
        yield cluster
    finally:
        subprocess.run([CLUSTER, "stop"], env=cluster.env, check=True)
        if mounted:
            subprocess.run(["umount", str(folder / "disk")], check=True)


def mount(folder: Path) -> bool:
    """Mounts a small file system in memory."""
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "drill", str(folder)]
    return subprocess.run(command, check=False).returncode == 0


def write_data(prefix: Path) -> None:
    """Writes the bytes of README.md as a token file."""
    import numpy as np

    text = np.fromfile(ROOT / "README.md", np.uint8).astype(np.uint16)
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        builder.add_documents(text, [len(text)])
        builder.finalize()


@dataclass(frozen=True)
class Job:
    """A job that has done its first step."""

    number: str
    log: Path

    def processes(self, cluster: Cluster) -> dict[int, Mapping[str, str]]:
        """Returns process id -> environment of the job's processes that are alive."""
        wanted = {"SLURM_JOB_ID": self.number, "SLURM_CONF": cluster.env["SLURM_CONF"]}
        found = {int(path.parent.name): environment(path) for path in Path("/proc").glob("[0-9]*/environ")}
        return {pid: env for pid, env in found.items() if wanted.items() <= env.items()}

    def rank(self, cluster: Cluster, rank: int) -> int:
        return next(
            pid
            for pid, env in self.processes(cluster).items()
            if env.get("RANK") == str(rank) and Path(f"/proc/{pid}/comm").read_text().startswith("python")
        )

    def end(self, fault: str, cluster: Cluster, victim: int = 0) -> str:
        """Injects the fault; returns a pattern for the last line of the log."""
        if fault == "scancel":
            cluster.call("scancel", self.number)
            return "Slurm ended the job"
        if fault == "kill":
            os.kill(self.rank(cluster, victim), signal.SIGKILL)
            return rf"rank {victim} on .*killed \(SIGKILL\)"
        if fault == "stop":
            os.kill(self.rank(cluster, victim), signal.SIGSTOP)
            return rf"hang: rank {victim} on .*stopped by a signal"
        if fault == "node":
            node = f"n{1 + victim // 2}"
            pid = (cluster.folder / "cluster" / "pid" / f"slurmd-{node}").read_text()
            os.kill(int(pid), signal.SIGKILL)
            return f"node {node} is down or not responding"
        fill(cluster.folder / "disk" / "filler")
        return r"cannot be written .* 0\.\d MB are free there"

    def wait_for_end(self, cluster: Cluster, limit_s: float = 180.0) -> None:
        """Waits until Slurm has no such job and none of its processes is alive."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            over = not re.search(
                r"RUNNING|COMPLETING|PENDING", cluster.call("scontrol", "show", "job", self.number)
            )
            if over and not self.processes(cluster):
                return
            time.sleep(0.5)


def drill(cluster: Cluster, fault: str, rng: random.Random, previous: Drill | None) -> Drill:
    """Starts a job, which resumes from the previous drill, and injects a fault."""
    job = start(cluster, previous)
    time.sleep(rng.uniform(0.0, 6.0))
    victim = rng.randrange(4)
    began = time.monotonic()
    expected = job.end(fault, cluster, victim)
    job.wait_for_end(cluster)
    seconds = time.monotonic() - began
    # Repairs the fault.
    (cluster.folder / "disk" / "filler").unlink(missing_ok=True)
    subprocess.run([CLUSTER, "start"], env=cluster.env, check=True)
    lines = job.log.read_text().splitlines()
    reached = max(steps(job.log))
    return Drill(fault, seconds, expected, lines[-1], reached)


def start(cluster: Cluster, previous: Drill | None) -> Job:
    """Starts a job and waits for its first step. Sets `resumed_at` of the previous drill."""
    number = cluster.call("sbatch", "--parsable", "job.slurm").strip()
    job = Job(number, cluster.folder / f"drill-{number}.out")
    deadline = time.monotonic() + 240
    while not (job.log.exists() and steps(job.log)):
        if time.monotonic() > deadline:
            sys.exit(f"job {number} does not start:\n{job.log.read_text() if job.log.exists() else ''}")
        time.sleep(0.2)
    resumed = re.search(r"^starting from .*iteration (\d+)", job.log.read_text(), re.MULTILINE)
    if previous is not None and resumed is not None:
        previous.resumed_at = int(resumed[1])
    return job


def steps(log: Path) -> list[int]:
    """Returns the steps that have a line in the log."""
    return [int(step) for step in re.findall(r"^ iteration +(\d+)/", log.read_text(), re.MULTILINE)]


def environment(path: Path) -> dict[str, str]:
    """Returns the environment of a process; empty if it has ended."""
    try:
        words = path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65_536))
        except OSError:
            pass


if __name__ == "__main__":
    main()
