"""The command of an sbatch script: with the user's sizes, without the job that the shell is in."""

from __future__ import annotations

import pytest

from megatron.planner.script_command import read_script, script_environment
from tests.end_to_end.command import ROOT

SCRIPT = str(ROOT / "examples" / "slurm" / "tr11-176B-ml.slurm")


def test_sizes_in_the_environment_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `NNODES=2 sbatch SCRIPT` has them."""
    for name in ("NNODES", "GPUS_PER_NODE", "NUM_LAYERS"):
        monkeypatch.delenv(name, raising=False)
    assert read_script("--script", SCRIPT, [], script_environment()).processes == 48 * 8
    for name, value in {"NNODES": "2", "GPUS_PER_NODE": "3", "NUM_LAYERS": "5"}.items():
        monkeypatch.setenv(name, value)
    command = read_script("--script", SCRIPT, ["--seed", "7"], script_environment())
    assert command.processes == 6 and command.flags[-2:] == ["--seed", "7"]
    assert command.flags[command.flags.index("--num-layers") + 1] == "5"


def test_the_job_of_the_shell_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = read_script("--script", SCRIPT, [], script_environment())
    for name, value in {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "9", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert read_script("--script", SCRIPT, [], script_environment()) == alone
