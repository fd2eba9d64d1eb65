"""FP8: with equal weights every layout has the loss of one process, and layouts train alike.

Rounding to FP8 is a step function. Where two layouts sum in different order, the last bits of an fp32 value
differ, and about one of a million elements gets a neighboring code. At these sizes this happens only in
backward passes, except with context parallelism and --compile, which change the sums of all tokens. After an
update the weights have such differences, too, and then all tokens are rounded differently: losses differ by
the noise of FP8.
"""

from unittest import mock

import pytest

from tests.distributed.parity import DUALPIPEV, INTERLEAVED, SEQUENCE_PARALLEL, ZERO_BUBBLE, Changes
from tests.support import layouts
from tests.support.layouts import FP32_BOUND, LOW_PRECISION_BOUND, Row, relative_errors
from tests.support.pool import run_world

STEPS = 10
BATCHES = 4
"""Steps of equal weights."""
SMALLEST_RATE, SMALL_RATE = 1e-12, 1e-4
"""With the smallest rate no bit of a weight changes, so each step compares the loss of another batch."""
CONTEXT_BOUND, NORM_BOUND = 1e-4, 2e-3
"""Of the loss where all sums change, and of the gradient's norm."""
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
# Model, layout, further settings of the layout.
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
    # Sums of products of FP8 numbers are nearly exact, sums over the ranks of a layer in bf16 are not.
    changes_all_sums = row.cp > 1 or layout is COMPILED or (model == "first-last" and row.tp > 1)
    assert loss <= (CONTEXT_BOUND if changes_all_sums else FP32_BOUND)
    assert norm <= NORM_BOUND


def test_a_layer_of_the_wrong_precision_would_be_seen():
    two_kinds, one_kind = (one_process(model, SMALLEST_RATE) for model in ("first-last", "blockwise"))
    assert relative_errors(two_kinds, one_kind)[0] > 2 * CONTEXT_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(("model", "row", "layout"), LAYOUTS[1::3], ids=str)
def test_every_layout_trains_as_one_process_does(model, row, layout):
    """The FP8 copies of the weights follow each update."""
    history = one_process(model, SMALL_RATE)
    assert history[-1][0] < history[0][0] - 50 * LOW_PRECISION_BOUND
    loss, norm = errors(model, row, layout, SMALL_RATE)
    assert loss <= LOW_PRECISION_BOUND
    assert norm <= 10 * NORM_BOUND


_histories: dict[str, list[tuple[float, float]]] = {}


def one_process(model, rate):
    """(loss, grad norm) of each step on one process."""
    key = f"{model} {rate}"
    if key not in _histories:
        _histories[key] = run_world(1, train_at, rate, Row(), **MODELS[model])[0]
    return _histories[key]


def errors(model, row, layout, rate):
    """The largest relative errors of a layout's losses and grad norms."""
    numbers = MODELS[model]
    changes = {name: {**numbers.get(name, {}), **layout.get(name, {})} for name in {*numbers, *layout}}
    ranks = run_world(row.world_size, train_at, rate, row, **changes)
    found = [relative_errors(history, one_process(model, rate)) for history in ranks]
    return max(loss for loss, _ in found), max(norm for _, norm in found)


def train_at(rate, row, **changes):
    """Trains with a learning rate, inside `run_world`."""
    with mock.patch.object(layouts, "RATE", rate):
        return layouts.train_layout(row, BATCHES if rate == SMALLEST_RATE else STEPS, **changes)
