"""Tests which parameters have weight decay, and which optimizer updates them."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron.config import ConfigError, OptimizerConfig
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.optimizer.parameter_groups import make_optimizer, parameter_groups
from megatron.optimizer.quantized import kernels


def parameter(*shape, weight_decay=True, lr_mult=1.0):
    made = nn.Parameter(torch.ones(shape))
    made.spec = ParameterSpec(global_shape=shape, weight_decay=weight_decay, lr_mult=lr_mult)
    return made


def named():
    return [
        ("embedding.weight", parameter(8, 4)),
        ("norm.weight", parameter(4, weight_decay=False)),
        ("dense.weight", parameter(4, 4)),
        ("dense.bias", parameter(4, weight_decay=False)),
    ]


def test_matrices_decay_and_biases_and_norms_do_not():
    decayed, plain = parameter_groups(named(), 0.1)
    assert (decayed["names"], decayed["weight_decay"]) == (["embedding.weight", "dense.weight"], 0.1)
    assert (plain["names"], plain["weight_decay"]) == (["norm.weight", "dense.bias"], 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(8, 4), (4, 4)]


def test_parameters_with_an_lr_mult_have_groups_of_their_own():
    slow = ("slow.weight", parameter(4, 4, lr_mult=0.25))
    groups = parameter_groups([*named(), slow], 0.1, lr_mult=0.25)
    assert [(g["names"], g["lr_mult"], g["weight_decay"]) for g in groups if g["names"]] == [
        (["slow.weight"], 0.25, 0.4),
        (["embedding.weight", "dense.weight"], 1.0, 0.1),
        (["norm.weight", "dense.bias"], 1.0, 0.0),
    ]


def test_units_have_groups_of_their_own_after_the_others():
    parameters = [(f"{unit}.{name}", made) for unit in ("3", "30") for name, made in named()]
    groups = parameter_groups(parameters, 0.1, units={"3": "three"})
    assert [group.get("unit") for group in groups] == [None, None, "three", "three"]
    assert groups[0]["names"] == ["30.embedding.weight", "30.dense.weight"]
    assert groups[3]["names"] == ["3.norm.weight", "3.dense.bias"] and groups[3]["weight_decay"] == 0.0


def test_a_unit_of_several_layers_and_a_tied_parameter_have_groups_of_their_own():
    parameters = [(f"{layer}.{name}", made) for layer in ("3", "4", "5") for name, made in named()]
    tied = parameters[-4][1]
    groups = parameter_groups(parameters, 0.1, units={"3": "first", "4": "first"}, tied=[tied])
    assert [group.get("unit") for group in groups] == [None] * 4 + ["first"] * 2
    assert groups[2]["params"] == [tied] and not groups[3]["params"]
    names = [f"{layer}.{name}" for layer in ("3", "4") for name in ("embedding.weight", "dense.weight")]
    assert groups[4]["names"] == names


def test_tied_and_frozen_parameters():
    parameters = named()
    parameters[2][1].requires_grad_(False)
    decayed, _ = parameter_groups([*parameters, ("head.weight", parameters[0][1])], 0.1)
    assert decayed["names"] == ["embedding.weight"]


def named_for_8_bits():
    word_embedding = "tied_modules.embed.word_embeddings.weight"
    return [
        (word_embedding, parameter(512, 64)),
        ("3.norm.weight", parameter(8192, weight_decay=False)),
        ("3.large.weight", parameter(64, 64)),
        ("3.small.weight", parameter(64, 63)),
    ]


def test_with_8_bits_large_matrices_are_a_group_before_the_others():
    quantized, decayed, plain = parameter_groups(named_for_8_bits(), 0.1, eight_bit=True)
    assert quantized["names"] == ["3.large.weight"]
    assert decayed["names"] == ["tied_modules.embed.word_embeddings.weight", "3.small.weight"]
    assert plain["names"] == ["3.norm.weight"]
    assert [g["moment_bits"] for g in (quantized, decayed, plain)] == [8, 32, 32]
    assert [g["weight_decay"] for g in (quantized, decayed, plain)] == [0.1, 0.1, 0.0]


def test_bits_depend_on_the_size_of_the_full_parameter_not_of_the_shard():
    made = nn.Parameter(torch.ones(16, 64))
    made.spec = ParameterSpec(global_shape=(64, 64), sharding=(Shard(0),))
    quantized, *_ = parameter_groups([("3.dense.weight", made)], 0.1, eight_bit=True)
    assert quantized["names"] == ["3.dense.weight"]


def test_without_8_bits_the_groups_are_the_two():
    groups = parameter_groups(named_for_8_bits(), 0.1)
    assert len(groups) == 2 and "moment_bits" not in groups[0]


def test_a_parameter_without_a_spec_is_an_error():
    with pytest.raises(ValueError, match="ParameterSpec"):
        parameter_groups([("stray", nn.Parameter(torch.ones(2)))], 0.1)


def adamw_step(weight, gradient, rate, decay, betas=(0.9, 0.95), eps=1e-8):
    """Returns the result of the first step of Adam with decoupled weight decay, computed from the formula."""
    first = (1 - betas[0]) * gradient / (1 - betas[0])
    second = (1 - betas[1]) * gradient**2 / (1 - betas[1])
    return weight * (1 - rate * decay) - rate * first / (second.sqrt() + eps)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_decays_apart_from_its_moments(name):
    groups = parameter_groups(named(), 0.1)
    optimizer = make_optimizer(groups, OptimizerConfig(optimizer=name, adam_beta2=0.95))
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
        for weight in group["params"]:
            weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        for weight in group["params"]:
            ones = torch.ones_like(weight)
            torch.testing.assert_close(weight.data, adamw_step(ones, 0.5 * ones, 0.01, decay))


def test_extra_keys_survive_and_the_rate_starts_at_zero():
    groups = parameter_groups(named(), 0.1)
    optimizer = make_optimizer(groups, OptimizerConfig())
    assert [group["names"] for group in optimizer.param_groups] == [group["names"] for group in groups]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert "lr" not in groups[0]


def test_a_stage_with_only_the_embedding_has_both_groups_and_takes_steps():
    optimizer = make_optimizer(parameter_groups(named()[:1], 0.1), OptimizerConfig())
    decayed, plain = optimizer.param_groups
    assert (decayed["names"], plain["names"], plain["params"]) == (["embedding.weight"], [], [])
    (weight,) = decayed["params"]
    weight.grad = torch.ones_like(weight)
    decayed["lr"] = 0.1
    optimizer.step()
    assert float(weight.data.max()) < 1


def test_sgd_has_momentum_and_decay():
    optimizer = make_optimizer(
        parameter_groups(named(), 0.1), OptimizerConfig(optimizer="sgd", sgd_momentum=0.8)
    )
    assert isinstance(optimizer, torch.optim.SGD)
    weight = optimizer.param_groups[0]["params"][0]
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for expected in (1 - 0.5 * 1.1, None):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if expected is not None:
            assert float(weight.data[0, 0]) == pytest.approx(expected)
    buffer = 0.8 * 1.1 + 1 + 0.1 * 0.45
    assert float(weight.data[0, 0]) == pytest.approx(0.45 - 0.5 * buffer)


def test_lion_moves_by_the_sign_of_its_momentum():
    config = OptimizerConfig(optimizer="lion", lion_beta1=0.75, lion_beta2=0.5)
    optimizer = make_optimizer(parameter_groups(named(), 0.1), config)
    weight = optimizer.param_groups[0]["params"][0]
    expected, momentum = 1.0, 0.0
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for gradient in (1.0, -0.5, -4.0):
        # Signs of the momentum in the update: +, +, -.
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        expected = expected * (1 - 0.5 * 0.1) - math.copysign(0.5, 0.75 * momentum + 0.25 * gradient)
        momentum = 0.5 * momentum + 0.5 * gradient
    assert float(weight.data[0, 0]) == pytest.approx(expected)
    assert float(optimizer.state[weight]["exp_avg"][0, 0]) == pytest.approx(momentum)


def fake_apex(monkeypatch, fused_adam):
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    if fused_adam is not None:
        optimizers.FusedAdam = fused_adam
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)


def test_apex_is_asked_for_decoupled_decay(monkeypatch):
    class FusedAdam(torch.optim.AdamW):
        def __init__(self, groups, adam_w_mode, **settings):
            assert adam_w_mode
            super().__init__(groups, **settings)

    fake_apex(monkeypatch, FusedAdam)
    optimizer = make_optimizer(parameter_groups(named(), 0.1), OptimizerConfig(use_apex=True))
    assert isinstance(optimizer, FusedAdam)
    assert optimizer.param_groups[0]["names"] == ["embedding.weight", "dense.weight"]


def unbuilt(groups, **settings):
    raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")


@pytest.mark.parametrize(("fused_adam", "words"), [(None, "NVIDIA"), (unbuilt, "cuda extensions")])
def test_another_package_named_apex_and_one_without_extensions_are_refused(monkeypatch, fused_adam, words):
    fake_apex(monkeypatch, fused_adam)
    with pytest.raises(ConfigError, match=f"--use-apex.*{words}"):
        make_optimizer(parameter_groups(named(), 0.1), OptimizerConfig(use_apex=True))


def test_8_bit_adam_without_bitsandbytes_says_how_to_install_it(monkeypatch):
    kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    groups = parameter_groups(named(), 0.1, eight_bit=True)
    with pytest.raises(ConfigError, match="--use-bnb-optimizer.*pip install bitsandbytes"):
        make_optimizer(groups, OptimizerConfig(use_bnb_optimizer=True))
