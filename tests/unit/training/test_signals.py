"""When a run ends early, and that all ranks do so together."""

import time

import pytest
import torch

from megatron.config import TrainingConfig
from megatron.training.signals import ExitConditions, agree


def conditions(started_at=None, **training):
    started_at = time.monotonic() if started_at is None else started_at
    return ExitConditions.from_config(TrainingConfig(train_iters=100, **training), started_at)


@pytest.fixture
def world_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_nothing_asked_for_means_no_exit_and_no_communication(monkeypatch):
    monkeypatch.setattr("megatron.training.signals.agree", lambda *_: pytest.fail("a collective was made"))
    assert conditions().reason(10) is None
    assert conditions().reason_before_training() is None
    assert "iteration 10" in conditions(exit_interval=5).reason(10)


def test_interval_counts_from_the_start_of_all_runs():
    ends = conditions(exit_interval=5)
    assert [n for n in range(1, 12) if ends.reason(n)] == [5, 10]
    assert ends.reason_before_training() is None


def test_minutes_include_the_start_up():
    assert conditions(exit_duration_in_mins=2).reason(1) is None
    late = conditions(started_at=time.monotonic() - 121, exit_duration_in_mins=2)
    assert late.reason(1) == "exiting program after 2.0 minutes (--exit-duration-in-mins 2)"


def test_kill_switch_stops_a_run_before_and_during_training(tmp_path):
    switch = tmp_path / "stop"
    ends = conditions(kill_switch_path=str(switch), exit_interval=3)
    assert ends.reason(1) is None and ends.reason_before_training() is None
    switch.touch()
    assert ends.reason(2) == ends.reason_before_training() == f"exiting program: kill switch {switch} exists"
    assert "kill switch" in ends.reason(3)


def test_the_interval_still_holds_beside_a_kill_switch_that_is_off(tmp_path):
    assert "iteration 3" in conditions(kill_switch_path=str(tmp_path / "none"), exit_interval=3).reason(3)


def test_ranks_agree_through_the_process_group(world_of_one, tmp_path):
    assert agree(3) == 3
    assert conditions(kill_switch_path=str(tmp_path)).reason(1) is not None


def test_another_rank_hears_of_the_kill_switch_it_does_not_look_at(monkeypatch, tmp_path):
    """Rank 1 reads neither file nor clock: what rank 0 put into the all-reduce decides."""
    ends = conditions(
        kill_switch_path=str(tmp_path), exit_duration_in_mins=1, started_at=time.monotonic() - 120
    )
    monkeypatch.setattr("megatron.training.signals._rank", lambda: 1)
    assert ends.reason(1) is None
    monkeypatch.setattr("megatron.training.signals.agree", lambda code, device: max(code, 2))
    assert "minutes" in ends.reason(1)


def test_without_process_groups_a_code_stands_for_itself():
    assert agree(2) == 2
