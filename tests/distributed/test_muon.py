"""Muon equals torch.optim.Muon on one process, takes equal steps on every layout, and its checkpoints open on
other layouts."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from tests.distributed.parity import INTERLEAVED, assert_same_numbers
from tests.distributed.resharding import SHAPES, STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.distributed.test_dcp import converted
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import FINGERPRINT, state_after
from tests.support.layouts import (
    FP32_BOUND,
    RATE,
    Row,
    build_engine,
    config_of,
    full_weights,
    relative_errors,
    train,
    unconnected_run,
    weights_of,
)
from tests.support.pool import run_world

STEPS = 4
MUON = {"optimizer": "muon", "muon_use_nesterov": True, "muon_extra_scale_factor": 0.2, "weight_decay": 0.1}
# The model has no biases, because the gradient of a key's bias is only rounding noise, which Adam scales up.
GPT = {"disable_bias_linear": True}
GATE = {**LLAMA, "attention_output_gate": True}
LAYOUTS = {
    "TP 2 x DP 2, ZeRO 1": (Row(tp=2, dp=2, zero=1, micro_batch=2), {}),
    "TP 2 x PP 2 x DP 2": (Row(tp=2, pp=2, dp=2, micro_batch=2), {}),
    "TP 4, ZeRO 1": (Row(tp=4, zero=1, micro_batch=2), {}),
    "PP 2": (Row(pp=2, micro_batch=2), {}),
    "DP 4, ZeRO 0": (Row(dp=4, micro_batch=2), {}),
    "PP 2 x DP 4, ZeRO 1": (Row(pp=2, dp=4, zero=1), {}),
    "DP 4, ZeRO 1, a bucket per layer": (Row(dp=4, zero=1), {"parallel": {"ddp_bucket_size": 1}}),
    "DP 4, ZeRO 2": (Row(dp=4, zero=2), {}),
    "TP 2 x DP 2, ZeRO 3": (Row(tp=2, dp=2, zero=3, micro_batch=2), {}),
    "TP 2 x DP 2, sequence parallel": (Row(tp=2, dp=2), {"parallel": {"sequence_parallel": True}}),
    "PP 2 x DP 2, ZeRO 1, interleaved stages": (Row(pp=2, dp=2, zero=1), INTERLEAVED),
}


def weights_after(row, changes):
    engine = build_engine(config_of(row, **changes))
    train(engine, range(STEPS))
    return weights_of(engine)


def is_muons(name):
    return ".self_attention." in name or ".mlp." in name


def matrices_of(name, weight):
    """Returns the matrices in a weight by the definition of its layer. The model has 4 heads of size 8 in 2
    groups."""
    if name.endswith("query_key_value.weight"):
        heads = weight.view(2, -1, 8, weight.shape[1])
        sizes = (2, 1, 1) if heads.shape[1] == 4 else (2, 2, 1, 1)  # with gates
        return [part.reshape(-1, weight.shape[1]) for part in heads.split(sizes, 1)]
    return list(weight.chunk(2) if name.endswith("dense_h_to_4h.weight") else [weight])


def differences_from_torch(model):
    """Trains on one process. Returns the largest difference of a weight from torch.optim.Muon and AdamW on
    equal gradients, and the number of matrices."""
    optimizer = {**MUON, "muon_scale_mode": "spectral", "muon_matmul_dtype": "bf16", "clip_grad": 0.0}
    engine = build_engine(config_of(Row(), model=model, optimizer=optimizer))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    is_matrix = {name: is_muons(name) for name in weights}
    matrices = {
        name: [matrix.clone() for matrix in matrices_of(name, weight)]
        for name, weight in weights.items()
        if is_matrix[name]
    }
    others = {name: weight for name, weight in weights.items() if not is_matrix[name]}
    settings = {"lr": RATE, "weight_decay": 0.1}
    muon = torch.optim.Muon(
        sum(matrices.values(), []), **settings, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    decayed = [weight for weight in others.values() if weight.dim() > 1]
    plain = [weight for weight in others.values() if weight.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=RATE
    )

    step = type(engine.optimizer).step

    def step_of_both(optimizer):
        for name, parameter in engine.module.named_parameters():
            gradient = parameter.main_grad.clone()
            if is_matrix[name]:
                for matrix, part in zip(matrices[name], matrices_of(name, gradient), strict=True):
                    matrix.grad = part
            else:
                others[name].grad = gradient
        step(optimizer)
        muon.step()
        adam.step()

    with mock.patch.object(type(engine.optimizer), "step", step_of_both):
        train(engine, range(STEPS))
    differences = []
    for name, parameter in engine.module.named_parameters():
        pairs = (
            zip(matrices_of(name, parameter), matrices[name], strict=True)
            if is_matrix[name]
            else [(parameter, others[name])]
        )
        differences += [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    return max(differences), sum(map(len, matrices.values()))


@pytest.mark.parametrize("model", [LLAMA, GATE], ids=["llama", "gate"])
def test_one_process_equals_torch_optim_muon_and_adamw(model):
    ((difference, matrices),) = run_world(1, differences_from_torch, model)
    assert matrices == 4 * (3 + (model is GATE) + 1 + 2 + 1)
    assert difference <= 1e-7


_expected = {}


def expected_weights(changes):
    key = str(changes)
    if key not in _expected:
        _expected[key] = full_weights(run_world(1, weights_after, Row(), changes))
    return _expected[key]


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("model", [LLAMA, GPT, GATE], ids=["llama", "gpt", "gate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_weights_of_one_process(layout, model):
    row, others = LAYOUTS[layout]
    changes = {"model": model, "optimizer": MUON}
    found = full_weights(run_world(row.world_size, weights_after, row, {**changes, **others}))
    for name, weight in expected_weights(changes).items():
        # Adam scales up rounding errors of small gradients, also without Muon.
        bound = 1e-7 if is_muons(name) else 5e-6
        torch.testing.assert_close(found[name], weight, rtol=0, atol=bound, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(layout):
    row, others = LAYOUTS[layout]
    assert_same_numbers(row, numbers={"model": LLAMA, "optimizer": MUON}, layout=others)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("row", [Row(), Row(tp=2, dp=2, zero=1, micro_batch=2), Row(dp=4)], ids=str)
def test_16_bit_runs_follow_the_fp32_run(row, precision):
    """The Newton-Schulz iterations run in bf16, whose rounding depends on the gradients. So losses are
    compared within a bound."""
    assert_same_numbers(replace(row, precision=precision), numbers={"model": LLAMA, "optimizer": MUON})


@pytest.mark.parametrize("shape", ["1 process", pytest.param("tp4 dp2", marks=pytest.mark.full)])
def test_a_checkpoint_opens_on_another_layout_in_every_format(shape, tmp_path):
    """Each load compares the digests of all weights and moments, and the canary loss (the loss of one fixed
    random sequence)."""
    changes = {"model": LLAMA, "optimizer": {**MUON, "clip_grad": 1.0}}
    save, load = SHAPES["tp2 pp2 dp2"], SHAPES[shape]
    run_world(save.world_size, save_before, save, tmp_path / "native", changes)
    native = tmp_path / "native" / f"global_step{STEPS_BEFORE}"
    dcp = converted(native, tmp_path / "dcp", "dcp")
    returned = converted(dcp, tmp_path / "returned", "native")
    universal = converted(native, tmp_path / f"global_step{STEPS_BEFORE}_universal", "universal")
    sources = {native: {}, dcp: {}, returned: {}, universal: {"checkpoint": {"universal_checkpoint": True}}}
    expected = uninterrupted(changes)
    for source, flags in sources.items():
        reader = open_reader(open_checkpoint(source))
        for name in reader.stored_names:  # only Adam counts its updates
            assert bool(reader.optimizer_scalars(name)) == ("exp_avg_sq" in reader.state_names(name))
        for state, history in run_world(load.world_size, resume_midway, load, source, {**changes, **flags}):
            assert state == state_after(STEPS_BEFORE)
            assert max(relative_errors(history, expected)) <= FP32_BOUND


def checks_of_a_load(row, folder, changes):
    config = config_of(row, **changes, checkpoint={"load": str(folder)})
    engine = build_engine(config)
    checks = load_checkpoint(engine, find_checkpoint(unconnected_run(config)), FINGERPRINT)
    return [check.result for check in checks if check.subject.startswith("moments")], train(engine, [0])


@pytest.mark.parametrize("before, after", [("adam", "muon"), ("muon", "adam")])
def test_a_run_may_change_to_muon_and_back(before, after, tmp_path):
    changes = [{"optimizer": {"optimizer": name}} for name in (before, after)]
    run_world(1, save_before, Row(), tmp_path, changes[0])
    ((results, history),) = run_world(1, checks_of_a_load, Row(), tmp_path, changes[1])
    moments = {"adam": "exp_avg, exp_avg_sq", "muon": "exp_avg, exp_avg_sq, momentum_buffer"}
    assert set(results) == {
        f"not loaded: --optimizer {after} has the moments {moments[after]} and the checkpoint has "
        f"{moments[before]}; all moments start at 0"
    }
    assert history
