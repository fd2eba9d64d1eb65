"""The MLP: h -> 4h -> activation -> h, plain or gated (GLU variants, arXiv 2002.05202).

    hidden [s, b, h] -> dense_h_to_4h [s, b, 4h / TP] -> activation -> dense_4h_to_h [s, b, h]

Each tensor-parallel rank computes 4h / TP columns of the intermediate activation; the second matrix product
sums over the ranks (arXiv 1909.08053, section 3).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.config.registries import ACTIVATIONS, GLU_ACTIVATIONS
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.layout import TPGroup


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as Megatron, GPT-2 and BLOOM compute it."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """The gate of a bilinear MLP (--glu-activation liglu)."""
    return x


class ParallelMLP(nn.Module):
    """[seq, batch, hidden] -> [seq, batch, hidden].

    In a gated MLP the first matrix has 2 * ffn_hidden_size rows: first the value, then the gate. The output
    is value * activation(gate).
    """

    def __init__(
        self, config: ModelConfig, tp_group: TPGroup, output_init_std: float, sequence_parallel: bool
    ) -> None:
        """`sequence_parallel`: input and output are this rank's shard of the sequence."""
        super().__init__()
        self.gated = config.glu_activation is not None
        self.activation = (
            GLU_ACTIVATIONS.load(config.glu_activation) if self.gated else ACTIVATIONS.load(config.activation)
        )
        parts = 2 if self.gated else 1
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size,
            parts * config.ffn_hidden_size,
            tp_group,
            init_std=config.matrix_init_std,
            lr_mult=config.matrix_lr_mult,
            num_fused_parts=parts,
            sequence_parallel=sequence_parallel,
        )
        self.dense_4h_to_h = RowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            tp_group,
            init_std=output_init_std,
            lr_mult=config.matrix_lr_mult,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.dense_h_to_4h(hidden)
        if not self.gated:
            return self.dense_4h_to_h(self.activation(wide))
        value, gate = wide.chunk(2, dim=-1)
        return self.dense_4h_to_h(value * self.activation(gate))
