"""The Triton kernels as cases. Each case computes outputs and gradients with the kernel or with its PyTorch
reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import Config
from megatron.kernels import fp8
from megatron.kernels.grouped_linear import Groups
from megatron.kernels.selection import uses_kernels
from megatron.model.activations import Activation, gated_by
from megatron.model.attention.core_attention import CoreAttention
from megatron.model.gpt_model import ParallelSelfAttention
from megatron.model.layer_context import LayerContext
from megatron.model.norm import MixedFusedLayerNorm, add_and_norm
from megatron.model.position import document_ids_of
from megatron.mpu.embedding import embedding
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.logit_chunks import LogitChunks
from megatron.mpu.mesh import ONE_RANK, Axis
from megatron.mpu.random import DropoutMask, DropoutRNG, dropout_add
from megatron.mpu.weight_gradient import weight_gradient
from megatron.optimizer.adam import AdamW
from megatron.optimizer.flat_group import move_grad
from megatron.optimizer.gradient_norm import gradient_norms
from tests.support.measured_worlds import config_of

Work = Callable[[], list[Tensor]]

# Attention kernel -> tiles (queries, keys, warps, stages) whose times are compared on a GPU.
TILES = {
    "forward": [
        *((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 3)),
        *((128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 3), (128, 64, 4, 3)),
    ],
    "query": [
        *((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((128, 128, 8, 2), (64, 128, 4, 2), (128, 32, 8, 2), (64, 32, 4, 3)),
    ],
    "key": [
        *((64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1)),
        *((32, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3)),
    ],
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a layer, and of the tensors of the loss of a chunk of tokens."""

    seq: int
    heads: int
    head_dim: int
    vocab: int
    tokens: int
    parameters: tuple[int, ...]
    """Number of elements of each gradient whose norm is computed."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Inputs:
    """Makes the input tensors of cases. rounded_to: values are rounded to this dtype before they are
    converted to `dtype`, so that cases in two dtypes have equal values."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    rounded_to: torch.dtype

    def some(self, shape: tuple[int, ...], count: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Returns `count` random tensors of a shape that require a gradient."""
        found = []
        for seed in range(count):
            values = torch.randn(
                shape, generator=torch.Generator(self.device).manual_seed(seed), device=self.device
            )
            found.append(values.to(self.rounded_to).to(dtype or self.dtype).requires_grad_())
        return found


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs. work: function that returns outputs and gradients, with the kernel or with
    its reference. library: most similar function of a library, which may compute a different result. moved:
    bytes that the kernel reads and writes. flops: FLOPs of the kernel; 0 if the memory bandwidth is the
    limit."""

    name: str
    work: Work
    library_name: str
    library: Work
    moved: int
    flops: float = 0.0


def cases(inputs: Inputs) -> Iterator[Case]:
    """Yields one case at a time, so that the tensors of only one case are in memory."""
    yield dropout_case(inputs)
    yield norm_case(inputs)
    yield activation_case(inputs)
    for name, flags in (
        ("attention, dropout 0.1", "--attention-dropout 0.1"),
        ("attention, ALiBi", "--attention-dropout 0 --position-embedding-type alibi"),
        ("attention, documents", "--attention-dropout 0 --reset-attention-mask"),
        ("attention, window", f"--attention-dropout 0 --window-size {max(inputs.sizes.seq // 4, 1)}"),
        ("attention, all three", "--position-embedding-type alibi --reset-attention-mask"),
    ):
        yield attention_case(name, flags, inputs)
    yield rotary_case("split and rotary positions", "", inputs)
    yield rotary_case("split, QK norm and rotary positions", "--qk-layernorm", inputs)
    yield gated_case(inputs)
    yield weight_gradient_case(inputs)
    yield grouped_case(inputs)
    # These cases do not run in Triton's interpreter, which truncates to FP8 instead of rounding.
    if inputs.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        yield fp8_case(inputs)
        yield fp8_case(inputs, counts=(7, 0))
    yield loss_case(inputs)
    yield embedding_case(inputs)
    yield norms_case(inputs)
    yield copied_gradient_case(inputs)
    yield optimizer_case(inputs)


def dropout_case(inputs: Inputs) -> Case:
    sizes = inputs.sizes
    x, residual, grad = inputs.some((sizes.seq, 1, sizes.hidden), 3)
    mask = DropoutMask(0.1, DropoutRNG(1, (5,)), "4.mlp", 1, None, Axis("tp"))

    def work() -> list[Tensor]:
        y = dropout_add(x, residual, mask)
        return [y.detach(), *torch.autograd.grad(y, (x, residual), grad)]

    def library() -> list[Tensor]:
        y = residual + F.dropout(x, 0.1)
        return [y.detach(), *torch.autograd.grad(y, (x, residual), grad)]

    moved = 5 * x.numel() * x.element_size()  # x, residual and output; gradient, and gradient of x
    return Case("dropout and residual", work, "torch dropout, +", library, moved)


def norm_case(inputs: Inputs) -> Case:
    """Returns the case of the residual addition with dropout and bias, and of the layer norm of the sum."""
    sizes = inputs.sizes
    x, residual, *grads = inputs.some((sizes.seq, 1, sizes.hidden), 4)
    bias, weight, beta = inputs.some((sizes.hidden,), 3)
    norm = MixedFusedLayerNorm(sizes.hidden, 1e-5)
    norm.weight, norm.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(beta.detach())
    mask = DropoutMask(0.1, DropoutRNG(1, (5,)), "4.mlp", 1, None, Axis("tp"))
    leaves = (x, residual, bias, *norm.parameters())

    def work() -> list[Tensor]:
        parts = add_and_norm(norm, x, residual, mask, bias)
        return [*(part.detach() for part in parts), *torch.autograd.grad(parts, leaves, grads)]

    def library() -> list[Tensor]:
        total = residual + F.dropout(x + bias, 0.1)
        parts = total, F.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias)
        return [*(part.detach() for part in parts), *torch.autograd.grad(parts, leaves, grads)]

    # The forward pass moves x, residual, sum and norm. The backward pass moves the sum and the gradients of
    # sum, norm, x and residual.
    moved = (4 + 5) * x.numel() * x.element_size()
    return Case("add and norm, with dropout and bias", work, "torch dropout, +, layer_norm", library, moved)


