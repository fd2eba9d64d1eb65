"""The table of each stage's memory is printed once, with a row per pipeline rank."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron.training import startup_report
from megatron.training.startup_report import StartupReport
from tests.support.layouts import Row, config_of, make_run
from tests.support.pool import run_world


class NothingMoved:
    skipped = False


def tables_after(row, last_step, changes):
    first_steps = StartupReport(make_run(config_of(row, **changes)))
    return [list(first_steps.lines(NothingMoved(), step == last_step)) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("last_step", "logged_after"), [(4, 2), (1, 1)], ids=["after the second step", "after the only step"]
)
def test_memory_is_printed_once_with_a_row_per_stage(last_step, logged_after):
    for texts in run_world(4, tables_after, Row(pp=2, dp=2), last_step, {}):
        assert [len(of_step) for of_step in texts] == [step == logged_after for step in range(1, 5)]
        head, *rows = texts[logged_after - 1][0].splitlines()
        assert head == "memory after the first steps, GiB per stage, least to most of its ranks:"
        for stage, row in enumerate(rows):
            column = r"resident +([\d.]+) to +([\d.]+) \(rank (\d)\)"
            found = re.fullmatch(rf"  stage +(\d+) \| {column} \| peak {column}", row).groups()
            assert int(found[0]) == stage
            for least, most, rank in (found[1:4], found[4:7]):
                assert 0.05 < float(least) <= float(most) < 50
                assert int(rank) in (2 * stage, 2 * stage + 1)
        assert len(rows) == 2


def test_a_rank_with_two_stages_has_one_row():
    changes = {"parallel": {"pipeline_schedule": "dualpipev"}}
    for texts in run_world(2, tables_after, Row(pp=2), 4, changes):
        head, *rows = texts[1][0].splitlines()
        assert "per pipeline rank" in head and len(rows) == 2


def test_on_a_gpu_all_that_is_in_use_stands_beside_the_allocators_figures(monkeypatch):
    gpu = SimpleNamespace(
        device_name=lambda: "cuda",
        memory_allocated=lambda: 1,
        max_memory_allocated=lambda: 2,
        max_memory_reserved=lambda: 3,
    )
    monkeypatch.setattr(startup_report, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 80))
    found = startup_report.local_memory()
    assert found == {"allocated": 1, "peak allocated": 2, "peak reserved": 3, "device in use": 70}
