"""--recompute-modules layernorm mlp_act moe_act: no bit of a run changes, and the layers keep fewer bytes."""

import time
from dataclasses import replace

import pytest
import torch

from megatron.mpu.recompute import recomputed
from tests.distributed.parity import DUALPIPEV, SEQUENCE_PARALLEL, ZERO_BUBBLE
from tests.distributed.test_experts import GLM, GPT_OF_EXPERTS, MIXTRAL
from tests.distributed.test_model_variants import FALCON, GEMMA3, LLAMA, NEOX, OLMO2
from tests.distributed.test_tp_overlap import OVERLAP
from tests.support.layouts import DROPOUT, SEQ, Row, build_engine, build_model, config_of, train, weights_of
from tests.support.pool import run_world
from tests.support.tracked_memory import TrackedMemory

DENSE = ("layernorm", "mlp_act")
EXPERTS = (*DENSE, "moe_act")
POST_NORM_RESIDUAL = {"apply_residual_connection_post_layernorm": True}
EP_2 = {"parallel": {"expert_model_parallel_size": 2}}
STEPS = 3

# Name -> (row, changes of its configuration, modules). The order matters: the gate runs evenly spaced rows.
ROWS = {
    "gpt, dropout": (Row(micro_batch=2), {"model": DROPOUT}, ("core_attn", *DENSE)),
    "norms only, bf16": (Row(micro_batch=2, precision="bf16"), {}, ("layernorm",)),
    "activation only": (Row(micro_batch=2), {"model": {"glu_activation": "reglu"}}, ("mlp_act",)),
    "residual after the norm": (Row(precision="bf16"), {"model": POST_NORM_RESIDUAL}, DENSE),
    "fp32 residual": (Row(precision="bf16"), {"precision": {"fp32_residual_connection": True}}, DENSE),
    "gemma 3, zero-centered norms, bf16": (Row(precision="bf16"), {"model": GEMMA3}, DENSE),
    "olmo 2": (Row(), {"model": OLMO2}, DENSE),
    "parallel layers": (Row(tp=2), {"model": NEOX}, DENSE),
    "parallel layers, one norm": (Row(tp=2, pp=2), {"model": FALCON}, DENSE),
    "sequence parallel": (Row(tp=2), {**SEQUENCE_PARALLEL, "model": LLAMA}, DENSE),
    "chunks, fp16": (Row(tp=2, precision="fp16"), OVERLAP, DENSE),
    "zero-bubble, sequence, dropout": (
        Row(tp=2, pp=2),
        {"model": DROPOUT, "parallel": {**SEQUENCE_PARALLEL["parallel"], **ZERO_BUBBLE["parallel"]}},
        DENSE,
    ),
    "zero-bubble, experts, bf16": (Row(pp=2, precision="bf16"), {"model": MIXTRAL, **ZERO_BUBBLE}, EXPERTS),
    "dualpipev": (Row(pp=2), DUALPIPEV, DENSE),
    "ZeRO-3, bf16": (Row(dp=2, zero=3, precision="bf16"), {"model": LLAMA}, DENSE),
    "context parallel": (Row(cp=2, positions="rotary"), {}, DENSE),
    "experts, shared expert with a gate": (Row(), {"model": GPT_OF_EXPERTS}, EXPERTS),
    "experts, EP 2, bf16": (Row(dp=2, zero=1, precision="bf16"), {"model": GLM, **EP_2}, EXPERTS),
}


def trained(row, changes):
    """Returns (losses and norms, accumulated gradients, weights) of a rank."""
    engine = build_engine(config_of(row, **changes))
    history = train(engine, range(STEPS))
    gradients = [flat.local_gradients.clone() for flat in engine.optimizer.flat]
    return history, gradients, weights_of(engine).shards


def selective(modules):
    return {"training": {"recompute_granularity": "selective", "recompute_modules": modules}}


