"""After a signal all ranks exit early, after one step."""

import os
import signal
import time

import pytest
import torch

from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.signals import ExitConditions, ExitReason, all_reduce_max
from megatron.config import CheckpointConfig, TrainingConfig
from megatron.config.sections.training import EXIT_SIGNALS


def conditions(started_at=None, folder=None, **training):
    report = RankReport(folder, "0")
    report.started_at = started_at or report.started_at
    return ExitConditions(TrainingConfig(train_iters=100, **training), report)


@pytest.fixture
def world_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_no_condition_gives_no_reason():
    assert all_reduce_max(2) == 2  # without a process group
    assert conditions().reason(10) is None
    assert conditions().request(0) is None


def test_interval_counts_from_iteration_0():
    ends = conditions(exit_interval=5)
    assert [n for n in range(1, 12) if ends.reason(n)] == [5, 10]
    assert ends.request(5) is None
    reason = ends.reason(10)
    assert "iteration 10" in reason.sentence and reason.status is ExitStatus.FINISHED


def test_duration_includes_the_start():
    assert conditions(exit_duration_in_mins=2).reason(1) is None
    late = conditions(started_at=time.monotonic() - 121, exit_duration_in_mins=2)
    assert late.reason(1) == ExitReason(
        "exiting program after 2.0 minutes (--exit-duration-in-mins 2)", ExitStatus.REQUEUE
    )


def test_kill_switch_stops_a_run_before_and_during_training(tmp_path):
    switch = tmp_path / "stop"
    ends = conditions(kill_switch_path=str(switch), exit_interval=3)
    assert ends.reason(1) is None and ends.request(0) is None and "iteration 3" in ends.reason(3).sentence
    switch.touch()
    expected = ExitReason(f"exiting program: kill switch {switch} exists", ExitStatus.FINISHED)
    assert ends.reason(2) == ends.request(0) == ends.reason(3) == expected


def test_reason_is_reduced_through_the_process_group(world_of_one, tmp_path):
    assert all_reduce_max(3) == 3
    assert conditions(kill_switch_path=str(tmp_path)).reason(1) is not None


def test_other_ranks_read_neither_files_nor_clock(monkeypatch, tmp_path):
    """Rank 1 gets rank 0's reason from the all-reduce."""
    (tmp_path / "stop_requested").touch()
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


@pytest.fixture
def restored_handlers():
    before = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, EXIT_SIGNALS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGINT"])
def test_exit_signal_is_a_reason_after_install_handlers(name, restored_handlers):
    ends = conditions(exit_interval=3, exit_signal=(name,))
    ends.install_handlers()
    assert ends.reason(1) is None
    os.kill(os.getpid(), signal.Signals[name])
    expected = ExitReason(f"exiting program at iteration 3: {name} (--exit-signal)", ExitStatus.REQUEUE)
    assert ends.reason(3) == expected


def test_ctrl_c_stops_after_the_step_without_requeue(restored_handlers):
    ends = conditions()
    assert ends.install_handlers() == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP}
    os.kill(os.getpid(), signal.SIGINT)
    expected = ExitReason("exiting program at iteration 3: SIGINT", ExitStatus.INTERRUPTED)
    assert ends.reason(3) == ends.request(3) == expected


def test_nohup_keeps_a_closed_terminal_from_ending_the_run(restored_handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ends = conditions()
    assert signal.SIGHUP not in ends.install_handlers()
    os.kill(os.getpid(), signal.SIGHUP)
    assert ends.reason(3) is None


def test_a_code_that_the_step_has_exchanged_is_not_exchanged_again(monkeypatch):
    monkeypatch.delattr("megatron.cluster.signals.all_reduce_max")
    ends = conditions(exit_interval=3)
    assert ends.reason(2, largest_code=0) is None
    assert "--exit-interval 3" in ends.reason(3, largest_code=0).sentence
    assert "SIGTERM" in ends.reason(3, largest_code=100 + signal.SIGTERM).sentence


def test_signal_of_another_rank_is_a_reason(monkeypatch):
    monkeypatch.setattr(
        "megatron.cluster.signals.all_reduce_max", lambda code, device: code + 100 + signal.SIGTERM
    )
    assert "SIGTERM" in conditions().reason(1).sentence


def test_only_named_signals_are_handled(restored_handlers):
    before = signal.getsignal(signal.SIGTERM)
    conditions(exit_signal=("usr2",)).install_handlers()
    assert signal.getsignal(signal.SIGTERM) == before != signal.getsignal(signal.SIGUSR2)


def test_job_script_requests_a_stop_by_a_file(tmp_path):
    ends = conditions(folder=str(tmp_path))
    assert ends.reason(1) is None
    (tmp_path / "stop_requested").touch()
    assert ends.reason(2).status is ExitStatus.REQUEUE and "script" in ends.reason(2).sentence


@pytest.mark.parametrize(
    ("save", "load", "status", "remedy"),
    [
        ("a", "a", ExitStatus.REQUEUE, ""),
        ("a", None, ExitStatus.FINISHED, "; to resume, add --load a"),
        (None, "a", ExitStatus.FINISHED, "; nothing is saved without --save"),
    ],
)
def test_run_is_requeued_only_if_the_same_command_resumes(save, load, status, remedy):
    reason = ExitReason("stopped", ExitStatus.REQUEUE)
    checkpoint = CheckpointConfig(save=save, load=load)
    assert reason.final_status(checkpoint) is status
    assert reason.line(checkpoint) == f"stopped{remedy}"
