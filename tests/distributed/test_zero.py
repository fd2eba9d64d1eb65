"""ZeRO-2, ZeRO-3 and --cpu-offload have the losses and checkpoints of one process, and need less memory."""

import gc
import json
import math
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.formats.native import LayerFiles
from megatron.checkpoint.manager import load_checkpoint
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import has_memory, initial_values
from megatron.optimizer import mixed_precision
from megatron.optimizer.eight_bit import WORD_EMBEDDING
from megatron.optimizer.flat_group import ALIGNMENT, PARAMETER_ALIGNMENT
from tests.distributed.parity import EIGHT_BIT, SEQUENCE_PARALLEL, SHORT, assert_same_numbers
from tests.support.checkpoints import FINGERPRINT, save_midway
from tests.support.layouts import (
    FP32_BOUND,
    STEPS,
    Row,
    build_engine,
    build_model,
    config_of,
    evaluate,
    full_weights,
    micro_batches,
    relative_errors,
    train,
    train_layout,
    weights_of,
)
from tests.support.pool import run_world

OFFLOAD = {"parallel": {"cpu_offload": True}}
# Each layout is run with stages 2 and 3.
LAYOUTS = {
    "DP 2": (Row(dp=2, micro_batch=2), {}),
    "DP 4, recomputed": (Row(dp=4, micro_batch=2, recompute=True, positions="alibi"), {}),
    "DP 2, recomputed two by two": (
        Row(dp=2, micro_batch=2, recompute=True),
        {"training": {"checkpoint_num_layers": 2}},
    ),
    "TP 2 x DP 2": (Row(tp=2, dp=2, micro_batch=2, positions="rotary"), {}),
    "TP 2 x DP 2, sequence parallel": (Row(tp=2, dp=2, micro_batch=2), SEQUENCE_PARALLEL),
    "DP 2, plain loss": (Row(dp=2, micro_batch=2), {"training": {"loss_implementation": "plain"}}),
}


def train_offloaded(row, steps, **changes):
    """Trains with separate device memory and host memory, which are one on a CPU."""
    with mock.patch.object(mixed_precision, "is_host_memory", lambda device: False):
        return train_layout(row, steps, **changes)


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_stage_has_the_loss_and_the_grad_norm_of_one_process(layout, zero):
    row, changes = LAYOUTS[layout]
    # 4 processes run fewer steps: on a busy machine their messages are slow.
    assert_same_numbers(replace(row, zero=zero), STEPS if row.world_size == 2 else SHORT, layout=changes)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", [2, 3])
def test_16_bits_follow_the_fp32_loss(precision, zero):
    row = Row(tp=2, dp=2, zero=zero, micro_batch=2, recompute=zero == 3, precision=precision)
    assert_same_numbers(row, 5)


@pytest.mark.full
@pytest.mark.parametrize("zero", [2, 3])
def test_8_bit_moments_train_as_with_zero_1(zero):
    row = Row(tp=2, dp=2, micro_batch=4)
    expected = run_world(4, train_layout, replace(row, zero=1), 5, **EIGHT_BIT)[0]
    for history in run_world(4, train_layout, replace(row, zero=zero), 5, **EIGHT_BIT):
        # Gradients are summed in a different order, which may round a moment to the neighboring code.
        assert max(relative_errors(history, expected)) < 2e-3


# --- host memory ---


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(dp=2, zero=1, micro_batch=2, precision="bf16"),
        Row(dp=2, zero=3, micro_batch=2),
        Row(pp=2, dp=2, zero=1, micro_batch=2),
    ],
    ids=str,
)
def test_the_step_on_the_host_gives_the_same_numbers(row):
    expected = run_world(row.world_size, train_layout, row, 5)
    assert run_world(row.world_size, train_offloaded, row, 5, **OFFLOAD) == expected
    assert run_world(row.world_size, train_layout, row, 5, **OFFLOAD) == expected, "nothing to move"


@pytest.mark.full
def test_8_bit_moments_can_be_on_the_host():
    changes = {**EIGHT_BIT, **OFFLOAD}
    row = Row(dp=2, zero=2, micro_batch=2)
    on_device = run_world(2, train_layout, row, 3, **EIGHT_BIT)
    assert run_world(2, train_offloaded, row, 3, **changes) == on_device


# --- device memory ---


def whole_layers(engine):
    """Returns (layer, allocated bytes of its unsharded weights, allocated bytes of its unsharded gradients)
    of each layer."""
    units = [flat for flat in engine.optimizer.flat if flat.unit is not None]
    sizes = [(flat.weights.untyped_storage(), flat.gradients.untyped_storage()) for flat in units]
    return [
        (flat.unit, weights.nbytes(), gradients.nbytes())
        for flat, (weights, gradients) in zip(units, sizes, strict=True)
    ]


