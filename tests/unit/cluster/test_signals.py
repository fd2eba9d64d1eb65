"""When a run ends early, and that all ranks do so together."""

import os
import signal
import time

import pytest
import torch

from megatron.cluster.rank_reports import RankReport
from megatron.cluster.signals import ExitConditions, ExitReason, all_reduce_max
from megatron.config import TrainingConfig


def conditions(started_at=None, folder=None, **training):
    report = RankReport(folder, "0")
    report.started_at = started_at or report.started_at
    return ExitConditions.from_config(TrainingConfig(train_iters=100, **training), report)


@pytest.fixture
def world_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_nothing_asked_for_means_no_exit():
    assert conditions().reason(10) is None
    assert conditions().reason_before_training() is None
    reason = conditions(exit_interval=5).reason(10)
    assert "iteration 10" in reason.sentence and not reason.should_requeue


def test_interval_counts_from_the_start_of_all_runs():
    ends = conditions(exit_interval=5)
    assert [n for n in range(1, 12) if ends.reason(n)] == [5, 10]
    assert ends.reason_before_training() is None


def test_minutes_include_the_start_up():
    assert conditions(exit_duration_in_mins=2).reason(1) is None
    late = conditions(started_at=time.monotonic() - 121, exit_duration_in_mins=2)
    assert late.reason(1) == ExitReason("exiting program after 2.0 minutes (--exit-duration-in-mins 2)", True)


def test_kill_switch_stops_a_run_before_and_during_training(tmp_path):
    switch = tmp_path / "stop"
    ends = conditions(kill_switch_path=str(switch), exit_interval=3)
    assert ends.reason(1) is None and ends.reason_before_training() is None
    switch.touch()
    expected = ExitReason(f"exiting program: kill switch {switch} exists", should_requeue=False)
    assert ends.reason(2) == ends.reason_before_training() == ends.reason(3) == expected


def test_the_interval_still_holds_beside_a_kill_switch_that_is_off(tmp_path):
    ends = conditions(kill_switch_path=str(tmp_path / "none"), exit_interval=3)
    assert "iteration 3" in ends.reason(3).sentence


def test_ranks_agree_through_the_process_group(world_of_one, tmp_path):
    assert all_reduce_max(3) == 3
    assert conditions(kill_switch_path=str(tmp_path)).reason(1) is not None


def test_another_rank_hears_of_the_kill_switch_it_does_not_look_at(monkeypatch, tmp_path):
    """Rank 1 reads neither files nor clock: what rank 0 put into the all-reduce decides."""
    (tmp_path / "leave").touch()
    ends = conditions(
        folder=str(tmp_path),
        kill_switch_path=str(tmp_path),
        exit_duration_in_mins=1,
        started_at=time.monotonic() - 120,
    )
    monkeypatch.setattr("megatron.cluster.signals._rank", lambda: 1)
    assert ends.reason(1) is None
    monkeypatch.setattr("megatron.cluster.signals.all_reduce_max", lambda code, device: max(code, 2))
    assert "minutes" in ends.reason(1).sentence


def test_without_process_groups_a_code_stands_for_itself():
    assert all_reduce_max(2) == 2


@pytest.fixture
def handlers_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_a_reason_from_listening_on(handlers_put_back):
    ends = conditions(exit_interval=3)
    ends.install_handlers()
    assert ends.reason(1) is None
    os.kill(os.getpid(), signal.SIGUSR2)
    expected = ExitReason("exiting program at iteration 3: SIGUSR2 (--exit-signal)", should_requeue=True)
    assert ends.reason(3) == expected


def test_a_signal_that_another_rank_got_is_a_reason_here(monkeypatch):
    monkeypatch.setattr(
        "megatron.cluster.signals.all_reduce_max", lambda code, device: code + 100 + signal.SIGTERM
    )
    assert "SIGTERM" in conditions().reason(1).sentence


def test_no_signal_but_those_named_is_handled(handlers_put_back):
    before = signal.getsignal(signal.SIGTERM)
    conditions(exit_signal=("usr2",)).install_handlers()
    assert signal.getsignal(signal.SIGTERM) == before != signal.getsignal(signal.SIGUSR2)


def test_the_script_asks_by_a_file_beside_the_reports(tmp_path):
    ends = conditions(folder=str(tmp_path))
    assert ends.reason(1) is None
    (tmp_path / "leave").touch()
    assert ends.reason(2).should_requeue and "script" in ends.reason(2).sentence
