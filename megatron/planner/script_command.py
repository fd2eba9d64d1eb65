"""The training command of an sbatch script, as the script prints it with DRY_RUN=1."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ConfigError

PROGRAM = "pretrain_gpt.py"
_TIMEOUT_S = 60
# Of a job that this program may run in. The sizes that the example scripts read, as NNODES, are the user's.
_JOB_VARIABLES = ("SLURM_", "MASTER_")


@dataclass(frozen=True)
class ScriptCommand:
    """The flags of PROGRAM, and how many processes the script starts; None without torch's launcher."""

    flags: list[str]
    nodes: int | None
    processes_per_node: int | None

    @property
    def processes(self) -> int | None:
        """On all nodes."""
        if self.nodes is None or self.processes_per_node is None:
            return None
        return self.nodes * self.processes_per_node


def script_environment() -> dict[str, str]:
    """This environment without the job that this program may run in. How to reach Slurm stays."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_VARIABLES) or name == "SLURM_CONF"
    }


def read_script(option: str, script: str, flags: Sequence[str], env: Mapping[str, str]) -> ScriptCommand:
    """The last training command of a script like those of examples/slurm, started with `flags`.

    option: the flag that names the script. env: see `script_environment`. ConfigError if the script does not
    print a command, or not in time.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(
            f"{option} {script}: the file does not exist; expected a script like those in examples/slurm"
        )
    try:
        run = subprocess.run(
            ["bash", str(path), *flags],
            env={**env, "DRY_RUN": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{option} {script} has not ended after {_TIMEOUT_S} s: expected a script that prints its "
            "command with DRY_RUN=1, like those in examples/slurm"
        ) from None
    lines = re.sub(r" \\\n +", " ", run.stdout).splitlines()
    commands = [line for line in lines if PROGRAM in line and not line.lstrip().startswith("#")]
    if run.returncode or not commands:
        output = (run.stderr.strip().splitlines() or ["nothing"])[-1].removeprefix("error: ")
        raise ConfigError(
            f"{option} {script} prints no command with {PROGRAM} when run with DRY_RUN=1 (exit code "
            f"{run.returncode}, output: {output}): expected a script like those in examples/slurm"
        )
    words = shlex.split(commands[-1])
    place = next(index for index, word in enumerate(words) if word.endswith(PROGRAM))
    launcher = [word.replace("-", "_") if word.startswith("--") else word for word in words[:place]]
    nodes, per_node = (_number_after(launcher, name) for name in ("__nnodes", "__nproc_per_node"))
    return ScriptCommand(words[place + 1 :], nodes if nodes or not per_node else 1, per_node)


def _number_after(words: Sequence[str], option: str) -> int | None:
    value = words[words.index(option) + 1] if option in words[:-1] else ""
    return int(value) if value.isdigit() else None
