"""The two-node Slurm of cluster.sh, and jobs on it as users submit them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT
from tests.support.slurm import Job, running_cluster, shell_environment

EXAMPLES = ROOT / "examples" / "slurm"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts a cluster. Returns the environment of a shell that uses it."""
    if shutil.which("slurmctld", path=shell_environment()["PATH"]) is None:
        reason = "Slurm is not installed: apt-get install munge slurmctld slurmd slurm-client"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with running_cluster(folder, TOKENIZERS_PARALLELISM="false") as env:
        yield env


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
