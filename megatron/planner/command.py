"""Reads the flags of a run to plan, from a command line or an sbatch script, and replaces some of them.

To read a script, this module executes it with DRY_RUN=1 and with the rights of the user. A script that
ignores DRY_RUN does whatever it usually does.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.config import OPTIONS
from megatron.config.fields import setting_option, value_text
from megatron.config.flag_parser import make_parser
from megatron.config.foreign_flags import rewrite
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import ToolParser

PROGRAM = "pretrain_gpt.py"
_TIMEOUT_S = 60
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_SHOWN = 200
# Prefixes of variables that Slurm sets. If this program itself runs in a job, a script must not see this
# job's variables. Variables such as NNODES, with which users set sizes of the example scripts, are passed on.
_JOB_VARIABLES = ("SLURM_", "MASTER_")


class RunFlagsParser(ToolParser):
    """Parses the flags of a tool. It collects flags of pretrain_gpt.py in `.training` of the result."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Returns the tool's flags. `training` of the result has the flags of the run, which
        `read_command_line` checks, and `mistakes` has the mistakes in the tool's own flags."""
        mistakes = Mistakes()
        parsed, training = self.collect_known(sys.argv[1:] if args is None else args, mistakes)
        parsed.training, parsed.mistakes = training, mistakes
        return parsed


def run_flags(flags: Sequence[str], script: str | None, gpus: int | None) -> list[str]:
    """Returns the flags of a dry run: the script's training command and its number of processes, then
    `flags`, which override the script's flags. script: path of the script; None for no script. gpus: replaces
    --world-size if given."""
    words: list[str] = []
    if script is not None:
        command = read_script("--script", script, [], script_environment())
        if command.processes is not None:
            words += ["--world-size", str(command.processes), "--node-size", str(command.processes_per_node)]
        words += command.flags
    # Flags of other frameworks are translated first, so that the settings which they change are found.
    words, flags = rewrite(words)[0], rewrite(flags)[0]
    words = [*without_settings(words, _given(flags)), *flags]
    if gpus is not None:
        words = [*without_settings(words, {"parallel.world_size"}), "--world-size", str(gpus)]
    return words if "training.dry_run" in _given(words) else ["--dry-run", *words]


def with_defaults(words: Sequence[str], chooses_layout: bool = True) -> tuple[list[str], list[str]]:
    """Returns the flags with defaults added for flags that a plan needs but that hardly affect it, such as
    --lr, and notes on the defaults that a user should know. chooses_layout: whether a search starts from the
    flags. For a search, layout and precision get defaults as well."""
    given, words, notes = _given(words), list(words), []
    if "schedule.lr" not in given:
        words += ["--lr", "1"]  # so large that every --min-lr is valid
    if "batch.micro_batch_size" not in given:
        words += ["--micro-batch-size", "1"]
        notes.append("--micro-batch-size is not set: planned with 1")
    if not {"training.train_iters", "training.train_samples"} & given:
        words += ["--train-iters", "1000"]
        notes.append("neither --train-iters nor --train-samples is set: the days are for 1,000 iterations")
    if "batch.global_batch_size" not in given:
        size = "micro-batch size x data-parallel size"
        if chooses_layout:
            settings = _parsed(words)
            size = str(settings.get("batch.micro_batch_size", 1) * settings.get("parallel.world_size", 1))
            words += ["--global-batch-size", size]
        notes.append(f"--global-batch-size is not set: planned with {size}; set it to compare layouts")
    has_precision = {"precision.bf16", "precision.fp16"} & given
    if not chooses_layout:
        return words, notes + ["neither --bf16 nor --fp16 is set: planned in fp32"] * (not has_precision)
    if not has_precision:
        v100 = "--gpu" in words and words[words.index("--gpu") + 1].startswith("v100")
        words.append("--fp16" if v100 else "--bf16")
        notes.append(f"neither --bf16 nor --fp16 is set: planned with {words[-1]}")
    if not {"parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"} & given:
        words += ["--pipeline-model-parallel-size", str(_first_pipeline_size(words))]
    return words, notes


