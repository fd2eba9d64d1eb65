"""The additions to the residual in a transformer layer: residual + dropout(output + bias)."""

import torch
from torch import Tensor, nn

from megatron.model.layer_context import LayerContext
from megatron.model.norm import add_and_norm, in_kernel
from megatron.mpu.compiled_operators import compiled_dropout_add
from megatron.mpu.random import DropoutMask, device_sample_keys, dropout_add


class ResidualAddition(nn.Module):
    """Adds the output of attention or MLP, after hidden dropout, to the residual. It has no parameters."""

    def __init__(self, context: LayerContext, salt: str) -> None:
        """salt: name of the dropout in the model."""
        super().__init__()
        self.rate, self.salt = context.config.model.hidden_dropout, salt
        self.rng, self.part, self.tp_group = context.dropout_rng, context.dropout_part, context.tp_group
        self.keys = torch.empty(0)
        """Of the micro-batch's dropout mask, for a compiled layer."""

    def forward(self, output: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
        """Returns residual + dropout(output + bias), [seq, batch, hidden]. bias: [hidden] or None."""
        if torch.compiler.is_compiling() and self.training and self.rate > 0:
            part = self.part(output, 0)
            return compiled_dropout_add(
                output, residual, self.rate, self.keys, bias=bias, batch_dim=1, part=part
            )
        return dropout_add(output, residual, self._mask(output), bias)

    def and_norm(
        self, norm: nn.Module, output: Tensor, residual: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum, and its norm."""
        if in_kernel(norm, output):
            return add_and_norm(norm, output, residual, self._mask(output), bias)
        x = self(output, residual, bias)
        return x, norm(x)

    def fetch_keys(self, hidden: Tensor) -> None:
        """Fetches the keys of the dropout mask, before a compiled forward pass."""
        if self.training and self.rate > 0:
            self.keys = device_sample_keys(hidden, self.rng, self.salt, batch_dim=1)

    def _mask(self, output: Tensor) -> DropoutMask | None:
        if not self.training or self.rate == 0:
            return None
        return DropoutMask(self.rate, self.rng, self.salt, 1, None, self.tp_group, self.part(output, 0))
