"""--profile --use-pytorch-profiler writes traces of the chosen ranks and iterations, and a table in
the log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT

FLAGS = [*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, "--profile"]
TRACED = [*FLAGS, "--use-pytorch-profiler"]


def iterations_of(trace: Path) -> int:
    """Returns the number of iterations of a trace, by the marks of the profiler."""
    events = json.loads(trace.read_text())["traceEvents"]
    return len({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")})


def test_two_ranks_write_traces_of_two_iterations(data: list[str], tmp_path: Path) -> None:
    plain = pretrain([*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, *data], processes=2).ok()
    chosen = "--profile-step-start 2 --profile-step-end 4 --profile-ranks 0 1".split()
    run = pretrain([*TRACED, *chosen, "--tensorboard-dir", str(tmp_path), *data], processes=2).ok()
    assert [step["lm_loss"] for step in run.steps] == [step["lm_loss"] for step in plain.steps]
    traces = sorted(tmp_path.glob("*.json*"))
    assert [path.name for path in traces] == [
        f"rank_{rank}_iterations_3_to_4.pt.trace.json" for rank in (0, 1)
    ]
    assert list(map(iterations_of, traces)) == [2, 2]
    # The table is printed after the line of iteration 3 or 4, and before the last lines.
    lines = run.stdout.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("profile of iterations 3 to 4: "))
    assert lines[start].endswith(str(traces[0])) and lines[start + 1].split() == [
        "operator",
        "calls",
        "ms",
        "%",
    ]
    rows = lines[start + 2 : start + 12]
    times = [float(row.split()[-2]) for row in rows]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert any("addmm" in row or "mm" in row.split()[0] for row in rows)
    gaps = re.fullmatch(
        r"per iteration, (\S+) ms of operators; no operator ran during (\S+) % of (\S+) ms; longest gaps: "
        r"\S+, \S+, \S+ ms",
        lines[start + 12],
    )
    assert gaps and 0 < float(gaps[2]) < 100 and float(gaps[3]) > 0
    assert run.stdout.count("profile of iterations") == 2 and "rank 1: profile of iterations" in run.stdout


def test_an_early_end_writes_what_was_recorded(data: list[str], tmp_path: Path) -> None:
    chosen = "--profile-step-start 0 --profile-step-end 9 --exit-interval 2".split()
    run = pretrain([*TRACED, *chosen, "--tensorboard-dir", str(tmp_path), *data])
    (trace,) = tmp_path.glob("*.json*")
    assert run.steps[-1]["iteration"] == 2 and trace.name == "rank_0_iterations_1_to_2.pt.trace.json"
    assert iterations_of(trace) == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--profile"], "--profile without --use-pytorch-profiler marks iterations for Nsight Systems"),
        (
            ["--profile", "--use-pytorch-profiler", "--profile-step-start", "5", "--profile-step-end", "7"],
            "--profile-step-start 5 with --train-iters 5: the run ends before an iteration is profiled",
        ),
    ],
)
def test_a_profile_without_effect_is_an_error(
    flags: list[str], sentence: str, data: list[str], tmp_path: Path
) -> None:
    folder = ["--profile-step-start", "2", "--tensorboard-dir", str(tmp_path)]
    run = pretrain([*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, *folder, *flags, *data])
    assert run.exit_code == 2 and sentence in run.stderr
    assert "heaviest" not in run.stdout  # no model was built


def test_a_trace_that_cannot_be_written_is_one_warning(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "rank_0_iterations_2_to_2.pt.trace.json").mkdir()
    chosen = "--profile-step-start 1 --profile-step-end 2".split()
    run = pretrain([*TRACED, *chosen, "--tensorboard-dir", str(tmp_path), *data]).ok()
    assert len(run.steps) == 5 and run.stdout.count("WARNING: the profile failed") == 1