def activation_case(inputs: Inputs) -> Case:
    """Returns the case of GELU, and of the gradient of the bias that was added to `x` before."""
    sizes = inputs.sizes
    x, grad = inputs.some((sizes.seq, 1, 4 * sizes.hidden), 2)
    (bias,) = inputs.some((4 * sizes.hidden,), 1)
    gelu = Activation("gelu")

    def work() -> list[Tensor]:
        y = gelu(x, bias) if gelu.in_kernel(x) else gelu(x + (bias - bias.detach()))
        return [y.detach(), *torch.autograd.grad(y, (x, bias), grad)]

    def library() -> list[Tensor]:
        y = F.gelu(x, approximate="tanh")
        (grad_x,) = torch.autograd.grad(y, x, grad)
        return [y.detach(), grad_x, grad_x.sum((0, 1))]

    # The forward pass moves input and output. The backward pass moves the input and the gradients of output
    # and input.
    moved = (2 + 3) * x.numel() * x.element_size()
    return Case("activation and bias, GELU", work, "torch gelu, sum", library, moved)


def layer_config(sizes: Sizes, flags: str) -> Config:
    """Returns the configuration of a model with one layer of these sizes."""
    return config_of(
        f"--num-layers 1 --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads} --vocab-size 100 "
        f"--seq-length {sizes.seq} --max-position-embeddings {sizes.seq} --micro-batch-size 1 "
        f"--global-batch-size 1 {flags}"
    )


