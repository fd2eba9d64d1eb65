"""The table of each stage's memory: told once, a row per pipeline rank."""

import re

import pytest
import torch.distributed as dist

from megatron.mpu.layout import ParallelLayout
from megatron.training.logging.startup_report import StartupReport
from tests.distributed.layouts import Row, config_of
from tests.distributed.pool import run_world


class NothingMoved:
    skipped = False


def tables_after(row, last_step, changes):
    layout = ParallelLayout.create(dist.get_world_size(), row.tp, row.pp, dist.get_rank())
    first_steps = StartupReport(config_of(row, **changes), layout)
    return [list(first_steps.lines(NothingMoved(), step == last_step)) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("last_step", "told_after"), [(4, 2), (1, 1)], ids=["after the second step", "after the only step"]
)
def test_memory_is_told_once_with_a_row_per_stage(last_step, told_after):
    for texts in run_world(4, tables_after, Row(pp=2, dp=2), last_step, {}):
        assert [len(of_step) for of_step in texts] == [step == told_after for step in range(1, 5)]
        head, *rows = texts[told_after - 1][0].splitlines()
        assert head == "memory after the first steps, GiB per stage:"
        for stage, row in enumerate(rows):
            found = re.fullmatch(r"  stage +(\d+) \| resident +([\d.]+) \| peak resident +([\d.]+)", row)
            assert int(found[1]) == stage
            assert 0.05 < float(found[2]) <= float(found[3]) < 50
        assert len(rows) == 2


def test_a_rank_with_two_stages_has_one_row():
    changes = {"parallel": {"pipeline_schedule": "dualpipev"}}
    for texts in run_world(2, tables_after, Row(pp=2), 4, changes):
        head, *rows = texts[1][0].splitlines()
        assert "per pipeline rank" in head and len(rows) == 2
