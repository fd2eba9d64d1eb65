"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1, and Megatron-LM).

Shapes: s, b, h, n as in gpt_model.py; r = --kv-lora-rank, p = --qk-pos-emb-head-dim, d = --qk-head-dim.

    query         = q_up(norm(q_down(x)))    [s, b, n, d + p]
    latent, key_p = kv_down(x)               [s, b, r], [s, b, p]
    key_d, value  = kv_up(norm(latent))      [s, b, n, d], [s, b, n, --v-head-dim]
    key           = key_d, and the rotated key_p for all n heads
    output        = dense(attention(query, key, value))

Without --q-lora-rank, query = q_proj(x). The last p elements of each query are rotated like key_p, in pairs
of neighbors. The norms exist only with --qk-layernorm.

TP shards the heads. The down projections and the norms are replicated. Each rank computes them for all
tokens; with --sequence-parallel only for its shard of the tokens, and then it gathers the compressed vectors,
which are smaller than hidden states. CP gathers `latent` and `key_p`, and each rank computes the keys and
values of its heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.attention.core_attention import CoreAttention
from megatron.model.attention.qk_clip import LogitWeight, Rows
from megatron.model.layer_context import LayerContext
from megatron.model.norm import norm_arguments, norm_class
from megatron.model.position import positions_within_documents
from megatron.mpu.context_parallel import gather_from_sequence
from megatron.mpu.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.mpu.mappings import copy_to_tensor_region


class LatentSelfAttention(nn.Module):
    """Causal self-attention with compressed keys and values. It maps [seq, batch, hidden] to [seq, batch,
    hidden].

    Rows of q_up_proj: (heads, d + p). Rows of kv_up_proj: (heads, d + --v-head-dim).
    """

    def __init__(
        self, context: LayerContext, layer_index: int, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        """first, second: keyword arguments of the linear layers before attention, and of the linear layers
        after it."""
        super().__init__()
        model, tp_group = context.config.model, context.tp_group
        self.dims = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        self.kv_rank, self.compresses_queries = model.kv_lora_rank, model.q_lora_rank is not None
        sizes = {name: (n_in, n_out) for name, (n_out, n_in) in model.attention_matrices.items()}
        first = {**first, "bias": False}

        def norm(size: int) -> nn.Module:
            if not model.qk_layernorm:
                return nn.Identity()
            _, epsilon, *others = norm_arguments(context.config, size)
            return norm_class(context.config)(size, model.latent_layernorm_epsilon or epsilon, *others)

        if model.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(*sizes["q_proj"], tp_group, **first)
        else:
            self.q_down_proj = ReplicatedLinear(*sizes["q_down_proj"], tp_group, **first)
            self.q_layernorm = norm(model.q_lora_rank)
            self.q_up_proj = ColumnParallelLinear(*sizes["q_up_proj"], tp_group, **first)
        # The layer is in bf16 even with FP8: its number of rows is not a multiple of an FP8 block (512 + 64
        # in DeepSeek-V3).
        settings = first | {"matrix_rows": (self.kv_rank, self.dims[1]), "fp8": None}
        self.kv_down_proj = ReplicatedLinear(*sizes["kv_down_proj"], tp_group, **settings)
        self.kv_layernorm = norm(self.kv_rank)
        settings = first | {"matrix_rows": (self.dims[0], self.dims[2])}
        self.kv_up_proj = ColumnParallelLinear(*sizes["kv_up_proj"], tp_group, **settings)
        self.rotary = context.rotary(layer_index)
        self.reset_position_ids = context.resets_rotary_positions
        self.core_attention = CoreAttention(context, layer_index)
        self.dense = RowParallelLinear(*sizes["dense"], tp_group, **second)
        self.tp_group, self.cp_group = tp_group, context.cp_group
        self.sequence_parallel = context.sequence_parallel

    @property
    def skipped_bias(self) -> Tensor | None:
        """The bias of the output projection that the residual addition adds: see `RowParallelLinear`."""
        return self.dense.skipped_bias

    def logit_weights(self) -> list[LogitWeight]:
        """Returns the weights of queries and keys for QK-clip: see `qk_clip`."""
        plain, rotated, value = self.dims
        queries = self.q_up_proj if self.compresses_queries else self.q_proj
        return [
            (queries.weight, ((plain, Rows.QUERY), (rotated, Rows.QUERY_OF_SHARED_KEY))),
            (self.kv_up_proj.weight, ((plain, Rows.KEY), (value, Rows.OTHER))),
        ]

    def forward(self, hidden: Tensor, document_ids: Tensor | None) -> Tensor:
        """Returns the output [seq / CP, batch, hidden]. document_ids: [batch, seq] or None."""
        positions = positions_within_documents(document_ids) if self.reset_position_ids else None
        query = self._queries(hidden)
        latent, shared_key = self.kv_down_proj(hidden).split((self.kv_rank, self.dims[1]), dim=-1)
        latent = torch.cat((self.kv_layernorm(latent), shared_key), dim=-1)
        latent = copy_to_tensor_region(latent, self.tp_group, self.sequence_parallel)
        latent, shared_key = latent.split((self.kv_rank, self.dims[1]), dim=-1)
        query, shared_key = self._rotated(query, shared_key.unsqueeze(2), positions)
        key, value = self._keys_and_values(latent, shared_key)
        return self.dense(self.core_attention(query, key, value, document_ids))

    def _queries(self, hidden: Tensor) -> Tensor:
        """Returns the queries [seq / CP, batch, heads / TP, d + p] before the rotation."""
        if self.compresses_queries:
            projected = self.q_up_proj(self.q_layernorm(self.q_down_proj(hidden)))
        else:
            projected = self.q_proj(hidden)
        return projected.unflatten(-1, (-1, self.dims[0] + self.dims[1]))

    def _rotated(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns query and key after the rotation of the last p elements of the queries, and of key [seq /
        CP, batch, 1, p]."""
        assert self.rotary is not None
        plain, turned = query.split(self.dims[:2], dim=-1)
        turned, key = self.rotary.rotate(turned, key, positions)
        return torch.cat((plain, turned), dim=-1), key

    def _keys_and_values(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys [seq, batch, heads / TP, d + p] and the values of this rank's heads. latent: [seq
        / CP, batch, r]. shared_key: [seq / CP, batch, 1, p]."""
        gathered = gather_from_sequence(torch.cat((latent, shared_key.squeeze(2)), dim=-1), self.cp_group)
        latent, shared = gathered.split((self.kv_rank, self.dims[1]), dim=-1)
        projected = self.kv_up_proj.multiply(latent).unflatten(-1, (-1, self.dims[0] + self.dims[2]))
        key, value = projected.split((self.dims[0], self.dims[2]), dim=-1)
        shared = shared.unsqueeze(2).expand(*key.shape[:3], -1)
        return torch.cat((key, shared), dim=-1), value