def attention_case(name: str, flags: str, inputs: Inputs) -> Case:
    sizes, device = inputs.sizes, inputs.device
    config = layer_config(sizes, flags)
    core = CoreAttention(LayerContext(config, ONE_RANK, DropoutRNG(1, (5,))), 0)
    q, k, v = inputs.some((sizes.seq, 1, sizes.heads, sizes.head_dim), 3)
    (grad,) = inputs.some((sizes.seq, 1, sizes.hidden), 1)
    tokens = torch.ones(1, sizes.seq, dtype=torch.int64, device=device)
    tokens[:, :: sizes.seq // 4] = 0
    document_ids = document_ids_of(tokens, 0) if config.data.reset_attention_mask else None

    def work() -> list[Tensor]:
        y = core(q, k, v, document_ids)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    def library() -> list[Tensor]:
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    # The forward pass has 2 GEMMs of [seq, seq / 2, head_dim], the backward pass 5, with 2 FLOPs per element.
    flops = 3.5 * 2 * 2 * sizes.heads * sizes.head_dim * sizes.seq**2 / 2
    return Case(name, work, "torch SDPA, plain causal", library, 0, flops)


def rotary_case(name: str, flags: str, inputs: Inputs) -> Case:
    sizes, device = inputs.sizes, inputs.device
    config = layer_config(sizes, f"--position-embedding-type rotary {flags}")
    with torch.device(device):
        attention = ParallelSelfAttention(LayerContext(config, ONE_RANK, DropoutRNG(1)), 3).to(inputs.dtype)
    vectors = [vector for name, vector in attention.named_parameters() if "layernorm" in name]
    for place, vector in enumerate(vectors):
        vector.data.copy_(inputs.some(vector.shape, len(vectors))[place].detach())
    (projected,) = inputs.some((sizes.seq, 1, 3 * sizes.hidden), 1)
    grads = inputs.some((sizes.seq, 1, sizes.heads, sizes.head_dim), 3)

    def work() -> list[Tensor]:
        parts = attention._split(projected, None)[:3]  # the kernel also returns an empty gate
        return [*(part.detach() for part in parts), *torch.autograd.grad(parts, [projected, *vectors], grads)]

    def library() -> list[Tensor]:
        return [projected.detach().clone(), projected.detach().clone()]

    moved = 4 * projected.numel() * projected.element_size()
    return Case(name, work, "torch clone, twice", library, moved)


def gated_case(inputs: Inputs) -> Case:
    sizes = inputs.sizes
    (wide,) = inputs.some((sizes.seq, 1, 8 * sizes.hidden), 1)
    (grad,) = inputs.some((sizes.seq, 1, 4 * sizes.hidden), 1)
    swiglu = gated_by("swiglu")

    def work() -> list[Tensor]:
        y = swiglu(wide)
        return [y.detach(), *torch.autograd.grad(y, wide, grad)]

    def library() -> list[Tensor]:
        value, gate = wide.chunk(2, dim=-1)
        y = value * F.silu(gate)
        return [y.detach(), *torch.autograd.grad(y, wide, grad)]

    # The forward pass moves values, gates and output. The backward pass moves values and gates, and the
    # gradients of output, values and gates.
    moved = (3 + 5) * grad.numel() * grad.element_size()
    return Case("gated activation, SwiGLU", work, "torch silu, *", library, moved)


def weight_gradient_case(inputs: Inputs) -> Case:
    """Returns the case of the gradient of the MLP's first matrix, which is added to its fp32 sum. The GEMM of
    the reference is in fp32."""
    sizes, device = inputs.sizes, inputs.device
    (weight,) = inputs.some((4 * sizes.hidden, sizes.hidden), 1)
    (x,) = inputs.some((sizes.seq, sizes.hidden), 1)
    (grad,) = inputs.some((sizes.seq, 4 * sizes.hidden), 1)
    weight.main_grad = torch.zeros(weight.shape, device=device)

    @torch.no_grad()
    def work() -> list[Tensor]:
        weight.main_grad.zero_()
        if not uses_kernels(weight):
            weight.main_grad.addmm_(grad.float().t(), x.float())
        elif (gradient := weight_gradient(weight, grad, x)) is not None:
            weight.main_grad.add_(gradient)  # this device has no accumulating GEMM
        return [weight.main_grad]

    @torch.no_grad()
    def library() -> list[Tensor]:
        weight.main_grad.zero_()
        return [weight.main_grad.add_(grad.t() @ x)]

    flops = 2.0 * sizes.seq * 4 * sizes.hidden**2
    return Case("weight gradient into main_grad", work, "torch matmul, add", library, 0, flops)


def grouped_case(inputs: Inputs) -> Case:
    """Returns the case of the first linear layer of 8 experts (one of them without rows), which adds the
    gradient of its weight to the fp32 sum."""
    sizes, device = inputs.sizes, inputs.device
    counts = (1, sizes.seq // 2, 0, *[sizes.seq // 10] * 4)
    groups = Groups((*counts, sizes.seq - sum(counts)))
    (weight,) = inputs.some((8, 4 * sizes.hidden, sizes.hidden), 1)
    (bias,) = inputs.some((8, 4 * sizes.hidden), 1)
    (x,) = inputs.some((sizes.seq, sizes.hidden), 1)
    (grad,) = inputs.some((sizes.seq, 4 * sizes.hidden), 1)
    weight.main_grad = torch.zeros(weight.shape, device=device)

    def work() -> list[Tensor]:
        weight.main_grad.zero_()
        y = grouped_linear(x, weight, bias, groups)
        grad_x, grad_weight, grad_bias = torch.autograd.grad(y, (x, weight, bias), grad, allow_unused=True)
        total = weight.main_grad if grad_weight is None else grad_weight
        return [y.detach(), grad_x, total, grad_bias]

    def library() -> list[Tensor]:
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.offsets(device))
        return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]

    flops = 3 * 2.0 * sizes.seq * 4 * sizes.hidden**2
    return Case("grouped linear layer of experts", work, "torch grouped_mm, no bias", library, 0, flops)


