"""FP8: with equal weights every layout has the loss of one process, and all layouts train alike.

Rounding to FP8 is a step function. Two layouts that sum in different orders differ in the last bits of fp32
values. Then about one of a million elements is rounded to a neighboring code. At the sizes of these tests
this happens only in backward passes, except with context parallelism and --compile, which change the sums of
all tokens. After an update the weights differ as well, all tokens are rounded differently, and the losses
differ by the noise of FP8.
"""

from unittest import mock

import pytest

from tests.distributed.parity import DUALPIPEV, INTERLEAVED, SEQUENCE_PARALLEL, ZERO_BUBBLE, Changes
from tests.support import layouts
from tests.support.layouts import FP32_BOUND, LOW_PRECISION_BOUND, Row, relative_errors
from tests.support.pool import run_world

STEPS = 10
BATCHES = 4
"""Number of steps with the smallest rate: the weights stay equal."""
SMALLEST_RATE, SMALL_RATE = 1e-12, 1e-4
"""With the smallest rate no bit of a weight changes, so each step compares the loss of one more batch."""
CONTEXT_BOUND, NORM_BOUND = 1e-4, 2e-3
"""Largest relative errors: of the loss on layouts that change the sums of all tokens (context parallelism,
--compile), and of the grad norm."""
ANY_SIZE = {"fp8_min_size": 0}
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "kv_channels": 64, "ffn_hidden_size": 512}
WITH_EXPERTS = {
    **SIZES,
    **{"num_experts": 4, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 256},
}
MODELS: dict[str, Changes] = {
    "blockwise": {"model": SIZES, "precision": {"fp8_recipe": "blockwise", **ANY_SIZE}},
    "hybrid": {"model": SIZES, "precision": {"fp8_format": "hybrid", **ANY_SIZE}},
    "tensorwise": {"model": SIZES, "precision": {"fp8_recipe": "tensorwise", **ANY_SIZE}},
    "experts": {"model": WITH_EXPERTS, "precision": {"fp8_recipe": "blockwise", **ANY_SIZE}},
    "first-last": {
        "model": {**SIZES, "first_last_layers_bf16": True},
        "precision": {"fp8_recipe": "blockwise", **ANY_SIZE},
    },
}
COMPILED: Changes = {"training": {"compile": True}}
EXPERT_PARALLEL: Changes = {"parallel": {"expert_model_parallel_size": 2}}
EXPERTS_OF_SEQUENCE_SHARDS: Changes = {
    "parallel": {"expert_model_parallel_size": 2, "sequence_parallel": True}
}
UNEVEN: Changes = {"parallel": {"partition_method": "stages:E+1,3+L"}}
# (Model, layout, further settings of the layout.)
LAYOUTS = [
    ("blockwise", Row(tp=2, micro_batch=2), {}),
    ("blockwise", Row(tp=2, dp=2, zero=1, micro_batch=2), SEQUENCE_PARALLEL),
    ("blockwise", Row(pp=2, micro_batch=2, recompute=True), {}),
    ("blockwise", Row(pp=2, dp=2), ZERO_BUBBLE),
    ("blockwise", Row(pp=2), DUALPIPEV),
    ("blockwise", Row(pp=2, tp=2, micro_batch=2), INTERLEAVED),
    ("blockwise", Row(cp=2, micro_batch=4), {}),
    ("blockwise", Row(dp=2, zero=2, micro_batch=2), {}),
    ("blockwise", Row(dp=2, zero=3, recompute=True), {}),
    ("hybrid", Row(tp=2, micro_batch=2, recompute=True), SEQUENCE_PARALLEL),
    ("blockwise", Row(micro_batch=4, recompute=True), COMPILED),
    ("experts", Row(dp=2, micro_batch=2), EXPERT_PARALLEL),
    ("experts", Row(tp=2, dp=2, zero=1), EXPERTS_OF_SEQUENCE_SHARDS),
    ("experts", Row(dp=2, zero=3), EXPERT_PARALLEL),
    ("first-last", Row(tp=2, dp=2, zero=1), SEQUENCE_PARALLEL),
    ("first-last", Row(pp=2, micro_batch=2), UNEVEN),
    ("first-last", Row(pp=2, dp=2), INTERLEAVED),
    ("first-last", Row(cp=2, recompute=True), {}),
    ("tensorwise", Row(tp=2, cp=2), SEQUENCE_PARALLEL),
    ("tensorwise", Row(pp=2, dp=2, zero=1, recompute=True), ZERO_BUBBLE),
    ("tensorwise", Row(dp=2, zero=3), {}),
]


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(("model", "row", "layout"), LAYOUTS, ids=str)
def test_with_equal_weights_every_layout_has_the_loss_of_one_process(model, row, layout):
    loss, norm = errors(model, row, layout, SMALLEST_RATE)
    # Sums of products of FP8 numbers are nearly exact. Sums in bf16 over the ranks of a layer are not.
    changes_all_sums = row.cp > 1 or layout is COMPILED or (model == "first-last" and row.tp > 1)
    assert loss <= (CONTEXT_BOUND if changes_all_sums else FP32_BOUND)
    assert norm <= NORM_BOUND


def test_a_layer_of_the_wrong_precision_would_be_seen():
    two_kinds, one_kind = (one_process(model, SMALLEST_RATE) for model in ("first-last", "blockwise"))
    assert relative_errors(two_kinds, one_kind)[0] > 2 * CONTEXT_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(("model", "row", "layout"), LAYOUTS[1::3], ids=str)
def test_every_layout_trains_as_one_process_does(model, row, layout):
    """Fails if the FP8 copies of the weights do not follow each update."""
    history = one_process(model, SMALL_RATE)
    assert history[-1][0] < history[0][0] - 50 * LOW_PRECISION_BOUND
    loss, norm = errors(model, row, layout, SMALL_RATE)
    assert loss <= LOW_PRECISION_BOUND
    assert norm <= 10 * NORM_BOUND


_histories: dict[str, list[tuple[float, float]]] = {}


def one_process(model, rate):
    """Returns (loss, grad norm) of each step on one process."""
    key = f"{model} {rate}"
    if key not in _histories:
        _histories[key] = run_world(1, train_at, rate, Row(), **MODELS[model])[0]
    return _histories[key]


def errors(model, row, layout, rate):
    """Returns the largest relative errors of a layout's losses and grad norms."""
    numbers = MODELS[model]
    changes = {name: {**numbers.get(name, {}), **layout.get(name, {})} for name in {*numbers, *layout}}
    ranks = run_world(row.world_size, train_at, rate, row, **changes)
    found = [relative_errors(history, one_process(model, rate)) for history in ranks]
    return max(loss for loss, _ in found), max(norm for _, norm in found)


def train_at(rate, row, **changes):
    """Trains inside `run_world` with the given learning rate."""
    with mock.patch.object(layouts, "RATE", rate):
        return layouts.train_layout(row, BATCHES if rate == SMALLEST_RATE else STEPS, **changes)
