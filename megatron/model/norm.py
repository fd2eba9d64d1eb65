"""Layer norm and RMS norm. With --fp32-residual-connection a norm has fp32 input and 16-bit parameters.

In a transformer layer the input of a norm is also the residual of the next addition, and it is often the sum
of the previous addition. `norm_with_input` and `add_and_norm` compute the norm and these uses together, in
one Triton kernel per pass.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.registries import NORMALIZATIONS
from megatron.kernels import layer_norm
from megatron.kernels.dropout import NO_DROPOUT
from megatron.kernels.selection import uses_kernels
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import new_parameter
from megatron.mpu.random import DropoutMask, dropout_add, kernel_mask


def norm_class(config: Config) -> type[nn.Module]:
    """Returns the class that --normalization selects."""
    return NORMALIZATIONS.load(config.model.normalization)


def norm_arguments(
    config: Config, size: int | None = None
) -> tuple[int, float, bool] | tuple[int, float, bool, bool]:
    """Returns the constructor arguments of `norm_class`. size: width of the norm; None: the hidden size."""
    model = config.model
    arguments = (size or model.hidden_size, model.layernorm_epsilon, config.optimizer.use_apex)
    if model.apply_layernorm_1p and "apply_layernorm_1p" not in model.unused_fields():
        return (*arguments, True)
    return arguments


def new_norm(config: Config) -> nn.Module:
    """Returns a norm over the hidden size."""
    return norm_class(config)(*norm_arguments(config))


class _Norm(nn.Module):
    """A norm over the last dimension. Statistics are in fp32, the output has the parameters' dtype."""

    normalize: Callable[..., Tensor]
    """A function (input, shape, [weight, bias] or [weight], epsilon) -> output; its tensors have one
    dtype."""

    def __init__(
        self, hidden_size: int, epsilon: float, use_apex: bool = False, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)
        self.epsilon, self.zero_centered = epsilon, zero_centered
        start = ParameterSpec((hidden_size,), init_value=1.0 - zero_centered, weight_decay=False)
        # The weight is replicated: every tensor-parallel rank holds the full vector.
        self.weight = new_parameter(start)
        self.bias: nn.Parameter | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the norm of hidden [..., hidden], which has any float dtype, in the dtype of the
        parameters."""
        weight, bias = self.weight, [] if self.bias is None else [self.bias]
        if in_kernel(self, hidden):
            return norm_with_input(self, hidden)[1]
        if hidden.dtype == weight.dtype and not self.zero_centered:
            return self.normalize(hidden, self.normalized_shape, weight, *bias, self.epsilon)
        # The factor is the weight, or 1 + weight with --apply-layernorm-1p.
        factor = weight.float() + 1.0 if self.zero_centered else weight.float()
        vectors = (factor, *(vector.float() for vector in bias))
        wide = self.normalize(hidden.float(), self.normalized_shape, *vectors, self.epsilon)
        return wide.to(weight.dtype)


class MixedFusedLayerNorm(_Norm):
    """Layer norm. Megatron-DeepSpeed checkpoints use this class name for the final norm.

    With `use_apex` the kernel is NVIDIA's (the package apex must be installed), otherwise Triton's or
    PyTorch's.
    """

    def __init__(
        self, hidden_size: int, epsilon: float, use_apex: bool = False, zero_centered: bool = False
    ) -> None:
        super().__init__(hidden_size, epsilon, use_apex, zero_centered)
        self.bias = new_parameter(ParameterSpec((hidden_size,), init_value=0.0, weight_decay=False))
        self.normalize = _apex_layer_norm if use_apex else F.layer_norm


class LayerNormWithoutBias(MixedFusedLayerNorm):
    """Layer norm with a weight and without a bias. Kernels get a bias of zeros."""

    def __init__(
        self, hidden_size: int, epsilon: float, use_apex: bool = False, zero_centered: bool = False
    ) -> None:
        super().__init__(hidden_size, epsilon, use_apex, zero_centered)
        del self.bias
        self.register_buffer("bias", torch.zeros(hidden_size), persistent=False)


class RMSNorm(_Norm):
    """RMS norm (arXiv 1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. `use_apex` has no effect."""

    def normalize(self, *arguments: Any) -> Tensor:
        return F.rms_norm(*arguments)


def in_kernel(norm: nn.Module, hidden: Tensor) -> bool:
    """Returns whether a Triton kernel computes this norm of tensors like `hidden`."""
    return (
        isinstance(norm, _Norm)
        and norm.normalize is not _apex_layer_norm
        and norm.normalized_shape[0] <= layer_norm.MAX_WIDTH
        and not torch.compiler.is_compiling()
        and uses_kernels(hidden)
    )


def norm_with_input(norm: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (hidden, norm of hidden). Use the returned `hidden` instead of the argument: the kernel's
    backward pass then adds up the gradients of both results."""
    if in_kernel(norm, hidden):
        return layer_norm.add_norm(None, None, hidden, *_parameters(norm), NO_DROPOUT)
    return hidden, norm(hidden)


def add_and_norm(
    norm: nn.Module, x: Tensor, residual: Tensor, mask: DropoutMask | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the sum residual + dropout(x + bias), and the norm of the sum. mask: None without dropout."""
    of_kernel = None
    if in_kernel(norm, x):
        of_kernel = NO_DROPOUT if mask is None else kernel_mask(x, mask)
    if of_kernel is None:
        return norm_with_input(norm, dropout_add(x, residual, mask, bias))
    return layer_norm.add_norm(x, bias, residual, *_parameters(norm), of_kernel)


def _parameters(norm: Any) -> tuple[Tensor, Tensor | None, float, bool]:
    return norm.weight, norm.bias, norm.epsilon, norm.zero_centered


def _apex_layer_norm(
    hidden: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, epsilon: float
) -> torch.Tensor:
    """Runs apex's fused kernel with the signature of `F.layer_norm`."""
    # The import is here, so that a dry run works on machines without apex.
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(hidden, weight, bias, shape, epsilon)