def fp8_case(inputs: Inputs, counts: tuple[int, ...] = ()) -> Case:
    """Returns the case that quantizes the rows and the matrix of a linear layer, and multiplies both. counts:
    numbers of rows of all experts except the last one; empty for one matrix without experts."""
    n_in, rows = 2 * fp8.BLOCK, inputs.sizes.seq
    shape = (*([len(counts) + 1] if counts else []), 3 * fp8.BLOCK, n_in)
    (x,), (weight,), (bias,) = (inputs.some(size, 1) for size in ((rows, n_in), shape, shape[:-1]))
    groups = Groups((*counts, rows - sum(counts))) if counts else None

    @torch.no_grad()
    def work() -> list[Tensor]:
        numbers = [each.float() if inputs.dtype == torch.float64 else each for each in (x, weight)]
        quantized = fp8.quantize_rows(numbers[0], torch.float8_e4m3fn)
        copies = fp8.empty_matrices(weight.shape, torch.float8_e4m3fn, False, device=inputs.device)
        fp8.quantize_matrices(numbers[1], copies)
        y = fp8.multiply(quantized, copies.rows, bias, groups, inputs.dtype)
        return [y, fp8.dequantized(quantized, False), fp8.dequantized(copies.transposed, True)]

    name = "FP8 product and quantization" + (" of experts" if counts else "")
    return Case(name, work, "torch linear", lambda: [x @ weight.mT], 0, 2.0 * rows * n_in * shape[-2])


def loss_case(inputs: Inputs) -> Case:
    """Returns the case that computes the logits of a chunk, the losses, and the gradient in the memory of the
    logits. The times include the GEMM of the logits. The loss does not support fp64, so its exact reference
    is in fp32."""
    sizes, device = inputs.sizes, inputs.device
    dtype = torch.float32 if inputs.dtype == torch.float64 else inputs.dtype
    (hidden,) = inputs.some((sizes.tokens, 64), 1, dtype)
    (weight,) = inputs.some((sizes.vocab, 64), 1, dtype)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator).to(device)

    def work() -> list[Tensor]:
        with torch.no_grad():
            chunks = LogitChunks(hidden, weight, labels, Axis("tp"), sizes.vocab, 0.0)
            losses, gradient = chunks.losses(chunks.chunks[0], with_gradient=True)
        scale = chunks.gradient_scale  # 1 except in fp16
        return [losses, gradient if scale == 1 else gradient / scale]

    def library() -> list[Tensor]:
        logits = (hidden @ weight.T).detach().requires_grad_()
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return [losses.detach(), *torch.autograd.grad(losses.sum(), logits)]

    moved = 3 * sizes.tokens * sizes.vocab * hidden.element_size()  # written, read, written
    return Case("cross entropy of a chunk", work, "torch cross_entropy", library, moved)


