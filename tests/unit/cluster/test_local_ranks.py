"""A tool starts further ranks on this host: their variables, and what happens when a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT, environment
from tests.support import HANG_TIMEOUT_S
from tests.support.forked import Ended, run_script

# All ranks write to one pipe. A line must be a single write, which print does not promise.
FIRST = """
import os, sys, time
from megatron.cluster.processes import start_other_ranks
with start_other_ranks(sys.argv[1:], 3):
    os.write(1, " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")).encode() + b"\\n")
    time.sleep(float(sys.argv[2]))
    if sys.argv[2] == "0.1":
        raise RuntimeError("rank 0 fails")
    if "is killed" in sys.argv[3]:
        while not os.path.exists(sys.argv[1] + ".dies"):
            time.sleep(0.01)
        raise RuntimeError("gloo: Connection closed by peer")
print("RANK" in os.environ, flush=True)
"""
OTHER = """
import os, signal, sys, time
os.write(1, " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")).encode() + b"\\n")
if sys.argv[2] == "fails" and os.environ["RANK"] == "2":
    sys.exit(7)
if sys.argv[2].startswith("is killed") and os.environ["RANK"] == "2":
    open(__file__ + ".dies", "w").close()
    time.sleep(0.5 if sys.argv[2] == "is killed later" else 0)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if sys.argv[2] == "ends" else 10_000)  # longer than any test waits
"""


def run(tmp_path: Path, seconds: str, what: str, other: str = OTHER, **env: str) -> Ended:
    """Runs rank 0, which sleeps for `seconds` in the block, while the other ranks do `what`."""
    (tmp_path / "first.py").write_text(FIRST)
    (tmp_path / "other.py").write_text(other)
    flags = [str(tmp_path / "other.py"), seconds, what]
    return run_script(tmp_path / "first.py", flags, environment() | env, 0)


def test_the_ranks_have_a_launchers_variables_and_rank_0_its_own_afterwards(tmp_path: Path) -> None:
    first = run(tmp_path, "0", "ends")
    lines = first.stdout.splitlines()
    assert first.exit_codes == [0]
    assert sorted(line.split() for line in lines if line != "False") == [
        ["0", "3", "0"],
        ["1", "3", "1"],
        ["2", "3", "2"],
    ]
    assert lines[-1] == "False"


def test_rank_0_ends_with_the_exit_code_of_a_rank_that_fails(tmp_path: Path) -> None:
    first = run(tmp_path, "10000", "fails")
    assert first.exit_codes == [7] and first.stderr.count("rank 2 has ended with exit code 7") == 1


@pytest.mark.parametrize("what", ["is killed", "is killed later"])
def test_a_rank_that_was_killed_is_named_though_rank_0_fails_too(what: str, tmp_path: Path) -> None:
    first = run(tmp_path, "0", what)
    assert first.exit_codes == [128 + signal.SIGKILL]
    assert first.stderr == "error: rank 2 has ended with exit code -9\n"


def test_the_ranks_do_not_take_the_variables_of_the_first_ones_launcher(tmp_path: Path) -> None:
    """If the other ranks inherited srun's variables for one task, they would find that WORLD_SIZE contradicts
    them."""
    env = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    other = (
        "import os\n"
        "names = [name for name in os.environ if name.startswith('SLURM')]\n"
        "os.write(1, f'{names} {os.environ[\"TORCHELASTIC_USE_AGENT_STORE\"]}\\n'.encode())\n"
    )
    first = run(tmp_path, "0", "ends", other, **env)
    assert first.stdout.splitlines().count("[] False") == 2


@pytest.mark.parametrize("end", ["raises", "is killed"])
def test_the_others_end_with_rank_0(end: str, tmp_path: Path) -> None:
    """The other ranks hold rank 0's stdout open, so its reader would wait until they end."""
    (tmp_path / "other.py").write_text(OTHER)
    seconds = "0.1" if end == "raises" else "10000"
    command = [sys.executable, "-c", FIRST, str(tmp_path / "other.py"), seconds, "waits"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(command, env=environment() | {"PYTHONPATH": str(ROOT)}, text=True, **pipes)
    assert first.stdout is not None
    if end == "is killed":
        for _ in range(3):  # all ranks have printed their variables
            first.stdout.readline()
        os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=HANG_TIMEOUT_S)
    assert first.returncode == (1 if end == "raises" else -signal.SIGKILL)
