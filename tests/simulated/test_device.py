"""What the simulated device counts, and what it rejects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.simulated.in_simulator import run_all, simulated_device


def matrix_product():
    """Runs a GEMM of [8, 16] and [16, 32] in bf16, forward and backward."""
    with simulated_device() as sim:
        a = torch.empty(8, 16, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        b = torch.empty(16, 32, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        c = a @ b
        forward = sim.trace.outside.operations["mm"]
        c.backward(torch.empty_like(c))
        return forward, sim.trace.outside.operations["mm"]


def test_flops_and_bytes_of_matrix_products(results):
    forward, both = results["matrix_product"]
    a, b, c = 8 * 16 * 2, 16 * 32 * 2, 8 * 32 * 2
    assert (forward.calls, forward.flops) == (1, 2 * 8 * 16 * 32)
    assert (forward.bytes_read, forward.bytes_written) == (a + b, c)
    assert (both.calls, both.flops) == (3, 3 * forward.flops)
    assert (both.bytes_read, both.bytes_written) == (2 * (a + b + c), a + b + c)


def views_and_in_place():
    with simulated_device() as sim:
        x = torch.empty(4, 256, device=sim.device)
        x.view(-1)[:512].t()
        launched = sim.trace.outside.launched
        x.add_(1.0)
        return launched, sim.trace.outside.operations["add_"]


def test_views_launch_nothing_and_in_place_operations_read_and_write(results):
    launched, add = results["views_and_in_place"]
    assert launched == 0
    assert (add.calls, add.bytes_read, add.bytes_written) == (1, 4096, 4096)


def lifetimes():
    """Allocated bytes while tensors are made, viewed, saved for the backward pass and freed."""
    with simulated_device() as sim:
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
        return seen, sim.memory.peak


def test_memory_is_counted_until_the_last_owner_is_gone(results):
    seen, peak = results["lifetimes"]
    rounded = 4096  # 4000 bytes, in units of 512
    assert seen == [0, rounded, 2 * rounded, 2 * rounded + 512, 2 * rounded]  # in the end x and its gradient
    assert peak > 2 * rounded


def two_devices():
    with simulated_device() as sim:
        x = torch.empty(4, device=sim.device)
        try:
            x + torch.ones(4)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_tensors_on_two_devices_do_not_meet(results):
    assert "cpu" in results["two_devices"] and "sim:0" in results["two_devices"]


def waits():
    """Causes of host synchronizations."""
    with simulated_device() as sim:
        x = torch.ones(8, device=sim.device)
        host = torch.ones(8)
        causes = {}

        def causes_of(name, function):
            before = len(sim.trace.outside.syncs)
            function()
            causes[name] = [sync.cause for sync in sim.trace.outside.syncs[before:]]

        causes_of("float", lambda: float(x.sum()))
        causes_of("if", lambda: bool((x > 0).all()))
        causes_of("to cpu", lambda: x.cpu())
        causes_of("from pageable", lambda: host.to(sim.device, non_blocking=True))
        causes_of("from pinned", lambda: sim.pin(host).to(sim.device, non_blocking=True))
        causes_of("from pinned, blocking", lambda: sim.pin(host).to(sim.device))
        causes_of("copy_", lambda: x.copy_(host))
        pinned, half = sim.pin(host), torch.ones(8, dtype=torch.bfloat16, device=sim.device)
        causes_of("copy_ from pinned", lambda: x.copy_(pinned, non_blocking=True))
        causes_of("copy_ from pinned, converted", lambda: half.copy_(pinned, non_blocking=True))
        causes_of("copy_ to pinned", lambda: pinned.copy_(x, non_blocking=True))
        causes_of("copy_ to pinned, converted", lambda: pinned.copy_(half, non_blocking=True))
        causes_of("copy_ to pageable", lambda: host.copy_(x, non_blocking=True))
        causes_of("scalar", lambda: x.add_(1.0).mul_(2))
        causes_of("full", lambda: torch.full((1,), 3, device=sim.device))
        return causes


def test_every_wait_of_the_host_is_found(results):
    assert results["waits"] == {
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


def small_integers():
    with simulated_device() as sim:
        table = torch.arange(6, device=sim.device).view(2, 3)
        table[1] += 10
        part = table[1, 1:].clone()
        unknown = torch.empty(2, device=sim.device).long()
        part_before = part.tolist()
        part.add_(unknown)
        return table.tolist(), part_before, sim.value_of(part) is not None


def test_small_integer_tensors_keep_true_values(results):
    assert results["small_integers"] == ([[0, 1, 2], [13, 14, 15]], [14, 15], False)


def large_host_tensors():
    """A module of 4 GB is made and moved without memory."""
    with simulated_device() as sim:
        module = nn.Linear(2**15, 2**15, bias=False, device="cpu")
        on_host = sim.host_memory.total
        module.to(sim.device)
        del module.weight.grad
        return on_host, sim.memory.total


def test_large_host_tensors_take_no_memory(results):
    on_host, on_device = results["large_host_tensors"]
    assert on_host == on_device == 4 * 2**30


FUNCTIONS = (
    matrix_product,
    views_and_in_place,
    lifetimes,
    two_devices,
    waits,
    small_integers,
    large_host_tensors,
)


@pytest.fixture(scope="module")
def results():
    return dict(zip([f.__name__ for f in FUNCTIONS], run_all(FUNCTIONS), strict=True))
