"""Tests the exit code of a process that fails, and the text in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cluster.exit_codes import RankStopped, RunStopped, SharedUserError, exit_code, exit_on_error
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport, read_reports
from megatron.errors import UserError


def end(error: BaseException, report: RankReport | None = None, **options) -> int:
    with pytest.raises(SystemExit) as caught, exit_on_error(report or RankReport(None, "0"), **options):
        raise error
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("--lr is 0"), 2, "error: --lr is 0\n"),
        (RunStopped("iteration 3: no"), 1, "error: iteration 3: no\n"),
        (RankStopped("out of memory"), 2, "error: out of memory\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=str,
)
def test_user_errors_print_one_sentence_and_set_the_exit_code(error, code, text, capsys) -> None:
    assert end(error) == code and capsys.readouterr().err == text


def test_unexpected_error_prints_traceback_and_rank_on_the_last_line(capsys) -> None:
    assert end(ValueError("x")) == 1
    text = capsys.readouterr().err
    assert text.startswith("Traceback") and "raise error" in text
    assert text.splitlines()[-1].startswith("error: rank 0 on ")
    assert text.endswith(": ValueError: x\n")


def test_an_error_of_several_lines_is_one_line_after_its_traceback(capsys) -> None:
    """Errors such as CUDA's have several lines, and the last line is empty. The sentence joins all lines."""
    end(RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`.\n"))
    assert capsys.readouterr().err.endswith(
        ": RuntimeError: CUDA error: device-side assert triggered Compile with `TORCH_USE_CUDA_DSA`.\n"
    )


def test_block_without_error_returns() -> None:
    with exit_on_error(RankReport(None, "0")):
        pass


def test_with_reports_errors_are_written_there_and_not_printed(capsys, tmp_path):
    for rank in ("0", "1"):
        assert end(UserError(f"file {rank}"), RankReport(str(tmp_path), rank)) == 2
    assert capsys.readouterr().err == ""
    ends = [(report["rank"], report["end"], report["text"]) for report in read_reports(tmp_path)]
    assert ends == [(0, "config error", "error: file 0"), (1, "config error", "error: file 1")]


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        (UserError("x"), {"same_on_all_ranks": True}, True),
        (UserError("x"), {}, False),
        (SharedUserError("x"), {}, True),
        (RunStopped("x"), {}, True),
        (RunStopped("x", on_all_ranks=False), {}, False),
        (RankStopped("x"), {}, False),
    ],
    ids=repr,
)
def test_report_records_whether_all_ranks_have_the_error(error, options, expected, tmp_path) -> None:
    end(error, RankReport(str(tmp_path), "0"), **options)
    assert read_reports(tmp_path)[0]["on_all_ranks"] is expected


@pytest.mark.parametrize(
    ("status", "env", "expected"),
    [
        (ExitStatus.FINISHED, {}, 0),
        (ExitStatus.REQUEUE, {}, 75),
        # The launcher would treat 75 as a failure.
        (ExitStatus.REQUEUE, {"TORCHELASTIC_RUN_ID": "none"}, 0),
        (ExitStatus.INTERRUPTED, {}, 130),
        # A dry run whose plan does not fit the device.
        (ExitStatus.USER_ERROR, {}, 2),
        (ExitStatus.INTERRUPTED, {"TORCHELASTIC_RUN_ID": "none"}, 130),
    ],
)
def test_exit_code_of_a_run_that_ends_well(status, env, expected, tmp_path) -> None:
    report = RankReport(str(tmp_path), "0")
    assert exit_code(report, status, env) == expected
    assert read_reports(tmp_path)[0]["end"] == status.value


@pytest.mark.parametrize("status", [ExitStatus.FINISHED, ExitStatus.REQUEUE])
def test_a_script_can_tell_a_stop_from_the_end_under_a_launcher(status: ExitStatus, tmp_path: Path) -> None:
    """The exit code is 0 after a stop and at the end of a run. Only a stop writes torch's error file."""
    env = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    assert exit_code(RankReport(None, "0"), status, env) == 0
    assert (tmp_path / "error.json").exists() is (status is ExitStatus.REQUEUE)
