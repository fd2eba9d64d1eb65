"""The models of the benchmarks: their sizes, their flags, and a training step of each in plain PyTorch.

The plain loop has fp32 weights, autocast, `scaled_dot_product_attention`, fused AdamW and clipping, like
nanoGPT. The compiled loop compiles each layer separately, like torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import LLAMA
from tests.support.measured_worlds import config_of

if TYPE_CHECKING:
    from megatron.config import Config

ROTARY_BASE = 500000


@dataclass(frozen=True)
class Model:
    """Sizes of a model. groups: number of key and value heads of a model with Llama's layers (rotary
    positions, RMS norms, SwiGLU, no biases); 0 for a model with GPT-2's layers. ffn: width of the MLP, by
    default 4 x hidden size."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    groups: int = 0
    ffn: int = 0
    untied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def mlp_width(self) -> int:
        return self.ffn or 4 * self.hidden

    def config(self, flags: str) -> Config:
        """Returns the configuration of a run of this model, without dropout unless `flags` sets it."""
        llama = f"{LLAMA} --rotary-base {ROTARY_BASE} --num-query-groups {self.groups} "
        return config_of(
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--ffn-hidden-size {self.mlp_width} --seq-length {self.seq} "
            f"--max-position-embeddings {self.seq} --make-vocab-size-divisible-by 1 "
            f"--hidden-dropout 0 --attention-dropout 0 "
            + (llama if self.groups else "")
            + ("--untie-embeddings-and-output-weights " if self.untied else "")
            + flags
        )


class PlainLayer(nn.Module):
    """A transformer layer of plain PyTorch modules. Hidden states are [batch, seq, hidden]."""

    def __init__(self, model: Model, dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.dropout = model, dropout
        hidden, bias = model.hidden, not model.groups
        groups, parts = model.groups or model.heads, 2 if model.groups else 1
        self.split = (model.heads, groups, groups)
        self.norm1, self.norm2 = make_norm(model), make_norm(model)
        self.qkv = nn.Linear(hidden, sum(self.split) * model.head_dim, bias)
        self.out = nn.Linear(hidden, hidden, bias)
        self.up = nn.Linear(hidden, parts * model.mlp_width, bias)
        self.down = nn.Linear(model.mlp_width, hidden, bias)

    def add(self, output: Tensor, residual: Tensor) -> Tensor:
        return residual + (F.dropout(output, self.dropout) if self.dropout else output)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        projected = self.qkv(self.norm1(x)).view(*x.shape[:2], -1, self.model.head_dim)
        query, key, value = (part.transpose(1, 2) for part in projected.split(self.split, dim=2))
        if self.model.groups:
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        grouped = self.split[1] < self.split[0]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = self.add(self.out(attended.transpose(1, 2).flatten(2)), x)
        wide = self.up(self.norm2(x))
        if self.model.groups:
            content, gate = wide.chunk(2, dim=-1)
            return self.add(self.down(content * F.silu(gate)), x)
        return self.add(self.down(F.gelu(wide, approximate="tanh")), x)


def make_norm(model: Model) -> nn.Module:
    return nn.RMSNorm(model.hidden, 1e-5) if model.groups else nn.LayerNorm(model.hidden)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def rotary_tables(model: Model, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the tables of cosines and sines of rotary positions, each [seq, head_dim]."""
    exponents = torch.arange(0, model.head_dim, 2) / model.head_dim
    angles = (torch.arange(model.seq)[:, None] / ROTARY_BASE**exponents).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class PlainGPT(nn.Module):
    """A GPT of plain PyTorch modules with embedding, layers, head and loss, computed in bf16. compiler: back
    end of torch.compile; None to run without compilation."""

    def __init__(self, model: Model, compiler: str | None) -> None:
        super().__init__()
        self.words = nn.Embedding(model.vocab, model.hidden)
        self.positions = None if model.groups else nn.Embedding(model.seq, model.hidden)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.norm = make_norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if not model.untied:
            self.head.weight = self.words.weight
        self.tables = rotary_tables(model, torch.bfloat16)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head_loss = self.loss
        if compiler is not None:
            self.head_loss = torch.compile(self.loss, dynamic=False, backend=compiler)
            for layer in self.layers:
                layer.compile(dynamic=False, backend=compiler)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        x = x.to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, *self.tables)
        return self.head_loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_step(
    model: Model, batch: Tensor, micro_batch: int, device: str, compiler: str | None
) -> Callable[[], float]:
    """Returns a function that takes a training step in bf16 on the tokens `batch`: [global batch, seq + 1],
    and returns the loss. compiler: see `PlainGPT`."""
    with torch.device(device):
        net = PlainGPT(model, compiler)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    share = micro_batch / len(batch)

    def step() -> float:
        losses = []
        for part in batch.split(micro_batch):
            tokens = part.to(device, non_blocking=True)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = net(tokens[:, :-1], tokens[:, 1:]) * share
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    return step
