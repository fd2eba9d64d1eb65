"""Context parallelism trains with the numbers of one process, with any schedule, mask and ZeRO stage."""

import pytest

from tests.distributed.parity import (
    DUALPIPEV,
    INTERLEAVED,
    SEQUENCE_PARALLEL,
    SHORT,
    one_process,
)
from tests.support.layouts import DROPOUT, STEPS, Row, relative_errors, train_layout
from tests.support.pool import run_world

BOUND = 1e-6
GROUPED = {"model": {"group_query_attention": True, "num_query_groups": 2}}
DOCUMENTS = {"data": {"reset_attention_mask": True, "reset_position_ids": True}}
WINDOW = {"model": {"window_size": 7}}
DROPPED = {"model": DROPOUT}
PLAIN = {"training": {"loss_implementation": "plain"}}
ZERO_BUBBLE = {"parallel": {"pipeline_schedule": "zero-bubble"}}


def merged(*changes):
    result = {}
    for change in changes:
        for section, fields in change.items():
            result.setdefault(section, {}).update(fields)
    return result


def row(*numbers, layout=None, full=True, **settings):
    marks = [pytest.mark.full] if full else []
    return pytest.param(Row(**settings), merged(*numbers), layout or {}, marks=marks)


ROWS = [
    row(DOCUMENTS, DROPPED, GROUPED, cp=2, tp=2, positions="rotary", layout=SEQUENCE_PARALLEL, full=False),
    row(cp=2, pp=2, zero=1, micro_batch=2, full=False),
    row(cp=2, dp=2, zero=3, positions="alibi", recompute=True, full=False),
    row(cp=4, positions="rotary"),
    row(WINDOW, cp=4, zero=2),
    row(PLAIN, cp=4, zero=1, dp=2),
    row(DROPPED, DOCUMENTS, cp=2, tp=2, pp=2, positions="alibi"),
    row(GROUPED, cp=2, pp=2, dp=2, zero=1, positions="rotary", layout=INTERLEAVED),
    row(DROPPED, WINDOW, cp=4, pp=2, recompute=True, layout=ZERO_BUBBLE),
    row(cp=2, pp=2, tp=2, layout=merged(DUALPIPEV, SEQUENCE_PARALLEL)),
]


@pytest.mark.parametrize("row,numbers,layout", ROWS)
def test_context_parallelism_has_the_numbers_of_one_process(row, numbers, layout):
    steps = STEPS if row.world_size == 8 else SHORT
    expected = one_process(row, steps, **numbers)
    for history in run_world(row.world_size, train_layout, row, steps, **merged(numbers, layout)):
        errors = relative_errors(history, expected)
        assert max(errors) <= BOUND, errors
