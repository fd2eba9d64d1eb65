"""Adam with 8-bit moments through bitsandbytes' kernels, and the rule for whose moments have 8 bits."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from megatron.mpu.parameters import ParameterSpec
from megatron.optimizer.quantized import BLOCK_SIZE, MAPS, QuantizedMoment, kernels

# Of the whole parameter: bitsandbytes' own threshold, which it holds against whatever shard it is given.
MIN_ELEMENTS = 4096
# Its gradients are those of rare tokens: large in few rows, zero in all others, which blocks represent badly.
WORD_EMBEDDING = "tied_modules.embed.word_embeddings.weight"
# bitsandbytes' GPU kernels count elements in 32 bits, and its CPU kernels work on fp32 copies: both are
# called for this many elements at a time, a multiple of BLOCK_SIZE.
_ELEMENTS_AT_ONCE = 2**23


def moment_bits(name: str, spec: ParameterSpec) -> int:
    """Bits per element of each moment of a parameter, 8 or 32: a function of the whole parameter alone, so
    that no layout changes it. What is not decayed is a norm or a bias."""
    large = math.prod(spec.global_shape) >= MIN_ELEMENTS
    return 8 if large and spec.weight_decay and name != WORD_EMBEDDING else 32


def rule_record() -> dict[str, Any]:
    """What `moment_bits` does and how 8 bits are made, for run.json."""
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
    """AdamW whose groups say by 'moment_bits' (8 or 32) how they keep their moments.

    State per parameter (flat, fp32): 'step', a scalar as in torch's AdamW, and 'exp_avg' and 'exp_avg_sq',
    fp32 tensors or QuantizedMoments. bitsandbytes' own optimizer classes are not used: they decide on 8 bits
    by the size of the tensor that they are given, which is a shard here.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """ImportError if bitsandbytes cannot be imported."""
        kernels()
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient (fp32, contiguous)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group)

    def _step_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in MAPS:
                state[moment] = new_moment(moment, parameter, group["moment_bits"])
        state["step"] += 1
        update = _update_8_bits if group["moment_bits"] == 8 else _update_32_bits
        for start in range(0, parameter.numel(), _ELEMENTS_AT_ONCE):
            update(parameter, state, group, start, min(_ELEMENTS_AT_ONCE, parameter.numel() - start))


def new_moment(moment: str, parameter: Tensor, bits: int) -> Tensor | QuantizedMoment:
    """Zeros for a flat parameter. moment: its name, 'exp_avg' or 'exp_avg_sq' with 8 bits."""
    if bits == 8:
        return QuantizedMoment(moment, parameter.numel(), parameter.device)
    return torch.zeros_like(parameter, requires_grad=False)


def _update_8_bits(
    parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], start: int, length: int
) -> None:
    first, second = (state[moment] for moment in MAPS)
    first_codes, first_scales = first.part(start, length)
    second_codes, second_scales = second.part(start, length)
    kernels().optimizer_update_8bit_blockwise(
        "adam",
        parameter.grad[start : start + length],
        parameter.detach()[start : start + length],
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
    parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], start: int, length: int
) -> None:
    part = slice(start, start + length)
    kernels().optimizer_update_32bit(
        "adam",
        parameter.grad[part],
        parameter.detach()[part],
        state["exp_avg"][part],
        beta1=group["betas"][0],
        eps=group["eps"],
        step=int(state["step"]),
        lr=group["lr"],
        state2=state["exp_avg_sq"][part],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
    )
