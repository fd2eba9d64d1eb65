"""A sharded preprocessing whose processes are killed at random times. The repeated command must end with the
files of an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import HANG_TIMEOUT_S

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
SHARDS = 2


@dataclass
class Outcome:
    """Results of a series of kills."""

    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills by signal and process."""
    unfinished: int = 0
    """Kills that hit a shard before it had ended."""
    completed: int = 0
    """How often the token files were complete and equal to the files of an undisturbed run."""
    seconds: float = 0.0


def kill_shards(folder: Path, flags: Sequence[str], kills: int, seed: int) -> Outcome:
    """Kills shards until `kills` kills have hit a shard before it had ended. flags: inputs and tokenizer.

    Each launch starts all shards. Each shard gets SIGKILL or SIGTERM at a random time, in its main process or
    in a worker. After the last kill, and each time that all shards ended well, the token files are compared
    and removed. Raises AssertionError for orphans, for remaining temporary files, and for unexpected files
    and exit codes.
    """
    started, generator, outcome = time.monotonic(), random.Random(seed), Outcome()
    expected = _complete(folder / "undisturbed", flags)
    limit_s = time.monotonic() - started
    output = folder / "out"
    while outcome.unfinished < kills:
        tools = [_start(output, flags, shard) for shard in range(SHARDS)]
        times = sorted((generator.uniform(0.0, limit_s), tool.pid, tool) for tool in tools)
        before = time.monotonic()
        for kill_s, _, tool in times:
            time.sleep(max(before + kill_s - time.monotonic(), 0.0))
            number = generator.choice([signal.SIGKILL, signal.SIGTERM])
            wants_worker = generator.random() < 0.4
            if tool.poll() is None:
                _kill(tool, number, wants_worker, outcome)
        for tool in tools:
            _wait_for_end(tool)
        if all(tool.returncode == 0 for tool in tools):
            assert _made(output) == expected
            shutil.rmtree(output)
            outcome.completed += 1
    assert _complete(output, flags) == expected
    outcome.completed += 1
    outcome.seconds = time.monotonic() - started
    return outcome


def _complete(output: Path, flags: Sequence[str]) -> dict[str, bytes]:
    """Runs all shards to their end. Returns the token files by name."""
    for tool in [_start(output, flags, shard) for shard in range(SHARDS)]:
        _wait_for_end(tool)
        assert tool.returncode == 0
    return _made(output)


def _start(output: Path, flags: Sequence[str], shard: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, os.fspath(TOOL), *flags, "--output-prefix", f"{output}/", "--workers", "2"]
    return subprocess.Popen(
        [*command, "--shard", f"{shard}/{SHARDS}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill(tool: subprocess.Popen[bytes], number: int, wants_worker: bool, outcome: Outcome) -> None:
    victim, name = tool.pid, "main process"
    if wants_worker:
        try:
            workers = [child for child in psutil.Process(tool.pid).children() if _is_worker(child)]
        except psutil.Error:
            return  # it has ended
        if workers:
            victim, name = workers[-1].pid, "worker"
    try:
        os.kill(victim, number)
    except ProcessLookupError:
        return
    outcome.unfinished += 1
    outcome.kills[f"{signal.Signals(number).name} to a {name}"] += 1


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "--multiprocessing-fork" in process.cmdline()
    except psutil.Error:
        return False


def _wait_for_end(tool: subprocess.Popen[bytes]) -> None:
    """Waits for a shard. Raises AssertionError if it does not end, or if processes of it remain."""
    tool.wait(timeout=HANG_TIMEOUT_S)
    assert tool.returncode in (0, 2, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM), tool.returncode
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(tool.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"processes of shard {tool.args!r} live on")


def _made(output: Path) -> dict[str, bytes]:
    """Returns the token files by name. Raises AssertionError if there are temporary files."""
    files = {path.name: path for path in output.iterdir()}
    assert not [name for name in files if not name.endswith((".bin", ".idx", ".tokenizer.json"))], files
    return {name: path.read_bytes() for name, path in files.items()}
