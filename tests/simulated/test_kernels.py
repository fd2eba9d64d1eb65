"""What the kernels' launches and bytes are on the simulated device, beside those of their twins."""

from __future__ import annotations

import torch

from megatron.kernels.dropout import fused_dropout_add, shard_offsets
from megatron.kernels.norms import CHUNK, fused_norms
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG, dropout_add
from megatron.optimizer.gradient_norm import accurate_norm
from tests.simulated.in_simulator import run_all, simulated_device

# Of the 13B model: [seq, batch, hidden], bf16.
SHAPE = (2048, 1, 5120)
ELEMENTS = 2048 * 5120


def counted(function):
    """(launches, bytes) of a function on the simulated device."""
    operations = function().trace.outside.operations.values()
    return (
        sum(count.calls for count in operations),
        sum(count.bytes_read + count.bytes_written for count in operations),
    )


def _inputs(device):
    make = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    return torch.empty(SHAPE, **make), torch.empty(SHAPE, **make)


def twin_forward():
    with simulated_device() as sim:
        x, residual = _inputs(sim.device)
        dropout_add(x, residual, 0.1, DropoutRNG(1, [5]), "a", batch_dim=1, tp_group=TPGroup())
        return sim


def kernel_forward():
    return kernel(backward=False)


def kernel_both():
    return kernel(backward=True)


def kernel(backward):
    with simulated_device() as sim:
        x, residual = _inputs(sim.device)
        offsets = shard_offsets(x.shape, 1, None, 0, 1)
        keys = torch.empty(1, dtype=torch.int64, device=sim.device)
        output = fused_dropout_add(x, None, residual, keys, 0.1, offsets)
        kept = sim.memory.total
        if backward:
            # Not `backward`, which would copy the gradient of the residual into `residual.grad`.
            gradients = torch.autograd.grad(output, (x, residual), torch.empty_like(output))
            assert [gradient.shape for gradient in gradients] == [x.shape, x.shape]
        assert kept <= 3 * 2 * ELEMENTS + 1024  # inputs and output: no mask is kept
        return sim


def _gradients(device):
    return torch.empty(10 * CHUNK, device=device).split([3, CHUNK, 9 * CHUNK - 3])


def norms_of_twin():
    with simulated_device() as sim:
        torch.stack([accurate_norm(gradient) for gradient in _gradients(sim.device)])
        return sim


def norms_of_kernels():
    with simulated_device() as sim:
        assert fused_norms(_gradients(sim.device)).shape == (3,)
        return sim


CASES = (twin_forward, kernel_forward, kernel_both, norms_of_twin, norms_of_kernels)


def test_a_fused_call_is_one_launch_with_its_bytes():
    """Dropout of the 13B model: 2 + 2 + 2 bytes per element forward, 2 + 2 backward; norms: two launches."""
    results = dict(zip(CASES, run_all([_Counted(case) for case in CASES]), strict=True))
    assert results[twin_forward][0] > 40
    assert results[twin_forward][1] > 75 * ELEMENTS
    assert results[kernel_forward] == (1, 6 * ELEMENTS + 8)
    launches, moved = results[kernel_both]
    assert launches == 2
    assert moved == 10 * ELEMENTS + 16
    chunks = 1 + 1 + 9
    assert results[norms_of_twin][0] > 10
    assert results[norms_of_kernels] == (2, 10 * CHUNK * 4 + 8 * chunks + 8 * chunks + 8 * 3)


class _Counted:
    """A case that returns its counts: the device itself cannot be sent to another process."""

    def __init__(self, case):
        self.case = case

    def __call__(self):
        return counted(self.case)
