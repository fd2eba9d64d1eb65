"""The simulated device counts launches, bytes, FLOPs and host waits, and rejects what it cannot simulate."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial

import pytest
import torch
from torch import nn

from megatron.mpu.weight_gradient import _supports_fused_accumulation, add_product, fuses_accumulation
from tests.simulated.in_simulator import operation_sums, run_all, simulated_device


def matrix_product(sim):
    """Returns (calls, FLOPs, bytes read, bytes written) of [8, 16] x [16, 32] in bf16: forward, and with
    backward."""
    a = torch.empty(8, 16, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
    b = torch.empty(16, 32, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
    c = a @ b
    forward = sim.trace.outside.operations["mm"]
    c.backward(torch.empty_like(c))
    return astuple(forward), astuple(sim.trace.outside.operations["mm"])


A, B, C, FLOPS = 8 * 16 * 2, 16 * 32 * 2, 8 * 32 * 2, 2 * 8 * 16 * 32


def views_and_in_place(sim):
    """Returns the launches of views, and the counts of an in-place operation, which reads and writes."""
    x = torch.empty(4, 256, device=sim.device)
    x.view(-1)[:512].t()
    launched = sim.trace.outside.launched
    x.add_(1.0)
    add = sim.trace.outside.operations["add_"]
    return launched, add.calls, add.bytes_read, add.bytes_written


def lifetimes(sim):
    """Returns the allocated bytes while tensors are made, viewed, saved for the backward pass and freed."""
    seen = [sim.memory.total]
    x = torch.empty(1000, device=sim.device, requires_grad=True)
    seen.append(sim.memory.total)
    y = x.exp()
    saved_view = y.view(10, 100)
    del y
    seen.append(sim.memory.total)
    total = saved_view.sum()
    del saved_view  # autograd keeps the result of exp
    seen.append(sim.memory.total)
    total.backward()
    del total
    seen.append(sim.memory.total)
    return seen, sim.memory.peak > max(seen)


ROUNDED = 4096  # 4000 bytes, in units of 512


def two_devices(sim):
    try:
        torch.empty(4, device=sim.device) + torch.ones(4)
    except RuntimeError as error:
        return "cpu" in str(error) and "sim:0" in str(error)
    return "no error"


def small_integers(sim):
    table = torch.arange(6, device=sim.device).view(2, 3)
    table[1] += 10
    part = table[1, 1:].clone()
    part_before = part.tolist()
    part.add_(torch.empty(2, device=sim.device).long())
    return table.tolist(), part_before, sim.value_of(part) is not None


def large_host_tensors(sim):
    """Makes and moves a module of 4 GB without memory."""
    module = nn.Linear(2**15, 2**15, bias=False, device="cpu")
    on_host = sim.host_memory.total
    module.to(sim.device)
    del module.weight.grad
    return on_host, sim.memory.total


ROWS, N_OUT, N_IN = 64, 48, 32
GRADIENT_FLOPS, INPUTS, ELEMENTS = 2 * ROWS * N_OUT * N_IN, 2 * ROWS * (N_OUT + N_IN), N_OUT * N_IN


def weight_gradient(sim, accumulate):
    """Computes a weight's gradient: accumulated in the GEMM, or rounded and added separately. Returns the
    counts."""
    made = {"device": sim.device, "dtype": torch.bfloat16}
    grad, x = torch.empty(ROWS, N_OUT, **made), torch.empty(ROWS, N_IN, **made)
    accumulate(torch.empty(N_OUT, N_IN, device=sim.device), grad.t(), x)
    return operation_sums(sim)


def apart(total, a, b):
    total.add_(a.matmul(b))


CASES = {
    "matrix product": (
        matrix_product,
        ((1, FLOPS, A + B, C), (3, 3 * FLOPS, 2 * (A + B + C), A + B + C)),
    ),
    "views": (views_and_in_place, (0, 1, 4096, 4096)),
    # At the end x and its gradient remain.
    "lifetimes": (lifetimes, ([0, ROUNDED, 2 * ROUNDED, 2 * ROUNDED + 512, 2 * ROUNDED], True)),
    "two devices": (two_devices, True),
    "small integers": (small_integers, ([[0, 1, 2], [13, 14, 15]], [14, 15], False)),
    "large host tensors": (large_host_tensors, (4 * 2**30, 4 * 2**30)),
    "accumulated gradient": (
        partial(weight_gradient, accumulate=add_product),
        (1, GRADIENT_FLOPS, INPUTS + 4 * ELEMENTS, 4 * ELEMENTS),
    ),
    "separate gradient": (
        partial(weight_gradient, accumulate=apart),
        (2, GRADIENT_FLOPS, INPUTS + 6 * ELEMENTS, 6 * ELEMENTS),
    ),
    "support of accumulation": (
        lambda sim: _supports_fused_accumulation(sim.device, torch.bfloat16),
        True,
    ),
}
# What the host does -> causes for which it waits.
WAITS = {
    "float": ["item"],
    "if": ["item"],
    "to cpu": ["copy to host"],
    "from pageable": ["copy to device"],
    "from pinned": [],
    "from pinned, blocking": ["copy to device"],
    "copy_": ["copy to device"],
    "copy_ from pinned": [],
    "copy_ from pinned, converted": ["copy to device"],
    "copy_ to pinned": [],
    "copy_ to pinned, converted": ["copy to host"],
    "copy_ to pageable": ["copy to host"],
    "scalar": [],
    "full": [],
}


def waits(sim):
    """Returns the causes of host synchronizations."""
    x, host = torch.ones(8, device=sim.device), torch.ones(8)
    pinned, half = sim.pin(host), torch.ones(8, dtype=torch.bfloat16, device=sim.device)
    functions = {
        "float": lambda: float(x.sum()),
        "if": lambda: bool((x > 0).all()),
        "to cpu": lambda: x.cpu(),
        "from pageable": lambda: host.to(sim.device, non_blocking=True),
        "from pinned": lambda: sim.pin(host).to(sim.device, non_blocking=True),
        "from pinned, blocking": lambda: sim.pin(host).to(sim.device),
        "copy_": lambda: x.copy_(host),
        "copy_ from pinned": lambda: x.copy_(pinned, non_blocking=True),
        "copy_ from pinned, converted": lambda: half.copy_(pinned, non_blocking=True),
        "copy_ to pinned": lambda: pinned.copy_(x, non_blocking=True),
        "copy_ to pinned, converted": lambda: pinned.copy_(half, non_blocking=True),
        "copy_ to pageable": lambda: host.copy_(x, non_blocking=True),
        "scalar": lambda: x.add_(1.0).mul_(2),
        "full": lambda: torch.full((1,), 3, device=sim.device),
    }
    found = {}
    for name, function in functions.items():
        before = len(sim.trace.outside.syncs)
        function()
        found[name] = [sync.cause for sync in sim.trace.outside.syncs[before:]]
    return found


def result(name):
    with simulated_device() as sim:
        return waits(sim) if name == "waits" else CASES[name][0](sim)


@pytest.fixture(scope="module")
def results():
    names = [*CASES, "waits"]
    return dict(zip(names, run_all([partial(result, name) for name in names]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_the_device_counts(name, results):
    assert results[name] == CASES[name][1]


def test_every_wait_of_the_host_is_found(results):
    assert results["waits"] == WAITS


def test_cpus_and_weights_without_a_sum_do_not_accumulate_in_the_product():
    assert not _supports_fused_accumulation(torch.device("cpu"), torch.bfloat16)
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not fuses_accumulation(weight)
    weight.main_grad = torch.zeros(2, 2)
    assert not fuses_accumulation(weight)
