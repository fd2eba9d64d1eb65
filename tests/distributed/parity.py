"""The claim of most tests in this folder: a layout trains with the same numbers as one process."""

from __future__ import annotations

from typing import Any

from tests.support.layouts import (
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    STEPS,
    Row,
    relative_errors,
    train_layout,
)
from tests.support.pool import run_world

Changes = dict[str, dict[str, Any]]
History = list[tuple[float, float]]

# On a busy machine the many small messages of 4 TP ranks wait for a core each.
SHORT = 10
SEQUENCE_PARALLEL: Changes = {"parallel": {"sequence_parallel": True}}
DUALPIPEV: Changes = {"parallel": {"pipeline_schedule": "dualpipev"}}
INTERLEAVED: Changes = {"parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}}

# Large enough that matrices have 8 bits; on 2 and 4 TP ranks a shard of an MLP's matrix is no whole
# number of blocks, and one of the attention's is smaller than the threshold.
EIGHT_BIT: Changes = {
    "model": {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 100},
    "optimizer": {"use_bnb_optimizer": True},
}

_histories: dict[str, History] = {}


def one_process(row: Row, steps: int = STEPS, **numbers: dict[str, Any]) -> History:
    """Returns (loss, grad norm) of each step of the row's model on one process, in fp32."""
    key = f"{row.positions} {numbers}"
    if len(_histories.get(key, ())) < steps:
        _histories[key] = run_world(1, train_layout, row.reference, steps, **numbers)[0]
    return _histories[key][:steps]


def assert_same_numbers(
    row: Row, steps: int = SHORT, numbers: Changes | None = None, layout: Changes | None = None
) -> None:
    """Trains on a layout; asserts that losses and grad norms of every rank are those of one process in fp32.

    numbers: changes of the configuration that both runs have. layout: changes that only the layout's run has.
    """
    numbers, layout = numbers or {}, layout or {}
    changes = {name: {**numbers.get(name, {}), **layout.get(name, {})} for name in {*numbers, *layout}}
    expected = one_process(row, steps, **numbers)
    for history in run_world(row.world_size, train_layout, row, steps, **changes):
        assert_near(history, expected, row.precision)


def assert_near(history: History, expected: History, precision: str = "fp32") -> None:
    """Asserts that a run's numbers are those of an fp32 run, to the rounding of its precision."""
    loss_error, norm_error = relative_errors(history, expected)
    if precision == "fp32":
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND
    else:
        assert 0 < loss_error <= LOW_PRECISION_BOUND
        assert norm_error < 0.05, "a wrong scale, which Adam would forgive"