@pytest.mark.gate(rows=3, also=["zero-bubble, experts, bf16"])
@pytest.mark.parametrize("name", ROWS)
def test_no_bit_changes(name):
    row, changes, modules = ROWS[name]
    expected, found = (
        run_world(row.world_size, trained, row, {**changes, **more}) for more in ({}, selective(modules))
    )
    for (history, gradients, weights), (other_history, other_gradients, other_weights) in zip(
        expected, found, strict=True
    ):
        assert history == other_history
        assert all(map(torch.equal, gradients, other_gradients))
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def kept_bytes(row, changes):
    """Returns (bytes that a layer of this rank keeps for its backward pass, bytes that remain after it)."""
    _, module = build_model(config_of(row, **changes))
    layer = next(iter(module.transformer_layers().values()))
    sharded = row.tp if module.context.sequence_parallel else 1
    dtype = torch.bfloat16 if row.precision == "bf16" else torch.float32
    x = torch.randn(SEQ // sharded, 2, 32, dtype=dtype, requires_grad=True)
    with module.dropout_rng.use_samples(range(2)):
        layer(x).sum().backward()  # makes tables and gradients
        with TrackedMemory() as memory:
            output = layer(x)
            kept = settled(memory)
            output.sum().backward()
            del output
    return kept, settled(memory)


def settled(memory):
    """Returns the bytes that remain when Gloo's threads have freed the tensors of finished collectives."""
    left = memory.live
    for _ in range(5):
        time.sleep(0.05)
        left = min(left, memory.live)
    return left


TOKENS = 2 * SEQ
NORM, ACTIVATION = TOKENS * 32, TOKENS * 128
KEPT = {
    "gpt": (Row(), {}, ("layernorm",), 4 * 2 * NORM),
    "gpt, activation": (Row(), {}, ("mlp_act",), 4 * ACTIVATION),
    "gpt, bf16": (Row(precision="bf16"), {}, DENSE, 2 * (2 * NORM + ACTIVATION)),
    "residual after the norm": (Row(), {"model": POST_NORM_RESIDUAL}, ("layernorm",), 4 * 2 * NORM),
    "one norm": (Row(), {"model": FALCON}, ("layernorm",), 4 * NORM),
    "norms of outputs": (Row(), {"model": OLMO2}, ("layernorm",), 0),
    "shards": (Row(tp=2), SEQUENCE_PARALLEL, DENSE, 4 * (2 * NORM + ACTIVATION) // 2),
    "shards in chunks": (Row(tp=2), OVERLAP, DENSE, 4 * (2 * NORM + ACTIVATION) // 2),
    "experts": (Row(), {"model": MIXTRAL}, ("moe_act",), 4 * 2 * TOKENS * 24),
    "experts, bf16": (
        Row(precision="bf16"),
        # On CPUs the RMS norm of a 16-bit input keeps an fp32 copy instead of its input.
        {"model": {**MIXTRAL, "normalization": "LayerNorm"}},
        ("layernorm", "moe_act"),
        2 * (2 * NORM + 2 * TOKENS * 24),
    ),
    "experts, shared expert": (
        Row(precision="bf16"),
        {"model": {**GPT_OF_EXPERTS, "moe_layer_freq": ("1",)}},
        EXPERTS,
        2 * (2 * NORM + 2 * TOKENS * 24 + TOKENS * 24),
    ),
}


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_fewer_bytes(name):
    row, changes, modules, saved = KEPT[name]
    plain, found = (
        run_world(row.world_size, kept_bytes, row, {**changes, **more}) for more in ({}, selective(modules))
    )
    for (kept, after), (kept_less, after_less) in zip(plain, found, strict=True):
        assert kept - kept_less == saved
        assert after == after_less


def read_three_times(y, w):
    """Computes three products that keep `y` or views of it: [3, 4], [4, 3] and the rows [1:]."""
    return y @ w + (y.view(4, 3) @ w[:3, :3]).view(3, 4) + (y[1:] * w[0]).sum()


def test_one_reader_after_another_gets_one_result_that_is_then_freed():
    calls = []

    def double(x):
        calls.append(1)
        return 2 * x

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    y = double(x)
    with recomputed(double, x, y, enabled=True):
        z = read_three_times(y, w)
    del y
    with TrackedMemory() as memory:
        z.sum().backward()
    assert len(calls) == 2
    assert memory.live == sum(4 * t.grad.numel() for t in (x, w))
    expected = torch.autograd.grad(read_three_times(2 * x, w).sum(), (x, w))
    assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])


def test_an_input_that_was_changed_in_place_is_an_error():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    wide = x * 1
    y = torch.sin(wide)
    with recomputed(torch.sin, wide, y, enabled=True):
        z = y @ w
    with torch.no_grad():
        wide.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_without_gradients_nothing_is_kept():
    row = replace(Row(), micro_batch=2)
    plain, found = (run_world(1, evaluated, row, more)[0] for more in ({}, selective(DENSE)))
    assert plain == found


def evaluated(row, changes):
    engine = build_engine(config_of(row, **changes))
    layer = next(iter(engine.module.transformer_layers().values()))
    with torch.no_grad(), TrackedMemory() as memory:
        output = layer(torch.ones(SEQ, 2, 32)).sum().item()
    return output, memory.peak
