"""Helpers for the claim of most tests in this folder: a layout trains to the losses and grad norms of one
process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatron.arguments.checks import mistakes_of
from tests.support.layouts import (
    DROPOUT,
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    STEPS,
    VOCAB,
    Row,
    config_of,
    relative_errors,
    train_layout,
)
from tests.support.pool import run_world

Changes = dict[str, dict[str, Any]]
History = list[tuple[float, ...]]

# Number of steps of most comparisons: on a busy machine the many small messages of 4 TP ranks are slow.
SHORT = 10
SEQUENCE_PARALLEL: Changes = {"parallel": {"sequence_parallel": True}}
DUALPIPEV: Changes = {"parallel": {"pipeline_schedule": "dualpipev"}}
INTERLEAVED: Changes = {"parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}}
ZERO_BUBBLE: Changes = {"parallel": {"pipeline_schedule": "zero-bubble"}}

# A model large enough for 8-bit moments. On 2 and 4 TP ranks the shards of an MLP's matrices do not end at
# the boundary of a block, and a shard of an attention matrix is smaller than the threshold.
EIGHT_BIT: Changes = {
    "model": {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 100},
    "optimizer": {"use_bnb_optimizer": True},
}


def merged(*changes: Changes) -> Changes:
    """Returns all changes merged. If a field has several values, the last one wins."""
    result: Changes = {}
    for each in changes:
        for section, fields in each.items():
            result[section] = {**result.get(section, {}), **fields}
    return result


class Layout(NamedTuple):
    """A layout on which a feature must train. changes: changes of the configuration of the layout's run.
    numbers: changes that the reference run on one process has, too."""

    row: Row
    changes: Changes = {}
    numbers: Changes = {}

    def with_experts(self) -> Layout:
        """Returns the layout with EP 2 if TP x CP x DP is even, and with sequence parallelism if TP > 1,
        which experts require."""
        row, is_tp = self.row, self.row.tp > 1
        ep = 2 if row.tp * row.cp * row.dp % 2 == 0 else 1
        parallel = {"expert_model_parallel_size": ep} | ({"sequence_parallel": True} if is_tp else {})
        return self._replace(changes=merged(self.changes, {"parallel": parallel}))


LAYOUTS = {
    "tp2-cp2-sequence-recompute": Layout(Row(tp=2, cp=2, micro_batch=2, recompute=True), SEQUENCE_PARALLEL),
    "tp2": Layout(Row(tp=2)),
    "tp4": Layout(Row(tp=4, micro_batch=2)),
    "tp4-sequence-recompute": Layout(Row(tp=4, micro_batch=4, recompute=True), SEQUENCE_PARALLEL),
    "tp2-overlap-modules": Layout(
        Row(tp=2, micro_batch=2),
        {
            "parallel": {"sequence_parallel": True, "tp_comm_overlap": True},
            "training": {
                "recompute_granularity": "selective",
                "recompute_modules": ("core_attn", "layernorm"),
            },
        },
    ),
    "pp4-recompute": Layout(Row(pp=4, micro_batch=2, recompute=True)),
    "pp2-uneven": Layout(Row(pp=2), {"parallel": {"partition_method": "stages:E+3,1+L"}}),
    "pp2-dp2-zero1-interleaved": Layout(Row(pp=2, dp=2, zero=1), INTERLEAVED),
    "pp2-dualpipev": Layout(Row(pp=2, micro_batch=2), DUALPIPEV),
    "tp2-pp2-zero-bubble-sequence": Layout(
        Row(tp=2, pp=2, micro_batch=2), merged(ZERO_BUBBLE, SEQUENCE_PARALLEL)
    ),
    "tp2-pp2-partitioned-activations": Layout(
        Row(tp=2, pp=2, micro_batch=4, recompute=True), {"training": {"partition_activations": True}}
    ),
    "cp2": Layout(Row(cp=2, micro_batch=4)),
    "cp4-zero1": Layout(Row(cp=4, zero=1, micro_batch=2)),
    "cp2-pp2-zero-bubble": Layout(Row(cp=2, pp=2), ZERO_BUBBLE),
    "cp2-dp2-zero2-dropout": Layout(Row(cp=2, dp=2, zero=2, micro_batch=2), {}, {"model": DROPOUT}),
    "dp4-zero1-buckets": Layout(Row(dp=4, zero=1), {"parallel": {"ddp_bucket_size": 1}}),
    "dp2-zero2": Layout(Row(dp=2, zero=2)),
    "dp2-zero3-recompute": Layout(Row(dp=2, zero=3, micro_batch=2, recompute=True)),
    "dp2-zero1-offload": Layout(Row(dp=2, zero=1, micro_batch=4), {"parallel": {"cpu_offload": True}}),
    "tp2-dp2-zero3": Layout(Row(tp=2, dp=2, zero=3, micro_batch=2)),
    "tp4-dp2-zero3": Layout(Row(tp=4, dp=2, zero=3, micro_batch=2)),
    "tp4-pp2-sequence-uneven": Layout(
        Row(tp=4, pp=2, micro_batch=2),
        {"parallel": {"sequence_parallel": True, "partition_method": "stages:E+1,3+L"}},
    ),
    "tp2-pp2-dp2-zero1-dropout": Layout(Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2), {}, {"model": DROPOUT}),
    "tp2-cp2-pp2-dualpipev-sequence": Layout(
        Row(tp=2, cp=2, pp=2, micro_batch=2), merged(DUALPIPEV, SEQUENCE_PARALLEL)
    ),
}
"""The layouts on which every feature is tested, by name."""


def rows_of(layouts: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Returns (model, layout) for each layout of each model, to parametrize a test."""
    return [(model, layout) for model, names in layouts.items() for layout in names]


