"""Compares Muon with torch.optim.Muon, and tests how a fused weight is split into matrices."""

import pytest
import torch
from torch import nn

from megatron.config import OptimizerConfig
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.optimizer.matrix_optimizer import SCALE_MODES, MatrixOptimizer, MatrixUpdate, newton_schulz
from megatron.optimizer.parameter_groups import make_optimizer, parameter_groups

SHAPES = {"square": (48, 48), "wide": (16, 80), "tall": (96, 32)}
TORCH = {
    "original": {"muon_scale_mode": "shape_scaling"},
    "match_rms_adamw": {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2},
}


def values(name: str, step: int = 0) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(17 * step + len(name)))


@pytest.mark.parametrize("adjust, flags", TORCH.items())
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_torch_optim_muon(adjust, flags, nesterov):
    ours, theirs = ({name: nn.Parameter(values(name)) for name in SHAPES} for _ in range(2))
    for name, parameter in ours.items():
        parameter.spec = ParameterSpec(SHAPES[name], matrix_rows=SHAPES[name][:1])
    config = OptimizerConfig(
        optimizer="muon", muon_momentum=0.9, muon_use_nesterov=nesterov, muon_matmul_dtype="bf16", **flags
    )
    optimizer = make_optimizer(parameter_groups(ours.items(), 0.1, matrices=True), config)
    assert isinstance(optimizer, MatrixOptimizer)
    assert optimizer.param_groups[0]["names"] == list(SHAPES) and optimizer.param_groups[0]["matrices"]
    optimizer.param_groups[0]["lr"] = 0.02
    expected = torch.optim.Muon(
        theirs.values(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    for step in range(1, 6):
        for name in SHAPES:
            ours[name].grad, theirs[name].grad = values(name, step), values(name, step)
        optimizer.update_momentum()
        for name in SHAPES:
            ours[name].grad = optimizer.matrix_update.apply(ours[name].grad, SHAPES[name][:1])
        optimizer.step()
        expected.step()
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-7, atol=1e-7)
        moment = expected.state[theirs[name]]["momentum_buffer"]
        assert torch.equal(optimizer.state[ours[name]]["momentum_buffer"], moment)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_the_singular_values_near_1(shape):
    found = torch.linalg.svdvals(newton_schulz(values(shape), 5, torch.float32))
    assert 0.5 < found.min() and found.max() < 1.3


def test_scales_of_the_modes():
    assert {mode: scale(32, 8) for mode, scale in SCALE_MODES.items()} == {
        "spectral": 32**0.5,
        "unit_rms_norm": 2.0,
        "shape_scaling": 2.0,
    }
    assert SCALE_MODES["shape_scaling"](8, 32) == 1.0 and SCALE_MODES["unit_rms_norm"](8, 32) == 0.5


def test_fused_matrices_are_updated_one_by_one():
    """The weight has 2 groups, each with 2 query heads, a key head and a value head. A head has 3 rows."""
    weight = torch.randn(2 * 4 * 3, 5, generator=torch.Generator().manual_seed(1))
    heads = weight.view(2, 4, 3, 5)
    query, key, value = heads[:, :2].reshape(-1, 5), heads[:, 2].reshape(-1, 5), heads[:, 3].reshape(-1, 5)
    seen = []

    def negated(matrix: torch.Tensor) -> torch.Tensor:
        seen.append(matrix.clone())
        return -matrix

    rule = MatrixUpdate(negated, torch.float32, lambda rows, columns: float(rows))
    update = rule.apply(weight, (6, 3, 3))
    scales = torch.tensor([12.0, 12.0, 6.0, 6.0]).view(1, 4, 1, 1)
    assert torch.equal(update.view(heads.shape), -heads * scales)
    assert all(torch.equal(a, b) for a, b in zip(seen, (query, key, value), strict=True))
