"""Tests each patch of PyTorch that the simulation makes: what fails without it, and what it does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.simulated.in_simulator import run_all, simulated_device


def outcome(function, patched):
    """Returns the function's result for a simulated device, or the name of its error."""
    with simulated_device(patched) as device:
        try:
            return function(device)
        except Exception as error:
            return type(error).__name__


def tensor_of_list(device):
    made = torch.tensor([3, 4], device=device.device)
    return made.tolist(), [sync.cause for sync in device.trace.outside.syncs]


def module_to_device(device):
    module = nn.Linear(2, 3, bias=False)
    weight = module.weight
    weight.spec = "spec"
    module.to(device.device)
    return (
        module.weight is weight,
        getattr(module.weight, "spec", None),
        str(weight.device),
        weight.requires_grad,
    )


def resized_storage(device):
    flat = torch.empty(1024, dtype=torch.float32, device=device.device)
    sizes = [device.memory.total]
    for size in (0, 4096):
        flat.untyped_storage().resize_(size)
        sizes.append(device.memory.total)
    return sizes


def attention_kernels(device):
    query = torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device=device.device)
    bias = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device=device.device)
    F.scaled_dot_product_attention(query, query, query, is_causal=True)
    F.scaled_dot_product_attention(query, query, query, bias)
    wide = torch.empty(2, 4, 64, 192, dtype=torch.bfloat16, device=device.device)
    F.scaled_dot_product_attention(wide, wide, wide, is_causal=True)
    return [name for name in device.trace.outside.operations if "attention" in name]


def rms_norm_memory(device):
    """Returns the bytes that a norm of 16 rows of 1024 bytes keeps in addition to its input and weight."""
    values = torch.empty(16, 512, dtype=torch.bfloat16, device=device.device, requires_grad=True)
    weight = torch.empty(512, dtype=torch.bfloat16, device=device.device, requires_grad=True)
    before = device.memory.total
    result = F.rms_norm(values, (512,), weight, 1e-5)
    kept = device.memory.total - before
    result.backward(torch.empty_like(result))
    return kept, values.grad.dtype, weight.grad.shape


def silu_operations(device):
    values = torch.empty(16, 512, dtype=torch.bfloat16, device=device.device, requires_grad=True)
    F.silu(values).backward(values.detach())
    return list(device.trace.outside.operations)


def list_of_elements(device):
    values = torch.zeros(5, device=device.device).tolist()
    return len(values), [sync.cause for sync in device.trace.outside.syncs]


CASES = {
    "torch.tensor": (tensor_of_list, ([3, 4], ["copy to device", "copy to host"])),
    "Module.to": (module_to_device, (True, "spec", "sim:0", True)),
    "resize_": (resized_storage, [4096, 0, 4096]),
    "attention": (
        attention_kernels,
        [f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "efficient", "flash")],
    ),
    "rms_norm": (rms_norm_memory, (16 * 1024 + 512, torch.bfloat16, torch.Size([512]))),
    "silu": (silu_operations, ["silu", "silu_backward"]),
    "tolist": (list_of_elements, (5, ["copy to host"])),
}


@pytest.fixture(scope="module")
def outcomes():
    """Returns case -> the results without and with the patch."""
    cases = [(name, patched) for name in CASES for patched in (True, False)]
    calls = [partial(outcome, CASES[name][0], patched) for name, patched in cases]
    return dict(zip(cases, run_all(calls), strict=True))


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("name", CASES)
def test_a_patch_makes_the_simulated_device_behave_as_a_real_one(name, outcomes):
    expected = CASES[name][1]
    assert outcomes[name, True] == expected
    assert outcomes[name, False] != expected
