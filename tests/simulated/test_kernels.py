"""The kernels' launches and bytes on the simulated device, compared with the reference implementations."""

from __future__ import annotations

from functools import partial

import torch

from megatron.kernels.dropout import fused_dropout_add, shard_offsets
from megatron.kernels.norms import CHUNK, fused_norms
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG, dropout_add
from megatron.optimizer.gradient_norm import accurate_norm
from tests.simulated.in_simulator import operation_sums, run_all, simulated_device

# Of the 13B model: [seq, batch, hidden], bf16.
SHAPE = (2048, 1, 5120)
ELEMENTS = 2048 * 5120


def counted(function):
    """(launches, bytes) of a function on the simulated device."""
    with simulated_device() as sim:
        function(sim)
        launches, _, bytes_read, bytes_written = operation_sums(sim)
        return launches, bytes_read + bytes_written


def _inputs(device):
    make = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    return torch.empty(SHAPE, **make), torch.empty(SHAPE, **make)


def reference(sim):
    x, residual = _inputs(sim.device)
    dropout_add(x, residual, 0.1, DropoutRNG(1, [5]), "a", batch_dim=1, tp_group=TPGroup())


def kernel(sim, backward=False):
    x, residual = _inputs(sim.device)
    offsets = shard_offsets(x.shape, 1, None, 0, 1)
    keys = torch.empty(1, dtype=torch.int64, device=sim.device)
    output = fused_dropout_add(x, None, residual, keys, 0.1, offsets)
    assert sim.memory.total <= 3 * 2 * ELEMENTS + 1024  # inputs and output: no mask is kept
    if backward:
        # Not `backward`, which would copy the gradient of the residual into `residual.grad`.
        gradients = torch.autograd.grad(output, (x, residual), torch.empty_like(output))
        assert [gradient.shape for gradient in gradients] == [x.shape, x.shape]


def _gradients(device):
    return torch.empty(10 * CHUNK, device=device).split([3, CHUNK, 9 * CHUNK - 3])


def norms_of_reference(sim):
    torch.stack([accurate_norm(gradient) for gradient in _gradients(sim.device)])


def norms_of_kernels(sim):
    assert fused_norms(_gradients(sim.device)).shape == (3,)


def test_a_fused_call_is_one_launch_with_its_bytes():
    """Dropout of the 13B model: 2 + 2 + 2 bytes per element forward, 2 + 2 backward; norms: two launches."""
    cases = (reference, kernel, partial(kernel, backward=True), norms_of_reference, norms_of_kernels)
    of_reference, forward, both, of_norms, of_fused = run_all([partial(counted, case) for case in cases])
    assert of_reference[0] > 40
    assert of_reference[1] > 75 * ELEMENTS
    assert forward == (1, 6 * ELEMENTS + 8)
    assert both == (2, 10 * ELEMENTS + 16)
    chunks = 1 + 1 + 9
    assert of_norms[0] > 10
    assert of_fused == (2, 10 * CHUNK * 4 + 8 * chunks + 8 * chunks + 8 * 3)
