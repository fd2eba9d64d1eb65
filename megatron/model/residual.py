"""The additions to the residual in a transformer layer, residual + dropout(output + bias), and the
arrangements of norms, attention, MLP and additions (--layer-arrangement)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.model.layer_context import LayerContext
from megatron.model.norm import add_and_norm, in_kernel, norm_with_input
from megatron.mpu.compiled_operators import compiled_dropout_add
from megatron.mpu.random import DropoutMask, device_sample_keys, dropout_add

if TYPE_CHECKING:
    from megatron.model.gpt_model import ParallelTransformerLayerPipe


class ResidualAddition(nn.Module):
    """Adds the output of attention or MLP, after hidden dropout, to the residual. It has no parameters. The
    embedding uses it for its dropout, without a residual."""

    def __init__(self, context: LayerContext, salt: str, batch_dim: int = 1) -> None:
        """salt: name of the dropout in the model. batch_dim: 0 or 1; the sequence is the dimension 1 or 0."""
        super().__init__()
        self.rate, self.salt, self.batch_dim = context.config.model.hidden_dropout, salt, batch_dim
        self.rng, self.part, self.tp_group = context.dropout_rng, context.dropout_part, context.tp_group
        self.keys = torch.empty(0)
        """The keys of the micro-batch's dropout mask, for a compiled layer."""

    def forward(self, output: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns residual + dropout(output + bias), [seq, batch, hidden]. bias: [hidden] or None."""
        if residual is not None and torch.compiler.is_compiling() and self.training and self.rate > 0:
            part = self.part(output, 0)
            return compiled_dropout_add(
                output, residual, self.rate, self.keys, bias=bias, batch_dim=1, part=part
            )
        return dropout_add(output, residual, self._mask(output), bias)

    def and_norm(
        self, norm: nn.Module, output: Tensor, residual: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum that `forward` returns, and its norm."""
        if in_kernel(norm, output):
            return add_and_norm(norm, output, residual, self._mask(output), bias)
        x = self(output, residual, bias)
        return x, norm(x)

    def fetch_keys(self, hidden: Tensor) -> None:
        """Fetches the keys of the dropout mask before a compiled forward pass."""
        if self.training and self.rate > 0:
            self.keys = device_sample_keys(hidden, self.rng, self.salt, batch_dim=1)

    def _mask(self, output: Tensor) -> DropoutMask | None:
        if not self.training or self.rate == 0:
            return None
        part = self.part(output, 1 - self.batch_dim)
        return DropoutMask(self.rate, self.rng, self.salt, self.batch_dim, None, self.tp_group, part)


def pre_norm(layer: ParallelTransformerLayerPipe, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Computes x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x))).

    With --apply-residual-connection-post-layernorm the residual is norm(x) instead of x.
    """
    x, normed = norm_with_input(layer.input_layernorm, x)
    with layer.recomputed(layer.input_layernorm, x, normed):
        output = layer.self_attention(normed, document_ids)
    residual = normed if layer.residual_after_norm else x
    x, normed = layer.add_and_norm(output, residual, "self_attention", layer.post_attention_layernorm)
    with layer.recomputed(layer.post_attention_layernorm, x, normed):
        output = layer.mlp(normed)
    return layer.dropout_add(output, normed if layer.residual_after_norm else x, "mlp")


def post_norm(layer: ParallelTransformerLayerPipe, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Computes x = x + dropout(norm(attention(y))), then x = x + dropout(norm(mlp(y))), where y is x or
    norm(x).

    In OLMo 2 y = x (arXiv 2501.00656, section 3.2). In Gemma 3 y = norm(x) (pre-post-norm, arXiv 2503.19786).
    The original Transformer instead normalizes the sum.
    """
    x, normed = norm_with_input(layer.input_layernorm, x)
    with layer.recomputed(layer.input_layernorm, x, normed):
        output = layer.self_attention(normed, document_ids)
    output = layer.post_attention_layernorm(output)
    x, normed = layer.add_and_norm(output, x, "self_attention", layer.pre_mlp_layernorm)
    with layer.recomputed(layer.pre_mlp_layernorm, x, normed):
        output = layer.mlp(normed)
    return layer.dropout_add(layer.post_mlp_layernorm(output), x, "mlp")


def parallel(layer: ParallelTransformerLayerPipe, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Computes x + dropout(attention(norm1(x))) + dropout(mlp(norm2(x))), as GPT-NeoX does (arXiv
    2204.06745)."""
    x, normed = norm_with_input(layer.input_layernorm, x)
    with layer.recomputed(layer.input_layernorm, x, normed):
        attended = layer.self_attention(normed, document_ids)
    x, normed = norm_with_input(layer.post_attention_layernorm, x)
    with layer.recomputed(layer.post_attention_layernorm, x, normed):
        output = layer.mlp(normed)
    return layer.dropout_add(output, layer.dropout_add(attended, x, "self_attention"), "mlp")


def parallel_one_norm(layer: ParallelTransformerLayerPipe, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Computes x + dropout(attention(y)) + dropout(mlp(y)) with y = norm(x), as GPT-J and Falcon 7B do (arXiv
    2311.16867)."""
    x, normed = norm_with_input(layer.input_layernorm, x)
    with layer.recomputed(layer.input_layernorm, x, normed):
        attended = layer.self_attention(normed, document_ids)
        output = layer.mlp(normed)
    return layer.dropout_add(output, layer.dropout_add(attended, x, "self_attention"), "mlp")
