"""8-bit Adam trains like Adam on every layout, and the layout does not change which parameters have 8-bit
moments."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron.cluster.exit_codes import RunStopped
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import WORD_EMBEDDING, moment_bits
from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment
from megatron.training.startup_report import describe_moments, local_moments
from tests.distributed.parity import EIGHT_BIT
from tests.distributed.test_model_variants import QWEN3
from tests.distributed.test_optimizer import check_same_steps
from tests.support.layouts import STEPS, Row, build_engine, config_of, relative_errors, train, train_layout
from tests.support.pool import run_world

LAYOUTS = {
    "TP 2": Row(tp=2, micro_batch=2),
    "PP 2": Row(pp=2, micro_batch=2),
    "DP 2": Row(dp=2, micro_batch=2),
    "DP 2, ZeRO 1": Row(dp=2, zero=1, micro_batch=2),
    "TP 2 x PP 2 x DP 2, ZeRO 1": Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2),
    "DP 4, ZeRO 1, bf16": Row(dp=4, zero=1, micro_batch=2, precision="bf16"),
    "TP 2 x DP 2, ZeRO 1": Row(tp=2, dp=2, zero=1, micro_batch=2),
}


MODELS = {
    "plain": EIGHT_BIT["model"],
    "qwen3-like": {**QWEN3, **EIGHT_BIT["model"]},
    "gate-sinks": {
        **{**QWEN3, **EIGHT_BIT["model"], "attention_output_gate": True, "softmax_type": "learnable"},
    },
}


def train_steps(row, steps, eight_bit=True, model="plain"):
    optimizer = EIGHT_BIT["optimizer"] if eight_bit else {}
    return train_layout(row, steps, model=MODELS[model], optimizer=optimizer)


@cache
def one_process(eight_bit, model="plain"):
    return run_world(1, train_steps, Row(micro_batch=8), STEPS, eight_bit, model)[0]


@pytest.mark.full
def test_the_loss_of_8_bit_adam_is_near_that_of_adam():
    expected, history = one_process(eight_bit=False), one_process(eight_bit=True)
    assert history[-1][0] < history[0][0] - 0.5
    assert 0 < relative_errors(history, expected)[0] < 0.01


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(layout, model):
    row = LAYOUTS[layout]
    for history in run_world(row.world_size, train_steps, row, STEPS, True, model):
        # A different order of summation may round one moment to the next of its 256 codes.
        assert relative_errors(history, one_process(True, model))[0] < 2e-3
        assert relative_errors(history, one_process(False, model))[0] < 0.01


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(dp=2, micro_batch=2), Row(pp=2, dp=2, micro_batch=2)], ids=str)
def test_both_zero_stages_take_the_same_steps(row):
    """Fails if a partition boundary splits a block: its two parts would be quantized with different
    scales."""
    histories = [run_world(row.world_size, train_steps, replace(row, zero=zero), 5) for zero in (0, 1)]
    check_same_steps(*histories)


# --- which parameters have 8-bit moments ---


def moments_and_table(row):
    engine = build_engine(config_of(row, **EIGHT_BIT))
    optimizer = engine.optimizer
    assert not any(optimizer.moments_of(flat) for flat in optimizer.flat), "nothing before the first step"
    train(engine, [0])
    for flat in optimizer.flat:
        for parameter, start, length in flat.fragments():
            fragments = optimizer.moment_fragments(flat, parameter)
            assert fragments.keys() == {"exp_avg", "exp_avg_sq"}
            assert all(f.dtype == torch.float32 and f.numel() == length for f in fragments.values())
            assert not flat.quantized or start % BLOCK_SIZE == 0
    return local_moments(optimizer), describe_moments(optimizer)


@cache
def moments_of_one_process():
    return run_world(1, moments_and_table, Row(micro_batch=4))[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "row",
    [
        Row(tp=4, micro_batch=4),
        Row(dp=4, zero=1, micro_batch=2),
        Row(tp=2, pp=2, dp=2, zero=1, micro_batch=4),
    ],
    ids=str,
)
def test_who_has_8_bits_does_not_depend_on_the_layout(row):
    """bitsandbytes decides by the size of the tensor that it gets, which is a shard here (bitsandbytes 2080).
    The rule of this program uses the size of the whole parameter."""
    expected, table = moments_of_one_process()
    bits = {name: moments.actual_bits for name, moments in expected.items()}
    assert {next(iter(found)) for found in bits.values()} == {8, 32}
    assert bits[WORD_EMBEDDING] == {32} and bits["3.input_layernorm.weight"] == {32}
    assert bits["3.self_attention.dense.weight"] == {8}
    found = {}
    for here, table_here in run_world(row.world_size, moments_and_table, row):
        assert table_here.splitlines()[2:4] == table.splitlines()[2:4]
        for name, moments in here.items():
            found.setdefault(name, set()).update(moments.actual_bits)
    assert found == bits


def test_the_table_shows_measured_bytes():
    _, table = moments_of_one_process()
    first, second = (line for line in table.splitlines() if "bytes per element" in line)
    matrices = 4 * (192 * 64 + 64 * 64 + 2 * 64 * 100)
    assert " 8 bits |   16 parameters" in first and f"{matrices:,d} elements" in first
    # Each of the two moments has one byte per element, and one fp32 scale per block.
    assert f"{2 * (1 + 4 / BLOCK_SIZE):.3f} bytes per element" in first and "blocks of 256" in first
    assert "8.000 bytes per element" in second
    assert "*.mlp.dense_h_to_4h.weight x 4" in table and WORD_EMBEDDING in table


def spoil_a_moment(row, name, rank):
    """Stores a group's moments on one rank with a number of bits that the rule does not allow. Returns the
    error."""
    engine = build_engine(config_of(row, **EIGHT_BIT))
    train(engine, [0])
    optimizer = engine.optimizer
    if engine.mesh.rank == rank:
        for flat in optimizer.flat:
            if any(optimizer.names[parameter] == name for parameter in flat.parameters):
                state = optimizer.optimizer.state[flat.master]
                state["exp_avg"] = torch.zeros(flat.master.numel())
    try:
        describe_moments(optimizer)
    except RunStopped as error:
        return str(error)
    return None


def test_moments_of_another_kind_stop_the_run_by_name():
    name = "3.self_attention.query_key_value.weight"
    sentences = run_world(2, spoil_a_moment, Row(pp=2, micro_batch=4), name, 0)
    assert len(set(sentences)) == 1
    assert f"the moments of {name} have 8 and 32 bits per element" in sentences[0]
    assert run_world(1, spoil_a_moment, Row(), name, None) == [None]


def layout_of_blocks(row):
    engine = build_engine(config_of(row, **EIGHT_BIT))
    train(engine, [0])
    optimizer = engine.optimizer
    for flat in optimizer.flat:
        bits = {moment_bits(optimizer.names[p], spec_of(p)) for p in flat.parameters}
        assert bits == {flat.moment_bits}
        assert all(
            isinstance(moment, QuantizedMoment) == flat.quantized
            for moment in optimizer.moments_of(flat).values()
        )
        if flat.quantized:
            assert flat.size % BLOCK_SIZE == 0
            assert all(offset % BLOCK_SIZE == 0 for offset in flat.offsets.values())
            gaps = sum(-parameter.numel() % BLOCK_SIZE for parameter in flat.parameters)
            assert sum(p.numel() for p in flat.parameters) + gaps <= flat.weights.numel()
            return gaps
    return None


def test_a_block_holds_elements_of_one_parameter():
    assert run_world(1, layout_of_blocks, Row(micro_batch=4)) == [0]
    gaps = run_world(4, layout_of_blocks, Row(tp=2, dp=2, zero=1, micro_batch=4))
    # The shards of two MLP matrices of each layer end in the middle of a block.
    assert gaps == [4 * 2 * BLOCK_SIZE // 2] * 4
