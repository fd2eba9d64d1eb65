"""Layer norm and RMS norm. With --fp32-residual-connection their input is fp32 while their parameters are
16-bit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.registries import NORMALIZATIONS
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import new_parameter


def norm_class(config: Config) -> type[nn.Module]:
    """Returns the class that --normalization selects."""
    return NORMALIZATIONS.load(config.model.normalization)


def norm_arguments(
    config: Config, size: int | None = None
) -> tuple[int, float, bool] | tuple[int, float, bool, bool]:
    """Returns the arguments of `norm_class`. size: None for the hidden size."""
    model = config.model
    arguments = (size or model.hidden_size, model.layernorm_epsilon, config.optimizer.use_apex)
    if model.apply_layernorm_1p and "apply_layernorm_1p" not in model.unused_fields():
        return (*arguments, True)
    return arguments


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """Returns the factor of a normalized input, in fp32: the weight, or 1 + weight (--apply-layernorm-1p)."""
    return weight.float() + 1.0 if zero_centered else weight.float()


class MixedFusedLayerNorm(nn.Module):
    """Layer norm over the last dimension; statistics in fp32, output in the parameters' dtype.

    Megatron-DeepSpeed checkpoints use this class name for the final norm. With `use_apex` the forward pass is
    apex's fused kernel (NVIDIA's apex must be installed), otherwise PyTorch's.
    """

    def __init__(
        self, hidden_size: int, epsilon: float, use_apex: bool = False, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)
        self.epsilon, self.zero_centered = epsilon, zero_centered
        start = ParameterSpec((hidden_size,), init_value=1.0 - zero_centered, weight_decay=False)
        zeros = ParameterSpec((hidden_size,), init_value=0.0, weight_decay=False)
        # Replicated over the tensor-parallel ranks: every rank holds the full vector.
        self.weight = new_parameter(start)
        self.bias = new_parameter(zeros)
        self.normalize = _apex_layer_norm if use_apex else F.layer_norm

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] in any float dtype -> [..., hidden] in the dtype of the parameters."""
        weight, bias = self.weight, self.bias
        if hidden.dtype == weight.dtype and not self.zero_centered:
            return self.normalize(hidden, self.normalized_shape, weight, bias, self.epsilon)
        factor = _factor(weight, self.zero_centered)
        wide = self.normalize(hidden.float(), self.normalized_shape, factor, bias.float(), self.epsilon)
        return wide.to(weight.dtype)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension (arXiv 1910.07467): x / sqrt(mean(x^2) + epsilon) * weight.

    Statistics in fp32, output in the parameter's dtype. `use_apex` has no effect: PyTorch's kernel is fused.
    """

    def __init__(
        self, hidden_size: int, epsilon: float, use_apex: bool = False, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)
        self.epsilon, self.zero_centered = epsilon, zero_centered
        start = ParameterSpec((hidden_size,), init_value=1.0 - zero_centered, weight_decay=False)
        self.weight = new_parameter(start)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] in any float dtype -> [..., hidden] in the dtype of the parameter."""
        weight = self.weight
        if hidden.dtype == weight.dtype and not self.zero_centered:
            return F.rms_norm(hidden, self.normalized_shape, weight, self.epsilon)
        factor = _factor(weight, self.zero_centered)
        wide = F.rms_norm(hidden.float(), self.normalized_shape, factor, self.epsilon)
        return wide.to(weight.dtype)


def _apex_layer_norm(
    hidden: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, epsilon: float
) -> torch.Tensor:
    """Runs apex's fused kernel with the signature of `F.layer_norm`."""
    # Imported on use: a dry run works on machines without apex.
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(hidden, weight, bias, shape, epsilon)
