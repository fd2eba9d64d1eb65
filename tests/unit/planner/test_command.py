"""Reads the command of an sbatch script. Sizes that the user sets replace the script's sizes. The variables
of the job in which the shell runs have no effect."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.child_processes import is_running
from megatron.errors import UserError
from megatron.planner import command
from megatron.planner.command import read_script, script_environment
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

SCRIPT = str(ROOT / "examples" / "slurm" / "tr11-176B-ml.slurm")


def test_sizes_in_the_environment_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables such as NNODES=2 change the script's sizes, as with `NNODES=2 sbatch SCRIPT`."""
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


def refusal(folder: Path, text: str | bytes) -> str:
    """Returns the error message for a script with this text."""
    script = folder / "job.slurm"
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_script("--script", str(script), [], script_environment())
    return str(caught.value)


def test_a_script_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--script \S+: the file does not exist"):
        read_script("--script", str(tmp_path / "absent.slurm"), [], script_environment())


def wait_for_end(*pids: int) -> None:
    """Waits until all processes have ended. The kernel ends them a moment after the signal."""
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hostile_script_that_prints_without_end_is_stopped(tmp_path: Path) -> None:
    for loop in ("yes", "yes >&2", "cat /dev/zero"):
        assert "prints more than 1,048,576 bytes" in refusal(tmp_path, loop)


def test_all_processes_of_a_hostile_script_end_at_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(command, "_TIMEOUT_S", 3)
    text = f"trap '' TERM INT HUP\nsleep 1000 & echo $! >> {pids}\necho $$ >> {pids}\nsleep 1000"
    assert "has not ended after 3 s" in refusal(tmp_path, text)
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 2
    wait_for_end(*found)


def test_what_a_hostile_script_has_left_running_ends_with_it(tmp_path: Path) -> None:
    text = "sleep 1000 > /dev/null 2>&1 & echo $! > pid\necho python pretrain_gpt.py --seed 1"
    script = tmp_path / "job.slurm"
    script.write_text(f"cd {tmp_path}\n{text}")
    assert read_script("--script", str(script), [], dict(os.environ)).flags == ["--seed", "1"]
    wait_for_end(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    "text",
    [
        b"printf '\\377\\376\\000pretrain_gpt.py\\000\\033[2J'",
        b'echo "python \'pretrain_gpt.py"',
        b"echo pretrain_gpt.pyx",
        b"printf '\\377' >&2; exit 3",
        b"\xff\xfe\x00",
        b"seq 100000 | tr '\\n' ' ' >&2",
        b"echo nothing to run",
    ],
)
def test_hostile_output_of_a_script_is_one_sentence(text: bytes, tmp_path: Path) -> None:
    sentence = refusal(tmp_path, text)
    assert "prints no command with pretrain_gpt.py" in sentence and len(sentence) < 1000


@pytest.mark.parametrize("count", ["\u00b2", "9" * 5000])
def test_a_hostile_number_of_processes_is_no_number(count: str, tmp_path: Path) -> None:
    script = tmp_path / "job.slurm"
    script.write_text(f"echo torchrun --nproc_per_node {count} pretrain_gpt.py --seed 1")
    assert read_script("--script", str(script), [], script_environment()).processes is None


def test_a_change_replaces_a_flag_of_another_framework() -> None:
    words = command.run_flags(["--recompute-activations", "--num-layers", "4"], None, None)
    changed = command.replaced(
        words, {"training.recompute_granularity": None, "training.checkpoint_activations": True}
    )
    assert changed == ["--dry-run", "--num-layers", "4", "--checkpoint-activations"]
