"""Launches and bytes of a weight's gradient: accumulated in the GEMM, or rounded and added separately."""

from functools import partial

import torch

from megatron.mpu.weight_gradient import _supports_fused_accumulation, add_product, fuses_accumulation
from tests.simulated.in_simulator import operation_sums, run_all, simulated_device

ROWS, N_OUT, N_IN = 64, 48, 32


def apart(total, a, b):
    total.add_(a.matmul(b))


def counted(function):
    with simulated_device() as sim:
        made = {"device": sim.device, "dtype": torch.bfloat16}
        grad, x = torch.empty(ROWS, N_OUT, **made), torch.empty(ROWS, N_IN, **made)
        function(torch.empty(N_OUT, N_IN, device=sim.device), grad.t(), x)
        return operation_sums(sim)


def test_the_product_saves_a_launch_and_the_rounded_gradient():
    one, two = run_all([partial(counted, add_product), partial(counted, apart)])
    flops, inputs, elements = 2 * ROWS * N_OUT * N_IN, 2 * ROWS * (N_OUT + N_IN), N_OUT * N_IN
    assert one == (1, flops, inputs + 4 * elements, 4 * elements)
    assert two == (2, flops, inputs + (2 + 4) * elements, (2 + 4) * elements)


def on_simulated_device():
    with simulated_device() as sim:
        return _supports_fused_accumulation(sim.device, torch.bfloat16)


def test_the_simulated_device_has_the_product_and_a_cpu_has_not():
    assert run_all([on_simulated_device]) == [True]
    assert not _supports_fused_accumulation(torch.device("cpu"), torch.bfloat16)


def test_cpus_and_weights_without_a_sum_do_not():
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not fuses_accumulation(weight)
    weight.main_grad = torch.zeros(2, 2)
    assert not fuses_accumulation(weight)
