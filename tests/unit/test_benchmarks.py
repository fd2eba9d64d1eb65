"""Every benchmark starts, runs at its smallest size, and measures configurations that are accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_steps
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

# Modules that are not programs; and gpu_table.py, which tests/unit/test_gpu_script.py runs with flags.
NO_FLAGS = {
    "__init__",
    "cpu_steps",
    "gpu_table",
    "kernel_cases",
    "machine",
    "plain_model",
    "published_runs",
    "saves",
}
COMMANDS = [
    f"{path.stem}.py --help"
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if path.stem not in NO_FLAGS
] + [
    "memory.py conversion --help",
    "memory.py loss --tokens 8 --vocab 64 --hidden 16 --rounds 1",
]
# All run in one process, since most of a start is imports.
START = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    try:
        runpy.run_path("benchmarks/" + sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
"""


def test_every_benchmark_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, *COMMANDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS) - 1
    assert "16384 tokens, 62592 rows of the vocabulary, hidden 2048, bf16, on " in done.stdout
    assert "8 tokens, 64 rows, hidden 16, bfloat16" in done.stdout


def test_the_measured_configurations_are_accepted() -> None:
    for row in cpu_steps.ROWS:
        assert cpu_steps.make_config(row).parallel.world_size == row.processes


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        "checkpoint.py --sizes 2 --rounds 1",
        "conversion.py --layers 1 --rounds 1",
        "data.py --gigabytes 0.01 --megabytes 0.5 --prefixes 20 --documents 10000",
        "expert_speed.py --tiny --out FOLDER",
        "failure_drills.py --each 1 --faults kill",
        "generation.py --new-tokens 8 --prompts 2 --rounds 1",
        "host_time.py --rounds 1 --calls 1",
        "kills.py --kills 2",
        "memory.py conversion --layers 1 --folder FOLDER",
        "parity.py --rows 2",
    ],
)
def test_a_benchmark_of_cpus_runs(command: str, tmp_path: Path) -> None:
    script, *flags = command.replace("FOLDER", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
