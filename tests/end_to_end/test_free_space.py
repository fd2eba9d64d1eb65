"""The free space of --save and --save-local is compared with the planned size of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --lr-decay-style constant --override-lr-scheduler --train-iters 5 "
    "--eval-iters 0 --log-interval 1"
).split()


@pytest.fixture
def run(data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that runs the program with a given number of bytes free."""

    def with_space(free: float, *flags: str, processes: int = 0) -> Run:
        monkeypatch.setenv("FREE_BYTES", str(round(free)))
        command = [*FLAGS, *ABSOLUTE, *data, "--save", str(tmp_path / "saved"), *flags]
        return pretrain(command, processes=processes, script="tests/end_to_end/small_disk.py")

    return with_space


def planned_bytes(run: Run) -> float:
    """Returns the planned size of a checkpoint, read from the error of a run without space."""
    assert run.exit_code == 2 and run.steps == []
    (error,) = run.errors
    found = re.search(r"0\.0 MB are free, and a checkpoint takes about ([\d,.]+) MB .*Free space", error)
    assert found is not None, error
    return 1e6 * float(found[1].replace(",", ""))


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--bf16 --optimizer muon", 0),
        ("--zero-stage 1", 2),
        ("", 0),
        ("--bf16", 0),
        ("--optimizer lion", 0),
        ("--bf16 --save-format dcp", 0),
        ("--tensor-model-parallel-size 2 --bf16", 2),
    ],
)
def test_free_space_below_one_checkpoint_is_an_error_with_the_size_that_a_checkpoint_has(
    flags: str, processes: int, run, tmp_path: Path
) -> None:
    planned = planned_bytes(run(1000, *flags.split(), processes=processes))
    run(2 * planned, *flags.split(), processes=processes).ok()
    (folder,) = (tmp_path / "saved").glob("global_step*")
    assert sum(path.stat().st_size for path in folder.rglob("*")) == pytest.approx(planned, rel=0.05)


def test_free_space_for_fewer_checkpoints_than_the_run_keeps_is_a_warning(run, tmp_path: Path) -> None:
    size, saves = planned_bytes(run(0)), ["--save-interval", "1"]
    few = run(2.5 * size, *saves).ok()
    assert "room for 2 of 5 that the run adds" in few.stdout
    assert few.stdout.index("room for 2 of 5") < few.stdout.index("iteration        1/")
    load = ["--load", str(tmp_path / "saved")]
    kept = run(0.5 * size, *load, *saves, "--train-iters", "6", "--keep-last", "1")
    assert kept.exit_code == 2, "one is written before another is deleted"
    assert (
        "room for" not in run(1.5 * size, *load, *saves, "--train-iters", "8", "--keep-last", "3").ok().stdout
    )
    # An unfinished save of a killed job is deleted before the next save.
    leftover = tmp_path / "saved" / "saving-global_step9"
    leftover.mkdir()
    (leftover / "layer").write_bytes(bytes(round(1.5 * size)))
    run(0, *load, "--train-iters", "9").ok()
    assert not leftover.exists()
    # An evaluation and a run that is already complete save nothing.
    run(0, *load, "--eval-iters", "1", "--eval-only").ok()
    run(0, *load, "--train-iters", "9").ok()
    run(0, *load, "--train-iters", "10", "--no-preflight").ok()


def test_free_space_of_local_checkpoints(run, tmp_path: Path) -> None:
    local = ["--save-local", str(tmp_path / "node"), "--save-local-interval", "2"]
    size = planned_bytes(run(0))
    both = run(2.5 * size, *local, processes=2).ok()
    assert re.findall(r"WARNING: (.*): [\d.]+ MB are free.* room for (\d of \d)", both.stdout) == [
        (
            f"node {both.stdout.split('WARNING: node ')[1].split(':')[0]}: --save-local {tmp_path / 'node'}",
            "2 of 3",
        )
    ]
