"""Adam with 8-bit moments (arXiv 2110.02861), which bitsandbytes' kernels update, and the choice of
parameters that use it."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from megatron.mapped_file import advise_huge_pages
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.optimizer.quantized import BLOCK_SIZE, MAPS, QuantizedMoment, kernels

# Parameters with fewer elements keep 32-bit moments. bitsandbytes has the same threshold, but applies it to
# the tensor that it receives, which may be a shard. This module compares the size of the full parameter.
MIN_ELEMENTS = 4096
# The word embedding keeps 32-bit moments: its gradient is large in the rows of a few tokens and zero
# elsewhere, which block-wise quantization represents badly.
WORD_EMBEDDING = "tied_modules.embed.word_embeddings.weight"
# Elements per kernel call, a multiple of BLOCK_SIZE. The number is limited because bitsandbytes' GPU kernels
# use 32-bit indices, and its CPU kernels make fp32 copies.
_ELEMENTS_AT_ONCE = 2**23


def moment_bits(name: str, spec: ParameterSpec) -> int:
    """Returns the bits per element of a parameter's moments, 8 or 32. They depend only on the full parameter,
    so they are equal on every layout. Parameters without weight decay (norms, biases) keep 32 bits."""
    large = math.prod(spec.global_shape) >= MIN_ELEMENTS
    return 8 if large and spec.weight_decay and name != WORD_EMBEDDING else 32


def rule_record() -> dict[str, Any]:
    """Returns the rule of `moment_bits` and the quantization settings, as run.json records them."""
    return {
        "bits": 8,
        "32_bits": {
            "fewer_elements_than": MIN_ELEMENTS,
            "parameters": [WORD_EMBEDDING],
            "without_weight_decay": True,
        },
        "block_size": BLOCK_SIZE,
        "maps": dict(MAPS),
        "saved_as": "fp32",
        "bitsandbytes": version("bitsandbytes"),
    }


class EightBitAdam(torch.optim.Optimizer):
    """AdamW whose moments have 8 or 32 bits, by the key 'moment_bits' of each parameter group.

    Parameters are flat and fp32. The state per parameter is 'step', a scalar as in torch's AdamW, and
    'exp_avg' and 'exp_avg_sq', which are fp32 tensors or QuantizedMoments. bitsandbytes' optimizer classes
    are not used, because they choose 8 bits by the size of the tensor that they receive, which may be a
    shard.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Raises ImportError if bitsandbytes cannot be imported."""
        kernels()
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. The gradient is fp32 and contiguous."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in MAPS:
                state[moment] = new_moment(moment, parameter, group["moment_bits"])
        state["step"] += 1
        update = _update_8_bits if group["moment_bits"] == 8 else _update_32_bits
        for start in range(0, parameter.numel(), _ELEMENTS_AT_ONCE):
            part = slice(start, min(start + _ELEMENTS_AT_ONCE, parameter.numel()))
            update(parameter.detach()[part], gradient[part], state, group, part)


def new_moment(moment: str, parameter: Tensor, bits: int) -> Tensor | QuantizedMoment:
    """Returns a moment of zeros for a flat parameter. moment: 'exp_avg' or 'exp_avg_sq'; it matters only with
    8 bits."""
    if bits == 8:
        return QuantizedMoment(moment, parameter.numel(), parameter.device)
    values = torch.empty_like(parameter, requires_grad=False)
    if values.device.type == "cpu":
        advise_huge_pages(values.data_ptr(), values.nbytes)
    return values.zero_()


def _update_8_bits(
    values: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], part: slice
) -> None:
    first, second = (state[moment] for moment in MAPS)
    first_codes, first_scales = first.part(part.start, len(values))
    second_codes, second_scales = second.part(part.start, len(values))
    kernels().optimizer_update_8bit_blockwise(
        "adam",
        gradient,
        values,
        first_codes,
        second_codes,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        beta3=0.0,
        alpha=0.0,
        eps=group["eps"],
        step=int(state["step"]),
        lr=group["lr"],
        qmap1=first.values,
        qmap2=second.values,
        absmax1=first_scales,
        absmax2=second_scales,
        weight_decay=group["weight_decay"],
    )


def _update_32_bits(
    values: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], part: slice
) -> None:
    kernels().optimizer_update_32bit(
        "adam",
        gradient,
        values,
        state["exp_avg"][part],
        beta1=group["betas"][0],
        eps=group["eps"],
        step=int(state["step"]),
        lr=group["lr"],
        state2=state["exp_avg_sq"][part],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
    )
