"""Tests the report of a sweep: table, Markdown, CSV, plot, JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from matplotlib import image

from megatron.commands import sweep
from megatron.planner.plots import draw_summary
from megatron.planner.sweep.folder import SweepFolder
from megatron.planner.sweep.summary import summarize
from megatron.planner.sweep.table import report_csv, report_markdown, report_text, table_cells
from tests.unit.planner.sweep.made import GIB, make_record, make_result, make_row

A = make_row(0, "type:a|b")
B = make_row(1, "time")
C = make_row(2, "memory", refused="too few layers", processes=0, predicted=None, numbers="")
D = make_row(3, "uniform")
E = make_row(4, "parameters", numbers="other")
RECORD = make_record(A, B, C, D, E)
LOSSES = [5.0, 4.0, 3.0, 2.0]
RESULTS = {
    (row.index, repeat): make_result(row, repeat, seconds, losses)
    for row, repeat, seconds, losses in [
        (A, 1, 1.0, LOSSES),
        (A, 2, 1.2, LOSSES),
        (B, 1, 0.5, LOSSES),
        (B, 2, 0.6, [5.0, 4.0, 3.0, 2.5]),
        (E, 1, 2.2, LOSSES),
    ]
}
RESULTS[3, 1] = make_result(D, 1, 1.0, [5.0], status="hang", reason="rank 1 does not answer", step_s=None)


@pytest.fixture
def summary() -> dict:
    return summarize(RECORD, RESULTS)


def test_times_ratios_and_spread(summary: dict) -> None:
    first, second, *_, other_group = (row["measured"] for row in summary["rows"])
    assert first["step_s"] == pytest.approx(1.1) and first["ratio"] == 1
    assert second["step_s"] == pytest.approx(0.55) and second["ratio"] == pytest.approx(0.5)
    assert second["spread"] == pytest.approx(0.1 / 0.55)
    assert (second["step_s_least"], second["step_s_most"], second["repeats"]) == (0.5, 0.6, 2)
    assert second["tokens_per_s"] == pytest.approx(1000 / 0.55)
    assert first["memory_bytes"] == [2 * GIB, 4 * GIB]  # the peak, not what is left between steps
    assert other_group["ratio"] == 1  # unequal losses mean different work: not relative to the first row


@pytest.mark.parametrize(
    ("times", "fastest", "near"),
    [
        # With spreads of 20 %, a difference of 10 % is doubtful, and a difference of 50 % is not.
        ([(0.9, 1.1), (0.99, 1.21), (1.35, 1.65)], 0, [1]),
        ([(1.0, 1.0), (0.5, 0.5)], 1, []),
        ([(1.0, 1.0), (1.0, 1.0)], 0, [1]),
        # One noisy row makes its own difference doubtful.
        ([(1.0, 1.0), (1.05, 1.55), (1.3, 1.3)], 0, [1]),
    ],
)
def test_differences_below_the_spread_are_named(times: list, fastest: int, near: list[int]) -> None:
    rows = [make_row(index, f"stages:{index},8") for index in range(len(times))]
    results = {
        (row.index, repeat): make_result(row, repeat, seconds, LOSSES)
        for row, pair in zip(rows, times, strict=True)
        for repeat, seconds in enumerate(pair, start=1)
    }
    made = summarize(make_record(*rows), results)
    (found,) = made["times"]
    assert (found["fastest"], found["within_spread"]) == (fastest, near)
    assert ("below the spread" in report_text(made)) is bool(near)
    statuses = [row[-1] for row in table_cells(made)[1:]]
    assert statuses == ["ok, fastest" if row.index == fastest else "ok" for row in rows]


def test_one_run_per_row_has_no_spread_to_compare_with() -> None:
    results = {(row.index, 1): make_result(row, 1, 1.0 + row.index, LOSSES) for row in (A, B)}
    made = summarize(make_record(A, B, repeat=1), results)
    assert "--repeat 3" in report_text(made)
    assert summarize(make_record(A, B), {})["times"] == []


def test_memory_of_a_process_is_not_compared_with_the_plan(summary: dict) -> None:
    remark = "do not compare them on a CPU"
    assert remark in report_text(summary)
    on_gpu = make_result(A, 1, 1.0, LOSSES)
    for entry in on_gpu["memory"]:
        entry["name"] = entry["name"].replace("resident", "allocated")
    assert remark not in report_text(summarize(make_record(A), {(0, 1): on_gpu}))


def test_status_and_reason_of_each_row(summary: dict) -> None:
    assert [(row["status"], row["reason"]) for row in summary["rows"]] == [
        ("ok", None),
        ("ok", None),
        ("refused", "too few layers"),
        ("hang", "rank 1 does not answer"),
        ("pending", "1 of 2 runs are done"),
    ]


def test_the_text_has_predicted_beside_measured_and_what_is_wrong(summary: dict) -> None:
    head, first, *_ = table_cells(summary)
    row = dict(zip(head, first, strict=True))
    assert row["partition-method"] == "type:a|b"
    assert (row["s/step"], row["planned s"]) == ("1.1", "0.5")
    assert (row["GiB"], row["planned GiB"]) == ("2 4", "1 2")
    shown = [row[name] for name in ("ratio", "spread", "planned bubble", "status")]
    assert shown == ["1.000", "18.2%", "25.0%", "ok"]
    text = report_text(summary)
    assert "row 2 refused: too few layers" in text
    assert "row 3 hang: rank 1 does not answer" in text
    assert "losses of group 1 (rows 0, 1, 3; 5 runs) DISAGREE" in text
    assert "row 1, repeat 2 has loss 2.5 at step 4, row 0, repeat 1 has 2" in text


def test_what_a_table_shows_of_several_commits_and_stages_and_of_no_values() -> None:
    results = {key: {**RESULTS[key], "commit": str(key[1]), "host": "n1"} for key in [(0, 1), (0, 2)]}
    text = report_text(summarize(make_record(A), results))
    assert "runs of 2 commits (1, 2): their times may not be comparable" in text and "hosts" not in text
    many = make_row(0, "time", predicted={**A.predicted, "memory_bytes": [GIB * x for x in range(1, 7)]})
    head, row = table_cells(summarize(make_record(many), {}))
    assert dict(zip(head, row, strict=True))["planned GiB"] == "1 to 6"
    assert "s/step" not in head and "planned s" in head


def test_markdown_quotes_bars(summary: dict) -> None:
    lines = [line for line in report_markdown(summary).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "type:a\\|b" in lines[2]


def test_csv_has_all_digits(summary: dict) -> None:
    rows = list(csv.DictReader(io.StringIO(report_csv(summary))))
    assert len(rows) == 5
    assert float(rows[1]["measured_step_s"]) == pytest.approx(0.55)
    assert rows[0]["measured_memory_bytes"] == f"{2 * GIB} {4 * GIB}"
    assert rows[0]["--partition-method"] == "type:a|b"
    assert rows[2]["reason"] == "too few layers" and rows[2]["measured_step_s"] == ""


def test_the_plot_grows_with_the_rows(summary: dict, tmp_path: Path) -> None:
    draw_summary(summary, tmp_path / "many.png")
    draw_summary(summarize(make_record(A), {}), tmp_path / "one.png")
    many, one = (image.imread(tmp_path / name) for name in ("many.png", "one.png"))
    assert many.shape[0] > one.shape[0]
    assert many.std() > 0.01  # not empty


def test_a_report_of_a_folder_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(RECORD)
    for result in RESULTS.values():
        folder.write_result(result)
    sweep.main(["report", str(tmp_path)])
    assert "DISAGREE" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.glob("report.*")} == {".md", ".csv", ".png", ".json"}
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["axes"] == ["--partition-method"] and len(found["rows"]) == 5
    assert found["sweep"]["base"] == ["--lr", "1e-3"]
    assert not found["losses"][0]["agrees"] and found["losses"][1]["agrees"]