Train = Callable[..., History]
_histories: dict[str, History] = {}


def one_process(
    row: Row, steps: int = STEPS, train: Train = train_layout, **numbers: dict[str, Any]
) -> History:
    """Returns (loss, grad norm) of each step of the row's model on one process in fp32. train: see
    `assert_same_numbers`."""
    key = f"{train} {row.positions} {numbers}"
    if len(_histories.get(key, ())) < steps:
        _histories[key] = run_world(1, train, row.reference, steps, **numbers)[0]
    return _histories[key][:steps]


def assert_same_numbers(
    row: Row,
    steps: int = SHORT,
    numbers: Changes | None = None,
    layout: Changes | None = None,
    train: Train = train_layout,
) -> None:
    """Trains on a layout, and asserts that losses and grad norms of every rank equal an fp32 run on one
    process.

    numbers: changes of the configuration that both runs have. layout: changes that only the layout's run has.
    train: a function like `train_layout`, which may return more numbers for each step.
    """
    numbers = numbers or {}
    expected = one_process(row, steps, train, **numbers)
    for history in run_world(row.world_size, train, row, steps, **merged(numbers, layout or {})):
        assert_near(history, expected, row.precision)


def assert_same_on(
    name: str, numbers: Changes, rejections: Mapping[str, str] | None = None, train: Train = train_layout
) -> None:
    """Asserts with `assert_same_numbers` that a model trains for 20 steps on a layout of `LAYOUTS` as on one
    process. rejections: layout -> words of the error with which the program rejects the model on this
    layout."""
    layout = LAYOUTS[name]
    if "num_experts" in numbers.get("model", {}):
        layout = layout.with_experts()
    numbers = merged(layout.numbers, numbers)
    data: Changes = {"model": {"vocab_size": VOCAB}, "data": {"mock_data": True}}
    mistakes = "\n".join(mistakes_of(config_of(layout.row, **merged(numbers, layout.changes, data))))
    if rejections is not None and name in rejections:
        assert rejections[name] in mistakes
    else:
        assert not mistakes
        assert_same_numbers(layout.row, STEPS, numbers, layout.changes, train)


def assert_near(history: History, expected: History, precision: str = "fp32") -> None:
    """Asserts that losses and grad norms equal an fp32 run's within the rounding of `precision`."""
    loss_error, norm_error = relative_errors(history, expected)
    if precision == "fp32":
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND
    else:
        assert 0 < loss_error <= LOW_PRECISION_BOUND
        assert norm_error < 0.05, "a wrong scale, which Adam would forgive"
