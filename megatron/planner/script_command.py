"""The training command of an sbatch script, as the script prints it with DRY_RUN=1.

The script is executed, with the rights of the user: only what it does with DRY_RUN=1 decides what happens.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ConfigError

PROGRAM = "pretrain_gpt.py"
_TIMEOUT_S = 60
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_SHOWN = 200
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
    """The last training command of a script like those of examples/slurm, which is executed with `flags`.

    option: the flag that names the script. env: see `script_environment`. ConfigError if the script does not
    print a command, or not in time, or prints without end.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(
            f"{option} {script}: the file does not exist; expected a script like those in examples/slurm"
        )
    expected = "expected a script that prints its command with DRY_RUN=1, like those in examples/slurm"
    try:
        exit_code, stdout, stderr = _run(["bash", str(path), *flags], {**env, "DRY_RUN": "1"})
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{option} {script} has not ended after {_TIMEOUT_S} s: {expected}") from None
    except _TooLong:
        raise ConfigError(
            f"{option} {script} prints more than {_MAX_OUTPUT_BYTES:,} bytes: {expected}"
        ) from None
    lines = re.sub(r" \\\n +", " ", stdout).splitlines()
    commands = [line for line in lines if PROGRAM in line and not line.lstrip().startswith("#")]
    words, place = _words(commands[-1]) if commands else ([], None)
    if exit_code or place is None:
        output = (stderr.strip().splitlines() or ["nothing"])[-1].removeprefix("error: ")
        raise ConfigError(
            f"{option} {script} prints no command with {PROGRAM} when run with DRY_RUN=1 (exit code "
            f"{exit_code}, output: {output[:_MAX_SHOWN]}): expected a script like those in examples/slurm"
        )
    launcher = [word.replace("-", "_") if word.startswith("--") else word for word in words[:place]]
    nodes, per_node = (_number_after(launcher, name) for name in ("__nnodes", "__nproc_per_node"))
    return ScriptCommand(words[place + 1 :], nodes if nodes or not per_node else 1, per_node)


class _TooLong(Exception):
    """The output of a script has no end."""


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, standard output and error. The command has a session of its own, and all processes of it are
    killed at the end. TimeoutExpired after _TIMEOUT_S, _TooLong for more output than a script prints."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        with selectors.DefaultSelector() as selector:
            for stream, output in outputs.items():
                selector.register(stream, selectors.EVENT_READ, output)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready or time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, _TIMEOUT_S)
                for key, _ in ready:
                    chunk = os.read(key.fd, _MAX_OUTPUT_BYTES)
                    key.data.extend(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif len(key.data) > _MAX_OUTPUT_BYTES:
                        raise _TooLong
        code = process.wait(max(deadline - time.monotonic(), 0))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in outputs:
            stream.close()
    stdout, stderr = (bytes(output).decode(errors="replace") for output in outputs.values())
    return code, stdout, stderr


def _words(command: str) -> tuple[list[str], int | None]:
    """The words of a command and the place of PROGRAM among them; None if it is not a word of its own."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quotation mark
        return [], None
    return words, next((index for index, word in enumerate(words) if word.endswith(PROGRAM)), None)


def _number_after(words: Sequence[str], option: str) -> int | None:
    value = words[words.index(option) + 1] if option in words[:-1] else ""
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else None
