"""The matrix products of a linear layer for its output and for the gradient of its input. (`weight_gradient`
has the third product.)

`PLAIN` computes them in the precision of the weight. `Fp8` layers multiply FP8 matrices
(`megatron.kernels.fp8`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.sections.fp8_layers import BLOCK, is_small
from megatron.errors import UserError
from megatron.kernels import fp8 as kernels
from megatron.kernels.grouped_linear import Groups, multiply_groups
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameters import spec_of

_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply FP8 matrices."""
_FEW_ROWS = 4
"""Largest number of rows for which `_multiply_few_rows` is used: there it is faster than F.linear on a
CPU."""


class Products:
    """The products in the precision of the weight.

    weight: [n_out, n_in], or with `groups` [experts, n_out, n_in]. groups: the number of rows of each expert.
    """

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups | None = None) -> Tensor:
        """Returns x @ weight.T + bias, [..., n_out], for x [..., n_in].

        It is computed as one product. If the weight requires no gradient, F.linear without a bias would run a
        batched product, which rounds differently, unless the input has the strides of a contiguous tensor.
        `contiguous` keeps any stride of a dimension of size 1; `view` sets the strides.
        """
        if groups is not None:
            return multiply_groups(x, weight, bias, groups)
        if x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() <= _FEW_ROWS * x.shape[-1]:
            return _multiply_few_rows(x, weight, bias)
        return F.linear(x.contiguous().view(x.shape), weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, groups: Groups | None = None) -> Tensor:
        """Returns the input's gradient grad @ weight, [..., n_in], for grad [..., n_out]."""
        if groups is not None:
            return multiply_groups(grad, weight, None, groups, transposed=True)
        return grad.matmul(weight)


PLAIN = Products()


def _multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `Products.output` for a few tokens, as in generation. With MKL the transposed product is faster
    than F.linear, and a product with two rows is faster than with one."""
    rows = x.reshape(-1, x.shape[-1])
    is_one = rows.shape[0] == 1
    y = weight.mm((torch.cat((rows, rows)) if is_one else rows).t()).t()
    output = x.new_empty(*x.shape[:-1], weight.shape[0])
    part = (y[:1] if is_one else y).view_as(output)
    return output.copy_(part) if bias is None else torch.add(part, bias, out=output)


class Fp8:
    """State that the linear layers of a rank share: formats, scales, and the number of weight changes.

    A layer quantizes its weight when it first uses it after `weights_changed`. With ZeRO-3 it quantizes at
    each use, because FP8 copies of all weights would need as much memory as the weights.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Raises UserError if the device cannot multiply FP8 matrices."""
        if get_accelerator().device_name() == "cuda" and torch.cuda.get_device_capability() < _CAPABILITY:
            raise UserError(
                f"--fp8-recipe {config.precision.fp8_recipe} on {torch.cuda.get_device_name()}: it cannot "
                "multiply FP8 matrices. Expected compute capability 8.9 or newer, such as an H100's. Remove "
                "--fp8-format and --fp8-recipe."
            )
        self.gradient_format = (
            torch.float8_e5m2 if config.precision.fp8_format == "hybrid" else torch.float8_e4m3fn
        )
        self.whole = config.precision.fp8_recipe == "tensorwise"
        """Whether each tensor has one scale (--fp8-recipe tensorwise)."""
        self.keeps_weights = not config.parallel.shards_weights
        self.min_size = config.precision.fp8_min_size
        self.version = 0
        """Number of changes of the weights so far."""
        self.copies: list[Tensor] = []
        """The memory of the FP8 copies that all layers keep."""
        self._sharing = mesh.sequence
        """The ranks that hold parts of one tensor."""

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> Fp8 | None:
        """Returns the shared FP8 state for a rank's layers, or None without --fp8-format."""
        return None if config.precision.fp8_recipe is None else cls(config, mesh)

    def weights_changed(self) -> None:
        """Makes the layers quantize their weights again. It must be called after each change of the
        weights."""
        self.version += 1

    def amax(self, x: Tensor) -> Tensor | None:
        """Returns the largest absolute value of a tensor over the ranks that share it, fp32 [1]. Returns None
        unless each tensor has one scale. It is a collective."""
        if not self.whole:
            return None
        amax = torch.zeros(1, dtype=torch.float32, device=x.device)
        if x.numel():
            amax.copy_(torch.linalg.vector_norm(x.detach(), torch.inf).reshape(1))
        if self._sharing.size > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._sharing.group)
        return amax


class Fp8Products(Products):
    """Products of FP8 matrices. They are e4m3, except for the gradient of the output: e4m3 or e5m2."""

    def __init__(self, fp8: Fp8, weight: Tensor) -> None:
        """weight: determines the size of the FP8 copies. Raises ValueError if the numbers of its rows and
        columns are not multiples of the FP8 block."""
        if any(size % BLOCK for size in weight.shape[-2:]):
            raise ValueError(f"an FP8 matrix {list(weight.shape)}: expected multiples of {BLOCK}")
        self._fp8, self._version = fp8, -1
        self.kept = self._empty(weight) if fp8.keeps_weights else None
        fp8.copies += [tensor for copy in self.kept or () for tensor in copy]

    def _empty(self, weight: Tensor) -> kernels.Matrices:
        return kernels.empty_matrices(
            weight.shape, torch.float8_e4m3fn, self._fp8.whole, device=weight.device
        )

    def quantized(self, weight: Tensor) -> kernels.Matrices:
        """Returns the FP8 copies of the weight. Quantizes the weight if it has changed, or if no copy is
        kept."""
        copies = self.kept or self._empty(weight)
        if self.kept is None or self._version != self._fp8.version:
            weight = weight.detach()
            kernels.quantize_matrices(weight, copies, self._fp8.amax(weight))
            self._version = self._fp8.version
        return copies

    def _multiply(
        self,
        x: Tensor,
        matrices: kernels.Quantized,
        dtype: torch.dtype,
        bias: Tensor | None,
        groups: Groups | None,
    ) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
        quantized = kernels.quantize_rows(rows, dtype, self._fp8.amax(rows))
        product = kernels.multiply(quantized, matrices, bias, groups, x.dtype)
        # The result must not be a view: the caller may change the output of its autograd function in place.
        return product.resize_(*x.shape[:-1], product.shape[-1])

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups | None = None) -> Tensor:
        return self._multiply(x, self.quantized(weight).rows, torch.float8_e4m3fn, bias, groups)

    def input_gradient(self, grad: Tensor, weight: Tensor, groups: Groups | None = None) -> Tensor:
        matrices = self.quantized(weight).transposed
        return self._multiply(grad, matrices, self._fp8.gradient_format, None, groups)


def products_of(fp8: Fp8 | None, weight: Tensor) -> Products:
    """Returns the products of a layer with this weight. Without FP8, and for a small matrix, these
    are `PLAIN`."""
    n_out, n_in = spec_of(weight).global_shape[-2:]
    return PLAIN if fp8 is None or is_small(n_out, n_in, fp8.min_size) else Fp8Products(fp8, weight)


def quantize_weights(module: nn.Module) -> None:
    """Quantizes the changed weights of all layers that keep FP8 copies. Otherwise their next passes would do
    it."""
    for layer in module.modules():
        products = getattr(layer, "products", None)
        if isinstance(products, Fp8Products) and products.kept is not None:
            products.quantized(layer.get_parameter("weight"))
