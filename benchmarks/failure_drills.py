"""Injects failures into Slurm jobs, and checks that each job ends soon, names the cause, and resumes from its
checkpoint.

    .venv/bin/python benchmarks/failure_drills.py              # 20 of each: 2 hours on 2 cores
    .venv/bin/python benchmarks/failure_drills.py --each 2 --faults kill stop

The benchmark needs Slurm's programs. tests/slurm/cluster.sh starts the cluster: two emulated nodes on this
machine, with two processes each. A tiny model trains and saves every 10 steps. Each fault is injected at a
random time after the first step. The next job must resume, and gets the next fault. The fault `disk` fills a
small file system and needs root. The exit code is 1 if a drill fails.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import benchmark_parser, describe_machine
from megatron.cluster.launch import wait_until
from megatron.data.dataset_builder import IndexedDatasetBuilder
from tests.support.slurm import CLUSTER, Job, running_cluster

ROOT = Path(__file__).resolve().parent.parent
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
    with tempfile.TemporaryDirectory() as name, cluster_with_disk(folder := Path(name)) as env:
        try:
            for round in range(arguments.each):
                for fault in arguments.faults:
                    drills.append(drill(folder, env, fault, rng, drills[-1] if drills else None))
                    print(f"round {round + 1}: {drills[-1].describe()}", flush=True)
            inject("scancel", start(folder, env, drills[-1]))
        except KeyboardInterrupt:
            drills = drills[:-1]  # no job after the last drill was observed
    print(f"\nfault    drills  ended in {LIMIT_S:.0f} s  median  most  cause named  resumed  most steps lost")
    for fault in arguments.faults:
        if of_kind := [done for done in drills if done.fault == fault]:
            print(row(fault, of_kind))
    sys.exit(0 if all(done.good for done in drills) else 1)


@dataclass
class Drill:
    """One injected fault. seconds: time from the fault until the job and all its processes had ended.
    reached: last step in the log. resumed_at: step from which the next job resumed; None if it did not
    resume."""

    fault: str
    seconds: float
    expected: str
    last_line: str
    reached: int
    resumed_at: int | None = None

    @property
    def named(self) -> bool:
        """Returns whether the last line of the log names the cause."""
        return re.search(self.expected, self.last_line) is not None

    @property
    def lost(self) -> int | None:
        """Returns the number of steps that must be repeated."""
        return None if self.resumed_at is None else max(self.reached - self.resumed_at, 0)

    @property
    def good(self) -> bool:
        """Returns whether the drill succeeded in every respect."""
        return self.seconds <= LIMIT_S and self.named and self.lost is not None and self.lost <= SAVE_INTERVAL

    def describe(self) -> str:
        """Returns the result in one line. It can be called before the next job has started."""
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


@contextmanager
def cluster_with_disk(folder: Path) -> Iterator[dict[str, str]]:
    """Starts a cluster that detects a dead node daemon after 10 seconds, with data and a disk of 24 MB.
    Yields the environment of a shell that uses it."""
    (folder / "job.slurm").write_text(JOB)
    write_data(folder / "bytes")
    (folder / "disk").mkdir()
    mounted = os.geteuid() == 0 and mount(folder / "disk")
    settings = {"SLURM_TEST_SLURMD_TIMEOUT": "10", "REPO": str(ROOT), "MAX_RESTARTS": "0", "REQUEUE": "no"}
    try:
        with running_cluster(folder / "cluster", **settings) as env:
            yield env
    finally:
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


def inject(fault: str, job: Job, victim: int = 0) -> str:
    """Injects the fault. Returns a pattern that the last line of the log must match."""
    if fault == "scancel":
        job.control("scancel")
        return "Slurm ended the job"
    if fault == "kill":
        os.kill(job.rank(victim), signal.SIGKILL)
        return rf"rank {victim} on .*killed \(SIGKILL\)"
    if fault == "stop":
        os.kill(job.rank(victim), signal.SIGSTOP)
        return rf"hang: rank {victim} on .*stopped by a signal"
    if fault == "node":
        node = f"n{1 + victim // 2}"
        pid = Path(job.env["SLURM_TEST_FOLDER"], "pid", f"slurmd-{node}").read_text()
        os.kill(int(pid), signal.SIGKILL)
        return f"node {node} is down or not responding"
    fill(job.folder / "disk" / "filler")
    return r"cannot be written .* 0\.\d MB are free there"


def drill(folder: Path, env: dict[str, str], fault: str, rng: random.Random, previous: Drill | None) -> Drill:
    """Starts a job that resumes from the previous drill, and injects a fault."""
    job = start(folder, env, previous)
    time.sleep(rng.uniform(0.0, 6.0))
    victim = rng.randrange(4)
    began = time.monotonic()
    expected = inject(fault, job, victim)
    job.end()
    wait_until(lambda: not job.processes(), 180.0)
    seconds = time.monotonic() - began
    # The fault `disk` is repaired.
    (folder / "disk" / "filler").unlink(missing_ok=True)
    subprocess.run([CLUSTER, "start"], env=env, check=True)
    return Drill(fault, seconds, expected, job.log().splitlines()[-1], max(steps(job.log())))


def start(folder: Path, env: dict[str, str], previous: Drill | None) -> Job:
    """Starts a job and waits for its first step. Sets `resumed_at` of the previous drill."""
    command = ["sbatch", "--parsable", "job.slurm"]
    done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    job = Job(done.stdout.strip(), folder, env)
    if not wait_until(lambda: bool(steps(job.log())), 240.0, 0.2):
        sys.exit(f"job {job.number} does not start:\n{job.log()}")
    resumed = re.search(r"^starting from .*iteration (\d+)", job.log(), re.MULTILINE)
    if previous is not None and resumed is not None:
        previous.resumed_at = int(resumed[1])
    return job


def steps(log: str) -> list[int]:
    """Returns the steps that have a line in the log."""
    return [int(step) for step in re.findall(r"^ iteration +(\d+)/", log, re.MULTILINE)]


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65_536))
        except OSError:
            pass


if __name__ == "__main__":
    main()
