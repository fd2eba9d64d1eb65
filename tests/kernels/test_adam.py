"""Compares the AdamW kernel in Triton's interpreter with torch's fused AdamW."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.optimizer import ADAMW_BLOCK as BLOCK
from megatron.optimizer import adam
from megatron.optimizer.adam import AdamW

LENGTH = BLOCK + 48
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FACTOR = 1.0 / (1024 * 8)


def gradients(steps, length=LENGTH):
    """Yields gradients of very different sizes, some zero, as for an embedding's rare tokens."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** (torch.arange(length) % 9 - 6) * (torch.arange(length) % 5 > 0)
    return [torch.randn(length, generator=generator) * sizes / FACTOR for _ in range(steps)]


def weights(length=LENGTH):
    return torch.nn.Parameter(torch.randn(length, generator=torch.Generator().manual_seed(2)))


def update(optimizer, parameter, gradient, rounded, in_kernel):
    (group,) = optimizer.param_groups
    if in_kernel:
        assert optimizer.update_in_one_pass(group, parameter, gradient, FACTOR, rounded)
        return
    parameter.grad = gradient * FACTOR
    optimizer.step()
    if rounded is not None:
        rounded.copy_(parameter.detach())


def trained(in_kernels, dtype=torch.bfloat16, **settings):
    """Returns weights, moments, step and rounded weights after steps that the kernel or torch takes."""
    parameter = weights()
    rounded = None if dtype is None else torch.full((LENGTH,), torch.nan, dtype=dtype)
    optimizer = AdamW([parameter], lr=1e-2, fused=True, **{**SETTINGS, **settings})
    for index, (gradient, in_kernel) in enumerate(zip(gradients(len(in_kernels)), in_kernels, strict=True)):
        optimizer.param_groups[0]["lr"] = 1e-2 / (index + 1)
        update(optimizer, parameter, gradient, rounded, in_kernel)
    state = optimizer.state[parameter]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"], float(state["step"]), rounded


def assert_equal_to_rounding(found, expected):
    """Compares to rounding. A sum of gradients that cancel each other is rounded relative to the
    gradients."""
    largest = FACTOR * torch.stack(gradients(6)).abs().amax(0)
    for own, torchs, scale in zip(found[:3], expected[:3], (1.0, largest, 0.0), strict=True):
        assert ((own - torchs).abs() <= 2e-6 * torchs.abs() + 2e-7 * scale).all()
    assert found[3] == expected[3]


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.0}, {"betas": (0.0, 0.999), "eps": 1e-15}, {"betas": (0.95, 0.0)}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_a_step_is_that_of_torch_to_the_rounding_of_fp32(monkeypatch, dtype, settings):
    monkeypatch.setattr(adam, "uses_kernels", lambda _: True)
    expected, found = (trained([in_kernel] * 5, dtype, **settings) for in_kernel in (False, True))
    assert_equal_to_rounding(found, expected)
    if dtype is not None:
        assert torch.equal(found[4], found[0].to(dtype))


def test_a_run_may_change_between_kernel_and_torch(monkeypatch):
    """A run with torch's AdamW resumes from a checkpoint of a run with the kernel, and a run with the kernel
    from a checkpoint of torch's AdamW."""
    monkeypatch.setattr(adam, "uses_kernels", lambda _: True)
    expected = trained([False] * 6)
    for order in ([True, True, False, False, True, False], [False, True, True, True, False, True]):
        assert_equal_to_rounding(trained(order), expected)


def test_an_element_does_not_depend_on_its_place(monkeypatch):
    """Replicas of a tied weight are at different offsets of their buffers, and must stay equal to the last
    bit."""
    monkeypatch.setattr(adam, "uses_kernels", lambda _: True)
    values, steps = weights().detach(), gradients(4)

    def stepped(before, after):
        place = slice(before, before + LENGTH)
        parameter = torch.nn.Parameter(torch.zeros(before + LENGTH + after))
        parameter.data[place] = values
        rounded = torch.zeros(len(parameter), dtype=torch.bfloat16)
        optimizer = AdamW([parameter], lr=1e-2, fused=True, **SETTINGS)
        for step in steps:
            gradient = torch.zeros(len(parameter))
            gradient[place] = step
            update(optimizer, parameter, gradient, rounded, True)
        state = optimizer.state[parameter]
        every = parameter.detach(), rounded, state["exp_avg"], state["exp_avg_sq"]
        for tensor in every:
            assert not tensor[:before].any() and not tensor[before + LENGTH :].any()
        return [tensor[place] for tensor in every]

    alone = stepped(0, 0)
    for before, after in ((16, 0), (3, 5), (BLOCK, 64), (BLOCK - 7, 1)):
        assert all(map(torch.equal, stepped(before, after), alone))


def test_torch_updates_where_kernels_do_not_run(monkeypatch):
    monkeypatch.setattr(adam, "uses_kernels", lambda _: False)
    parameter = weights()
    optimizer = AdamW([parameter], lr=1e-2)
    group, gradient = optimizer.param_groups[0], gradients(1)[0]
    assert not optimizer.update_in_one_pass(group, parameter, gradient, FACTOR, None)
    assert torch.equal(parameter.detach(), weights().detach()) and not optimizer.state