def _first_pipeline_size(words: Sequence[str]) -> int:
    """Returns the smallest number of pipeline stages with which the batch sizes are divisible by the
    data-parallel size times the micro-batch size, so that a search has a valid layout to start from; 1 if no
    number has this property."""
    settings = _parsed(words)
    world_size, micro_batch = (settings.get(f, 1) for f in ("parallel.world_size", "batch.micro_batch_size"))
    sizes = [settings.get("batch.global_batch_size", micro_batch)]
    sizes += [size for size in settings.get("batch.rampup_batch_size", ())[:2] if size]
    if min(world_size, micro_batch) < 1:
        return 1  # the checks of the flags then name the mistake
    replicas = range(min(world_size, min(sizes) // micro_batch), 0, -1)
    divisors = (count for count in replicas if world_size % count == 0)
    fitting = (count for count in divisors if all(size % (micro_batch * count) == 0 for size in sizes))
    return world_size // next(fitting, world_size)


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of the flags. Leaves out invalid ones, which `read_command_line` reports."""
    return vars(make_parser().collect(words, Mistakes()))


def replaced(words: Sequence[str], change: Mapping[str, Any]) -> list[str]:
    """Returns the flags with changed settings. change: 'section.field' -> new value."""
    flags: list[str] = []
    for name, value in change.items():
        option = setting_option(name)
        if value is True:
            flags.append(option)
        elif value not in (None, False, ()):
            flags += [option, *value_text(value).split()]
    return [*without_settings(words, set(change)), *flags]


def _given(words: Sequence[str]) -> set[str]:
    """Returns the settings that the flags set, as 'section.field'."""
    return {OPTIONS[word.partition("=")[0]] for word in words if word.partition("=")[0] in OPTIONS}


def check_batch_size(words: Sequence[str], *sufficient: str) -> None:
    """Raises ConfigError if the flags do not determine the global batch size of the run. sufficient: settings
    that determine it as --global-batch-size does."""
    if _given(words).isdisjoint({"batch.global_batch_size", *sufficient}):
        flags = " or ".join(map(setting_option, ("batch.global_batch_size", *sufficient)))
        raise ConfigError(
            f"the global batch size, on which the order of the samples depends, is unknown: set {flags} as "
            "in the run"
        )


def without_settings(words: Sequence[str], names: set[str]) -> list[str]:
    """Returns the words without the flags of the settings `names`, and without their values."""
    kept, skips = list[str](), False
    for word in words:
        if word.startswith("--"):
            skips = OPTIONS.get(word.partition("=")[0], "") in names
        if not skips:
            kept.append(word)
    return kept


@dataclass(frozen=True)
class ScriptCommand:
    """The flags of PROGRAM, and how many processes a script starts: None if it does not use torch's
    launcher."""

    flags: list[str]
    nodes: int | None
    processes_per_node: int | None

    @property
    def processes(self) -> int | None:
        """Number of processes on all nodes; None if the script does not use torch's launcher."""
        if self.nodes is None or self.processes_per_node is None:
            return None
        return self.nodes * self.processes_per_node


def script_environment() -> dict[str, str]:
    """Returns this process's environment without the variables of the job that this process may run in.
    SLURM_CONF stays, because the script needs it to reach Slurm."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_VARIABLES) or name == "SLURM_CONF"
    }


def read_script(option: str, script: str, flags: Sequence[str], env: Mapping[str, str]) -> ScriptCommand:
    """Executes a script like the ones in examples/slurm with `flags`, and returns the last training command
    that it prints. option: the flag that names the script, for error messages. env: see `script_environment`.
    Raises ConfigError if the script prints no command, runs too long, or prints too much."""
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(
            f"{option} {script}: the file does not exist. Expected a script like those in examples/slurm."
        )
    expected = "Expected a script that prints its command with DRY_RUN=1, like those in examples/slurm."
    try:
        exit_code, stdout, stderr = _run(["bash", str(path), *flags], {**env, "DRY_RUN": "1"})
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{option} {script} has not ended after {_TIMEOUT_S} s. {expected}") from None
    except _TooLong:
        raise ConfigError(
            f"{option} {script} prints more than {_MAX_OUTPUT_BYTES:,} bytes. {expected}"
        ) from None
    lines = re.sub(r" \\\n +", " ", stdout).splitlines()
    commands = [line for line in lines if PROGRAM in line and not line.lstrip().startswith("#")]
    words, place = _words(commands[-1]) if commands else ([], None)
    if exit_code or place is None:
        output = (stderr.strip().splitlines() or ["nothing"])[-1].removeprefix("error: ")
        raise ConfigError(
            f"{option} {script} prints no command with {PROGRAM} when run with DRY_RUN=1 (exit code "
            f"{exit_code}, output: {output[:_MAX_SHOWN]}). Expected a script like those in examples/slurm."
        )
    launcher = [word.replace("-", "_") if word.startswith("--") else word for word in words[:place]]
    nodes, per_node = (_number_after(launcher, name) for name in ("__nnodes", "__nproc_per_node"))
    return ScriptCommand(words[place + 1 :], nodes if nodes or not per_node else 1, per_node)


class _TooLong(Exception):
    """A script has printed more than _MAX_OUTPUT_BYTES."""


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Runs a command, and returns its exit code, standard output and standard error. The command runs in a
    new session, whose processes are all killed at the end. Raises TimeoutExpired after _TIMEOUT_S, and
    _TooLong for more than _MAX_OUTPUT_BYTES of output."""
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
    """Returns the words of a command, and the index of the word that ends with PROGRAM (None if there is
    none)."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark is not closed
        return [], None
    return words, next((index for index, word in enumerate(words) if word.endswith(PROGRAM)), None)


def _number_after(words: Sequence[str], option: str) -> int | None:
    value = words[words.index(option) + 1] if option in words[:-1] else ""
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else None