def what_is_there(row, changes):
    """Returns which layers have full (weights, gradients) before, between and after steps; when each layer's
    forward pass runs; when each layer's backward pass is about to end, for each micro-batch; then sizes."""
    engine = build_engine(config_of(row, **changes))
    layers = engine.module.transformer_layers()
    forward, backward = {}, {}

    def present():
        found = whole_layers(engine)
        return sorted({u for u, w, _ in found if w}), sorted({u for u, _, g in found if g})

    def note(record, name):
        def hook(*_):
            record.setdefault(name, []).append(present())

        return hook

    for name, layer in layers.items():
        # The hook is before the MLP: recomputation ends inside the MLP, at the last tensor that the backward
        # pass needs.
        layer.mlp.register_forward_pre_hook(note(forward, name))
        # This gradient is among the last of a layer, so the layer's buffer is still allocated.
        layer.input_layernorm.weight.register_hook(note(backward, name))
    before = present()
    train(engine, [0])
    between = present()
    evaluate(engine, micro_batches(engine, 0), 1)
    held = sum(flat.local_gradients.numel() for flat in engine.optimizer.flat if flat.unit)
    parameters = sum(p.numel() for layer in layers.values() for p in layer.parameters())
    return before, between, present(), forward, backward, held, parameters


NO_OVERLAP = {"parallel": {"no_overlap_grad_reduce": True, "no_overlap_param_gather": True}}


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_is_unsharded_only_while_it_computes(zero, recompute):
    row = Row(dp=4, zero=zero, micro_batch=1, recompute=recompute)
    names = ["3", "4", "5", "6"]
    always = names if zero == 2 else []
    ranks = run_world(4, what_is_there, row, NO_OVERLAP)
    for before, between, after, forward, backward, held, parameters in ranks:
        assert before == between == after == (always, [])
        for name in names:
            now = names if zero == 2 else [name]
            assert all(found == (now, []) for found in forward[name])
            assert all(found == (now, [name]) for found in backward[name])
        # Partitions of two groups of four layers are padded to the alignment, and each of the 7 vectors of a
        # layer by half of a parameter's alignment.
        assert parameters / 4 <= held <= parameters / 4 + 8 * ALIGNMENT + 4 * 7 * PARAMETER_ALIGNMENT / 2 / 4


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [3, 2])
def test_one_layer_is_prefetched_while_the_previous_one_is_reduced(zero, recompute):
    """Checks the second micro-batch: the order of the layers is known only after the first."""
    row = Row(dp=4, zero=zero, micro_batch=1, recompute=recompute)
    names = ["3", "4", "5", "6"]
    always = names if zero == 2 else []
    forward_weights = {"3": ["3", "4"], "4": ["4", "5"], "5": ["5", "6"], "6": ["6"]}
    backward_weights = {"6": ["5", "6"], "5": ["4", "5"], "4": ["3", "4"], "3": ["3"]}
    backward_gradients = {"6": ["3", "6"], "5": ["5", "6"], "4": ["4", "5"], "3": ["3", "4"]}
    for before, between, after, forward, backward, _, _ in run_world(4, what_is_there, row, {}):
        assert before == between == after == (always, [])
        second = 2 if recompute else 1  # the first micro-batch was recomputed
        for name in names:
            assert forward[name][second] == (always or forward_weights[name], ["3"])
            assert backward[name][1] == (always or backward_weights[name], backward_gradients[name])


def train_and_evaluate(row, changes):
    """Returns losses and grad norms of three steps, with an evaluation after the first step, and the
    weights."""
    engine = build_engine(config_of(row, **changes))
    history = train(engine, [0])
    history.append((evaluate(engine, micro_batches(engine, 0), 2).item(), 0.0))
    return history + train(engine, [1, 2]), weights_of(engine).shards


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "row, layers_per_checkpoint",
    [
        (Row(dp=4, zero=3, micro_batch=1, recompute=True), 3),
        (Row(dp=2, zero=3, micro_batch=2, precision="bf16"), 1),
        (Row(dp=2, zero=2, micro_batch=1), 1),
    ],
    ids=str,
)
def test_overlap_changes_no_digit(row, layers_per_checkpoint):
    training = {"training": {"checkpoint_num_layers": layers_per_checkpoint}}
    expected = run_world(row.world_size, train_and_evaluate, row, {**training, **NO_OVERLAP})
    found = run_world(row.world_size, train_and_evaluate, row, training)
    for (history, weights), (plain_history, plain_weights) in zip(found, expected, strict=True):
        assert history == plain_history
        assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)


def step_with_a_prefetched_layer(row):
    """Returns (layers with full weights before a step that follows half a forward pass, layers with full
    weights after it, whether weights that are gathered later are the step's result)."""
    engine = build_engine(config_of(row))
    optimizer = engine.optimizer
    train(engine, [0])
    optimizer.unit_overlap.begin_micro_batch()
    first, *_ = optimizer._units
    optimizer.unit_overlap.gather(first)
    first.free_weights()
    flats = [flat for flat in optimizer.flat if flat.shards_weights]
    prefetched = {flat.unit for flat in flats if flat.has_full_params}
    for flat in flats:
        flat.local_gradients.fill_(1.0)
    optimizer.step()
    after = {flat.unit for flat in flats if flat.has_full_params}
    with optimizer.gathered_params():
        parts = [flat.weights[flat.start : flat.start + flat.size] for flat in flats]
        same = [torch.equal(part, flat.master.bfloat16()) for part, flat in zip(parts, flats, strict=True)]
    return prefetched, after, all(same)