def embedding_case(inputs: Inputs) -> Case:
    sizes, device = inputs.sizes, inputs.device
    (weight,) = inputs.some((sizes.vocab, sizes.hidden), 1)
    (grad,) = inputs.some((sizes.seq, sizes.hidden), 1)
    generator = torch.Generator().manual_seed(2)
    # Frequent tokens are repeated, as in text.
    ids = (torch.rand(sizes.seq, generator=generator) ** 4 * sizes.vocab).long().to(device)
    weight.main_grad = torch.zeros(weight.shape, device=device)

    def work() -> list[Tensor]:
        weight.main_grad.zero_()
        embedding(ids, weight).backward(grad)
        return [weight.main_grad]

    def library() -> list[Tensor]:
        weight.main_grad.zero_()
        return [weight.main_grad.index_add_(0, ids, grad.float())]

    moved = sizes.seq * sizes.hidden * (2 * weight.element_size() + 8) + 4 * weight.numel()
    return Case("embedding's gradient, cleared before", work, "torch index_add_", library, moved)


def norms_case(inputs: Inputs) -> Case:
    sizes, device = inputs.sizes, inputs.device
    gradients = [inputs.some((count,), 1, torch.float32)[0].detach() for count in sizes.parameters]

    def work() -> list[Tensor]:
        return [gradient_norms(gradients, device)]

    def library() -> list[Tensor]:
        return [torch.nn.utils.get_total_norm(gradients)]

    return Case("norms of gradients", work, "torch get_total_norm", library, 4 * sum(sizes.parameters))


def copied_gradient_case(inputs: Inputs) -> Case:
    sizes, device = inputs.sizes, inputs.device
    weight, gradient = inputs.some((max(sizes.parameters),), 2)
    total, norm = (
        torch.zeros(weight.shape, device=device),
        torch.zeros((), dtype=torch.float64, device=device),
    )

    def work() -> list[Tensor]:
        weight.grad = gradient.detach()
        move_grad(weight, total, norm)
        return [total, norm * 0.0]

    def library() -> list[Tensor]:
        return [total.copy_(gradient.detach())]

    moved = total.numel() * (4 + weight.element_size())
    return Case("norms of copied gradients: finite or not", work, "torch copy_", library, moved)


def optimizer_case(inputs: Inputs) -> Case:
    """Returns the case of a step of AdamW, from the sum of the gradients to the weights in the run's dtype.
    Weights and moments are reset before the step."""
    dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    values, gradient = (x.detach() for x in inputs.some((max(inputs.sizes.parameters),), 2, dtype))
    rounded, factor = values.to(inputs.dtype, copy=True), 0.5

    def step_of(in_one_pass: bool) -> Work:
        master = torch.nn.Parameter(values.clone())
        optimizer = AdamW([master], lr=1e-3, fused=True)
        (group,) = optimizer.param_groups

        def step() -> list[Tensor]:
            master.data.copy_(values)
            optimizer.state.clear()
            if in_one_pass and optimizer.update_in_one_pass(group, master, gradient, factor, rounded):
                return [rounded]
            master.grad = gradient * factor
            optimizer.step()
            return [rounded.copy_(master.detach())]

        return step

    moved = values.numel() * (28 + rounded.element_size() + 16)
    name, library = "optimizer step, state reset before", "torch mul, AdamW, copy_"
    return Case(name, step_of(True), library, step_of(False), moved)
