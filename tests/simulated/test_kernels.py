"""Compares the kernels' launches and bytes on the simulated device with the reference implementations."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from benchmarks.layer_bytes import least_forward_bytes
from megatron.arguments import parse_args
from megatron.config import OptimizerConfig, PrecisionConfig
from megatron.kernels import grouped_linear as grouped
from megatron.kernels import selection
from megatron.kernels.activation import gated_activation
from megatron.kernels.dropout import KernelMask, fused_dropout_add, shard_offsets
from megatron.kernels.grouped_linear import Groups
from megatron.kernels.optimizer import CHUNK, copy_gradient_op, fused_norms
from megatron.model.gpt_model import ParallelTransformerLayerPipe
from megatron.model.layer_context import LayerContext
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.mesh import ONE_RANK, Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import new_parameter, next_main_grad
from megatron.mpu.random import DropoutMask, DropoutRNG, dropout_add
from megatron.mpu.weight_gradient import add_product
from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.gradient_norm import accurate_norm
from megatron.optimizer.loss_scale import LossScaler
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.overlap import ZeroConfig
from megatron.optimizer.parameter_groups import make_optimizer, parameter_groups
from tests.simulated.in_simulator import operation_sums, run_all, simulated_device

# The 13B model's hidden states: [seq, batch, hidden], bf16.
SHAPE = (2048, 1, 5120)
ELEMENTS = 2048 * 5120


def counted(function):
    """Returns (launches, bytes) of a function on the simulated device."""
    with simulated_device() as sim:
        function(sim)
        launches, _, bytes_read, bytes_written = operation_sums(sim)
        return launches, bytes_read + bytes_written


def _inputs(device):
    make = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    return torch.empty(SHAPE, **make), torch.empty(SHAPE, **make)


def reference(sim):
    x, residual = _inputs(sim.device)
    dropout_add(x, residual, DropoutMask(0.1, DropoutRNG(1, [5]), "a", 1, None, Axis("tp")))


def kernel(sim, backward=False):
    x, residual = _inputs(sim.device)
    offsets = shard_offsets(x.shape, 1, None, 0, 1)
    keys = torch.empty(1, dtype=torch.int64, device=sim.device)
    output = fused_dropout_add(x, None, residual, KernelMask(keys, 0.1, offsets))
    assert sim.memory.total <= 3 * 2 * ELEMENTS + 1024  # inputs and output: no mask is kept
    if backward:
        # `backward` would copy the gradient of the residual into `residual.grad`.
        gradients = torch.autograd.grad(output, (x, residual), torch.empty_like(output))
        assert [gradient.shape for gradient in gradients] == [x.shape, x.shape]


def _gradients(device):
    return torch.empty(10 * CHUNK, device=device).split([3, CHUNK, 9 * CHUNK - 3])


def norms_of_reference(sim):
    torch.stack([accurate_norm(gradient) for gradient in _gradients(sim.device)])


def norms_of_kernels(sim):
    assert fused_norms(_gradients(sim.device)).shape == (3,)


def copied_gradient(sim):
    """Copies a gradient of ZeRO-2 as on the way to the buffer of its layer."""
    gradient = torch.empty(ELEMENTS, dtype=torch.bfloat16, device=sim.device)
    total = torch.empty_like(gradient, dtype=torch.float32)
    norm = torch.empty_like(total[0], dtype=torch.float64)
    copy_gradient_op(gradient, total, norm)


MOMENTS = ["exp_avg", "exp_avg_sq"]


def optimizer_step(uses_kernels):
    """Returns (launches, bytes per parameter) of the part of a step that changes master weights, moments and
    weights."""
    length = 2**20
    with simulated_device() as sim, patch.object(selection, "_device_uses_kernels", lambda _: uses_kernels):
        with torch.device(sim.device):
            parameter = new_parameter(ParameterSpec((length,)), dtype=torch.bfloat16)
        config = OptimizerConfig()
        groups = parameter_groups([("3.weight", parameter)], 0.1)
        scaler, zero = LossScaler(PrecisionConfig(bf16=True)), ZeroConfig(0)
        plain = make_optimizer(groups, config)
        optimizer = MixedPrecisionOptimizer(plain, {parameter: "3.weight"}, ONE_RANK, [], scaler, zero, 1.0)
        optimizer.master_update.run(0.5)  # allocates the moments
        (flat,) = optimizer.flat
        assert [*optimizer.moments_of(flat)] == MOMENTS
        before = operation_sums(sim)
        optimizer.master_update.run(0.5)
        launches, _, *moved = (b - a for a, b in zip(before, operation_sums(sim), strict=True))
        return launches, sum(moved) / length


def first_gradients(overwrites):
    """Returns the bytes per parameter that fp32 sums of gradients cost at a step's start and in its first
    micro-batch."""
    shape = (1024, 512)
    with simulated_device() as sim:
        with torch.device(sim.device):
            parameter = new_parameter(ParameterSpec(shape), dtype=torch.bfloat16)
        flat = FlatGroup({"params": [parameter]}, Axis("dp_cp"), False)
        grad, x = (torch.empty(1, size, dtype=torch.bfloat16, device=sim.device) for size in shape)
        before = operation_sums(sim)
        flat.forget_gradients() if overwrites else flat.zero_gradients()
        total, beta = next_main_grad(parameter)
        add_product(total, grad.t(), x, beta=beta)
        _, _, *moved = (b - a for a, b in zip(before, operation_sums(sim), strict=True))
        return round(sum(moved) / parameter.numel(), 1)


def gated_kernel():
    """Returns the peak memory that the backward pass of a gated activation takes, relative to its input."""
    with simulated_device() as sim:
        wide = torch.empty(SHAPE, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        output = gated_activation(wide, "swiglu")
        upstream = torch.empty_like(output)
        sim.memory.restart_peak()
        before = sim.memory.total
        torch.autograd.grad(output, wide, upstream)
        return (sim.memory.peak - before) / (2 * ELEMENTS)


def experts_layer(uses_kernels, fused):
    """Returns (launches, FLOPs) of the passes of a linear layer of 8 experts."""
    with simulated_device() as sim, patch.object(grouped, "uses_kernels", lambda _: uses_kernels):
        x = torch.empty(4096, 64, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        weight = torch.empty(8, 128, 64, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        if fused:
            weight.main_grad = torch.empty(weight.shape, device=sim.device)
        groups = Groups((512,) * 8)
        groups.offsets(sim.device)
        upstream = torch.empty(4096, 128, dtype=torch.bfloat16, device=sim.device)
        before = operation_sums(sim)
        output = grouped_linear(x, weight, None, groups)
        torch.autograd.grad(output, (x, weight), upstream, allow_unused=True)
        launches, flops, *_ = (b - a for a, b in zip(before, operation_sums(sim), strict=True))
        return launches, flops


LLAMA_8B = (
    "--dry-run --bf16 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --vocab-size 128256 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1 --train-iters 1"
)


def llama_layer():
    """Returns (launches, bytes) of the forward pass of a layer, and its bytes relative to their minimum."""
    config = parse_args(LLAMA_8B.split(), {})
    with simulated_device() as sim, patch.object(selection, "_device_uses_kernels", lambda _: True):
        with torch.device(sim.device):
            layer = ParallelTransformerLayerPipe(LayerContext(config, ONE_RANK, DropoutRNG(1)), 3).bfloat16()
        hidden = torch.empty(8192, 1, 4096, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        layer(hidden)  # makes the tables
        before = operation_sums(sim)
        layer(hidden)
        launches, _, *moved = (b - a for a, b in zip(before, operation_sums(sim), strict=True))
        return launches, sum(moved) / least_forward_bytes(config)


def test_a_llama_layer_reads_and_writes_everything_about_once():
    ((launches, share),) = run_all([llama_layer])
    # Norm, products, rotation, attention, addition with norm, activation, addition.
    assert launches == 1 + 4 + 1 + 1 + 1 + 1 + 1
    assert 0.95 < share <= 1.05


def test_a_step_of_adam_moves_30_bytes_per_parameter():
    """The kernel moves: gradient 4 bytes, master weight 8, two moments 16, 16-bit weight 2. The norm of the
    gradients, 4 bytes, is computed before. PyTorch moves more bytes: it scales the gradient (8), reads the
    master weight again (4), and by its schema writes the gradient (4)."""
    kernel, pytorch = run_all([partial(optimizer_step, uses_kernels) for uses_kernels in (True, False)])
    assert kernel == (1, 30.0)
    assert pytorch == (4, pytest.approx(46.0, abs=0.1))


def test_a_first_gradient_overwrites_its_sum():
    """An overwrite moves 4 bytes per parameter. Setting zeros, reading and writing would move 12 bytes."""
    assert run_all([partial(first_gradients, overwrites) for overwrites in (True, False)]) == [4.0, 12.0]


def test_the_backward_pass_of_a_gated_activation_takes_no_memory():
    assert run_all([gated_kernel]) == [0.0]


def test_a_linear_layer_of_experts_is_three_launches_of_kernels():
    """The reference loops over the 8 experts, and launches one more operation for the zeros of its
    gradient."""
    flops = 3 * 2 * 4096 * 128 * 64
    cases = [(True, True), (True, False), (False, False)]
    found = run_all([partial(experts_layer, *case) for case in cases])
    assert found == [(3, flops), (3, flops), (3 * 8 + 1, flops)]


def test_a_fused_call_is_one_launch_with_its_bytes():
    """Dropout of the 13B model moves 2 + 2 + 2 bytes per element forward, and 2 + 2 backward. Norms are two
    launches. The copy of a gradient moves 2 + 4 bytes."""
    dropouts = (reference, kernel, partial(kernel, backward=True))
    cases = (*dropouts, norms_of_reference, norms_of_kernels, copied_gradient)
    of_reference, forward, both, of_norms, of_fused, copied = run_all([partial(counted, c) for c in cases])
    assert of_reference[0] > 40
    assert of_reference[1] > 75 * ELEMENTS
    assert forward == (1, 6 * ELEMENTS + 8)
    assert both == (2, 10 * ELEMENTS + 16)
    chunks = 1 + 1 + 9
    assert copied == (1, 6 * ELEMENTS + 8)
    assert of_norms[0] > 10
    assert of_fused == (2, 10 * CHUNK * 4 + 8 * chunks + 8 * chunks + 8 * 3)