def test_prefetched_weights_are_not_kept_over_a_step():
    row = Row(dp=2, zero=3, micro_batch=2, precision="bf16")
    assert run_world(2, step_with_a_prefetched_layer, row) == [({"4"}, set(), True)] * 2


def engine_is_collected(row):
    engine = build_engine(config_of(row, model={"num_layers": 2}))
    train(engine, [0])
    gone = weakref.ref(engine.optimizer)
    del engine
    gc.collect()
    return gone() is None


def test_hooks_do_not_keep_the_optimizer_alive():
    assert run_world(2, engine_is_collected, Row(dp=2, zero=3)) == [True, True]


def start(row):
    """Returns how many of the layers' weights have memory when the model is made, and the weights of the
    engine."""
    config = config_of(row)
    run, model = build_model(config)
    layers = [p for layer in model.transformer_layers().values() for p in layer.parameters()]
    held = sum(map(has_memory, layers))
    return held, weights_of(GPTEngine(run, model))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_zero_3_starts_from_the_same_weights_without_whole_layers(precision):
    row = Row(tp=2, dp=2, zero=3, precision=precision)
    for held, weights in run_world(4, start, row):
        assert held == 0
        for name, shard in weights.shards.items():
            axes = [Axis("tp", weights.tp_rank, 2)]
            expected = initial_values(weights.specs[name], config_of(row).training.seed, name, axes)
            assert torch.equal(shard, expected.to(shard.dtype)), name


# --- checkpoints ---

SAVERS = {
    "ZeRO 3, TP 2": Row(tp=2, dp=2, zero=3, micro_batch=2),
    "ZeRO 1": Row(dp=2, zero=1, micro_batch=2),
    "ZeRO 2": Row(dp=2, zero=2, micro_batch=2),
}
OPENERS = [*SAVERS.values(), Row(pp=2, micro_batch=2), Row(dp=4, zero=3, micro_batch=2)]


def save_and_train_on(row, folder, changes):
    engine = save_midway(row, folder, 3, **changes)
    return weights_of(engine), train(engine, range(3, 6))


def open_midway(row, folder, changes):
    """Returns (integrity record of the loaded state, losses and norms of the following steps)."""
    from megatron.checkpoint.integrity import make_integrity_record

    engine = build_engine(config_of(row, **changes))
    train(engine, [9])
    load_checkpoint(engine, find_latest(folder), FINGERPRINT)
    return make_integrity_record(engine), train(engine, range(3, 6))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("saver", "openers"),
    [("ZeRO 3, TP 2", [SAVERS["ZeRO 1"]]), *((saver, OPENERS) for saver in SAVERS)],
    ids=["ZeRO 3 on ZeRO 1", *SAVERS],
)
def test_a_checkpoint_of_any_stage_opens_with_any_other(saver, openers, tmp_path):
    row = SAVERS[saver]
    ranks = run_world(row.world_size, save_and_train_on, row, tmp_path, {})
    saved = json.loads((tmp_path / "global_step3" / "run.json").read_text())["certificate"]
    assert not saved["unequal_copies"]
    for opener in openers:
        for certificate, history in run_world(opener.world_size, open_midway, opener, tmp_path, {}):
            assert certificate["digests"] == saved["digests"] and certificate["updates"] == 3
            assert certificate["probe"]["loss"] == pytest.approx(saved["probe"]["loss"], rel=1e-6)
            assert max(relative_errors(history, ranks[0][1])) <= FP32_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_layer_files_hold_the_weights(precision, tmp_path):
    row = Row(tp=2, dp=2, zero=3, micro_batch=2, precision=precision)
    ranks = run_world(4, save_and_train_on, row, tmp_path, {})
    expected = full_weights([weights for weights, _ in ranks])
    specs = ranks[0][0].specs
    found = dict(LayerFiles(tmp_path / "global_step3").all_tensors(specs))
    assert found.keys() == expected.keys() and WORD_EMBEDDING in found
    for name, full in found.items():
        used = specs[name].num_valid_rows
        assert torch.equal(full[:used], expected[name][:used]), name
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {full.dtype for full in found.values()} == {dtype}
    size = sum(path.stat().st_size for path in (tmp_path / "global_step3").glob("layer_*"))
    weights = sum(math.prod(spec.global_shape) for spec in specs.values()) * dtype.itemsize
    assert size < 2 * weights + 100_000, "a file holds its layer, not the buffer that the layer is a view of"


@pytest.mark.full
def test_8_bit_moments_of_stage_3_open_elsewhere(tmp_path):
    run_world(2, save_and_train_on, Row(dp=2, zero=3, micro_batch=2), tmp_path, EIGHT_BIT)
    saved = json.loads((tmp_path / "global_step3" / "run.json").read_text())["certificate"]
    for row in (Row(micro_batch=2), Row(dp=4, zero=2, micro_batch=2)):
        for certificate, _ in run_world(row.world_size, open_midway, row, tmp_path, EIGHT_BIT):
            assert certificate["digests"]["fp32"] == saved["digests"]["fp32"]
