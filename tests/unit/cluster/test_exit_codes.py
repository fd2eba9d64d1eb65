"""How a process ends on an error, and whether it speaks."""

from __future__ import annotations

import pytest

from megatron.cluster import exit_codes as failures
from megatron.cluster.exit_codes import RunStopped, exit_code, exit_on_error
from megatron.cluster.rank_reports import RankReport, read_reports
from megatron.config import ConfigError


@pytest.fixture
def ended_by_nobody(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No launcher: the wait for its SIGTERM ends by itself. Holds the codes that were waited with."""
    waits: list[int] = []
    monkeypatch.setattr(failures, "_wait_to_be_ended", waits.append)
    return waits


def end(
    error: BaseException, capsys: pytest.CaptureFixture[str], rank: str = "0", **options
) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught, exit_on_error(RankReport(None, rank), **options):
        raise error
    return caught.value.code, capsys.readouterr().err


def test_a_mistake_is_one_sentence_and_code_2(capsys, ended_by_nobody) -> None:
    assert end(ConfigError("--lr is 0"), capsys) == (2, "error: --lr is 0\n")
    assert end(RunStopped("iteration 3: no"), capsys) == (1, "error: iteration 3: no\n")
    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")
    assert ended_by_nobody == []


def test_the_unforeseen_has_its_traceback_and_names_the_rank_last(capsys, ended_by_nobody) -> None:
    code, text = end(ValueError("x"), capsys)
    assert code == 1 and text.startswith("Traceback") and "raise error" in text
    assert text.splitlines()[-1].startswith("error: rank 0 on ")
    assert text.endswith(": ValueError: x\n")


def test_another_rank_waits_for_rank_0_and_then_speaks_of_its_own_files(capsys, ended_by_nobody) -> None:
    code, text = end(ConfigError("no file"), capsys, rank="3")
    assert code == 2 and text.startswith("rank 3 on ") and text.endswith(": error: no file\n")
    assert ended_by_nobody == [2]


def test_flags_are_the_same_everywhere_so_only_rank_0_speaks(capsys, ended_by_nobody) -> None:
    assert end(ConfigError("--x is no flag"), capsys, rank="3", same_everywhere=True) == (2, "")
    assert end(ConfigError("--x is no flag"), capsys, same_everywhere=True)[1] == "error: --x is no flag\n"


def test_a_stop_that_every_rank_knows_of_is_told_by_rank_0(capsys, ended_by_nobody) -> None:
    assert end(RunStopped("iteration 3: no"), capsys, rank="1") == (1, "")


def test_no_error_is_no_end() -> None:
    with exit_on_error(RankReport(None, "0")):
        pass


def test_with_reports_every_rank_tells_its_end_there_and_nobody_speaks(capsys, tmp_path, ended_by_nobody):
    for rank in ("0", "1"):
        with pytest.raises(SystemExit) as caught, exit_on_error(RankReport(str(tmp_path), rank)):
            raise ConfigError(f"file {rank}")
        assert caught.value.code == 2
    assert capsys.readouterr().err == "" and ended_by_nobody == []
    ends = [(report["rank"], report["end"], report["text"]) for report in read_reports(tmp_path)]
    assert ends == [(0, "mistake", "error: file 0"), (1, "mistake", "error: file 1")]


@pytest.mark.parametrize(
    ("should_requeue", "env", "expected", "told"),
    [
        (False, {}, 0, "finished"),
        (True, {}, 75, "to be continued"),
        # The launcher would take 75 for a failure.
        (True, {"TORCHELASTIC_RUN_ID": "none"}, 0, "to be continued"),
    ],
)
def test_the_code_of_a_run_that_ends_well(should_requeue, env, expected, told, tmp_path) -> None:
    report = RankReport(str(tmp_path), "0")
    assert exit_code(report, should_requeue, env) == expected
    assert read_reports(tmp_path)[0]["end"] == told
