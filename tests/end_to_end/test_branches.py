"""Trains decay branches with --load A --save B --branch-at N."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import ROOT, Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL

COMMON = "--micro-batch-size 1 --lr 1e-3 --eval-iters 1 --eval-interval 6 --log-interval 1".split()
CONSTANT = "--lr-decay-style constant".split()
# Unit of the schedule -> (flags of all runs, length of the base run, decay of the branch, length of the run
# whose decay is planned from the start).
UNITS = {
    "iterations": (
        "--global-batch-size 4 --lr-warmup-iters 3".split(),
        "--train-iters 24",
        "--lr-wsd-decay-iters 4",
        "--train-iters 12",
    ),
    # The batches have 2, 4, 6 and 8 samples. 8 iterations consume 28 samples.
    "samples": (
        "--global-batch-size 8 --rampup-batch-size 2 2 24 --lr-warmup-samples 10".split(),
        "--train-samples 200",
        "--lr-wsd-decay-samples 32",
        "--train-samples 60",
    ),
}
BRANCH_AT = 8


def finished(run: Run) -> Run:
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


def record(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"global_step{step}" / "run.json").read_text())


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and modification time of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


class Trunk:
    """A run at a constant learning rate that was stopped after the branch point, and its branches."""

    def __init__(
        self, folder: Path, data: list[str], unit: str, style: list[str], processes: int = 0
    ) -> None:
        shared, length, self.decay, self.planned_length = UNITS[unit]
        self.folder, self.processes, self.length = folder, processes, length
        self.shared = [*COMMON, *shared, *data]
        flags = [*self.shared, *MODEL, *ABSOLUTE, *length.split(), *style]
        saving = ["--save", str(folder), "--save-interval", "4", "--exit-interval", "12"]
        self.run = finished(pretrain([*flags, *saving], processes=processes))
        self.before = contents(folder)

    def planned(self, *flags: str) -> Run:
        """Returns a run whose decay is planned from the start."""
        plan = ["--lr-decay-style", "WSD", *self.planned_length.split(), *self.decay.split()]
        command = [*self.shared, *MODEL, *ABSOLUTE, *plan, *flags]
        return finished(pretrain(command, processes=self.processes))

    def branch_command(self, save: Path, *flags: str) -> list[str]:
        load = [] if "--load" in flags else ["--load", str(self.folder)]
        branch = ["--use-checkpoint-args", "--branch-at", str(BRANCH_AT), *self.decay.split()]
        return [*self.shared, *branch, *load, "--save", str(save), *flags]

    def branch(self, save: Path, *flags: str, processes: int | None = None) -> Run:
        processes = self.processes if processes is None else processes
        run = finished(pretrain(self.branch_command(save, *flags), processes=processes))
        assert contents(self.folder) == self.before
        return run


def test_a_branch_continues_as_a_run_that_was_planned_so(data: list[str], tmp_path: Path) -> None:
    """All digits of each line and all bits of weights and moments are equal."""
    trunk = Trunk(tmp_path / "a", data, "iterations", CONSTANT)
    style = ["--lr-wsd-decay-style", "minus_sqrt", "--min-lr", "1e-4"]
    planned = trunk.planned(*style, "--save", str(tmp_path / "planned"))
    branch = trunk.branch(tmp_path / "b", *style)
    assert trunk.run.steps[:BRANCH_AT] == [
        {**step, "total_iterations": 24} for step in planned.steps[:BRANCH_AT]
    ]
    assert [step["iteration"] for step in branch.steps] == [9, 10, 11, 12]
    assert branch.steps == planned.steps[BRANCH_AT:]
    assert branch.evaluations[-2:] == planned.evaluations[-2:]
    assert f"starting a cooldown branch (--branch-at) from {tmp_path / 'a' / 'global_step8'}" in branch.stdout
    ours, theirs = record(tmp_path / "b", 12), record(tmp_path / "planned", 12)
    assert ours["certificate"]["digests"] == theirs["certificate"]["digests"]
    assert ours["state"] == theirs["state"]
    trunk_record = record(tmp_path / "a", BRANCH_AT)
    assert [entry["name"] for entry in ours["lineage"]] == ["global_step4", "global_step8"]
    assert {entry["run_id"] for entry in ours["lineage"]} == {trunk_record["run_id"]} != {ours["run_id"]}
    assert ours["origin"]["sha256"] == trunk_record["sha256"] and ours["origin"]["branch_at"] == BRANCH_AT


@pytest.fixture(scope="module")
def trunk(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    """Returns a run on two processes that is counted in samples, with a ramp-up of the batch size."""
    style = "--lr-decay-style WSD --lr-wsd-decay-samples 20 --min-lr 1e-4".split()
    return Trunk(tmp_path_factory.mktemp("trunk") / "a", data, "samples", style, processes=2)


LAYOUTS = ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2 --zero-stage 1"]


@pytest.mark.full
def test_an_interrupted_branch_is_the_planned_run_through_every_phase(trunk: Trunk, tmp_path: Path) -> None:
    """The branch is stopped before, at and after the start of the decay, which ends at the base run's
    min_lr."""
    planned = trunk.planned("--min-lr", "1e-4")
    parts = [trunk.branch(tmp_path / "b", "--exit-interval", str(step)) for step in (9, 10)]
    parts.append(trunk.branch(tmp_path / "b"))
    assert [step for part in parts for step in part.steps] == planned.steps[BRANCH_AT:]
    assert parts[-1].evaluations[-2:] == planned.evaluations[-2:]
    assert "since it started from" in parts[1].stdout
    # A run without a branch is interrupted in the warm-up, in the stable phase, and in the decay.
    own = tmp_path / "own"
    folders = ["--min-lr", "1e-4", "--save", str(own), "--load", str(own)]
    pieces = [trunk.planned(*folders, "--exit-interval", str(step)) for step in (2, 7, 11)]
    pieces.append(trunk.planned(*folders))
    assert [step for piece in pieces for step in piece.steps] == planned.steps


@pytest.mark.full
@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_on_another_layout(trunk: Trunk, layout: str, universal: bool, tmp_path: Path) -> None:
    planned, flags = trunk.planned("--min-lr", "1e-4"), layout.split()
    if universal:
        target = tmp_path / "universal" / "global_step8_universal"
        convert = ["tools/ds_to_universal.py", "--input_folder", str(trunk.folder / "global_step8")]
        subprocess.run([sys.executable, *convert, "--output_folder", str(target)], cwd=ROOT, check=True)
        flags += ["--load", str(target.parent), "--universal_checkpoint"]
    branch = trunk.branch(tmp_path / "b", *flags)
    ours, theirs = ([step["lm_loss"] for step in run.steps] for run in (branch, planned))
    assert ours == pytest.approx(theirs[BRANCH_AT:], rel=1e-5)
    rates = [step["learning_rate"] for step in branch.steps]
    assert rates == [step["learning_rate"] for step in planned.steps[BRANCH_AT:]]


@pytest.mark.full
def test_two_branches_of_one_trunk_at_the_same_time(trunk: Trunk, tmp_path: Path) -> None:
    runs: dict[str, Run] = {}

    def start(style: str) -> None:
        command = trunk.branch_command(tmp_path / style, "--lr-wsd-decay-style", style)
        runs[style] = pretrain(command, processes=2)

    threads = [threading.Thread(target=start, args=(style,)) for style in ("linear", "cosine")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(trunk.folder) == trunk.before
    for style, run in runs.items():
        alone = trunk.planned("--min-lr", "1e-4", "--lr-wsd-decay-style", style)
        assert finished(run).steps == alone.steps[BRANCH_AT:]
    ids = {record(tmp_path / style, 12)["run_id"] for style in runs}
    assert len(ids) == 2 and record(trunk.folder, 8)["run_id"] not in ids


@pytest.mark.full
def test_a_branch_reads_other_data_from_their_first_sample(
    trunk: Trunk, corpus: Path, tmp_path: Path
) -> None:
    """A resume of the branch continues in these data where the branch stopped. Without --override-data the
    data are rejected."""
    other = ["--split", "500,400,100"]
    refused = pretrain(trunk.branch_command(tmp_path / "b", *other), processes=2)
    assert "was trained on other data" in refused.stderr and refused.exit_code != 0
    flags = [*other, "--override-data"]
    whole = trunk.branch(tmp_path / "whole", *flags)
    assert "from sample 0 (--override-data)" in whole.stdout
    parts = [trunk.branch(tmp_path / "parts", *flags, "--exit-interval", "10")]
    parts.append(trunk.branch(tmp_path / "parts", *flags))
    assert [step for part in parts for step in part.steps] == whole.steps


@pytest.mark.full
def test_a_branch_point_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    branch = ["--branch-at", "8", "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b")]
    run = pretrain([*COMMON, "--global-batch-size", "4", *MODEL, *ABSOLUTE, *branch], processes=2)
    (sentence,) = run.errors
    assert "--branch-at 8: --load" in sentence and "holds no global_step8" in sentence
    assert run.rank_exit_codes == {2} and not (tmp_path / "b").exists()


@pytest.mark.full
def test_the_schedule_of_the_page_is_the_one_that_its_command_prints() -> None:
    page = (ROOT / "docs" / "learning_rate.md").read_text()
    command, line = re.findall(r"^```\w+\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    words = command.replace("\\\n", " ").split()
    printed = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert line in printed.stdout
