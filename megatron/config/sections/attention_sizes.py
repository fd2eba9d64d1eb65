"""Sizes of the attention that follow from the settings of the model."""

from __future__ import annotations

import math

from megatron.config.sections.attention import AttentionConfig
from megatron.config.sections.latent_attention import LatentAttentionConfig, yarn_mscale


class AttentionSizes(AttentionConfig, LatentAttentionConfig):
    """Base class of ModelConfig, whose fields it reads."""

    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    group_query_attention: bool
    num_query_groups: int
    rotary_percent: float
    disable_bias_linear: bool
    add_qkv_bias: bool
    mup: bool
    mup_attn_mult: float
    softmax_scale: float | None
    rope_scaling_type: str | None
    rope_scaling_factor: float

    @property
    def query_groups(self) -> int:
        """Number of key heads, and of value heads. Without grouped queries, the number of query heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def heads_problem(self, tp_size: int) -> str | None:
        """Returns why the tensor-parallel ranks cannot have whole query groups or equal parts of one, and the
        remedy; None if they can."""
        heads, groups = self.num_attention_heads, self.query_groups
        rows = 2 * self.kv_channels * groups
        if heads % tp_size:
            return (
                f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp_size}: "
                "change one of them"
            )
        if heads % groups:
            return (
                f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}, each group "
                "has the same number of heads: change one of them"
            )
        if groups % tp_size and tp_size % groups:
            return (
                f"--num-query-groups {groups} with --tensor-model-parallel-size {tp_size}: expected one to "
                "be a multiple of the other, so that a rank has whole groups or a part of one: change one of "
                "them"
            )
        if tp_size > groups and rows % tp_size:
            return (
                f"--num-query-groups {groups} and a head dimension of {self.kv_channels} make {rows} rows of "
                f"keys and values, which are not divisible by --tensor-model-parallel-size {tp_size}: "
                "decrease the tensor-parallel size"
            )
        return None

    @property
    def query_width(self) -> int:
        """Total size of the query heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def output_width(self) -> int:
        """Size of the attention's output: a value head for each query head."""
        return self.num_attention_heads * (
            self.v_head_dim if self.multi_latent_attention else self.kv_channels
        )

    @property
    def attention_head_dim(self) -> int:
        """Size of the heads for which attention kernels compute: latent attention pads the smaller ones."""
        return max(self.kv_channels, self.output_width // self.num_attention_heads)

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """Name of each linear layer of an attention layer -> (size of its output, size of its input)."""
        if self.multi_latent_attention:
            return self.latent_matrices(self.hidden_size, self.num_attention_heads)
        projected = (1 + self.attention_output_gate) * self.query_width + 2 * self.key_width
        return {
            "query_key_value": (projected, self.hidden_size),
            "dense": (self.hidden_size, self.output_width),
        }

    @property
    def key_width(self) -> int:
        """Total size of the key heads, and of the value heads."""
        return self.query_groups * self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements in each head."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent)

    @property
    def qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def attention_scale(self) -> float:
        """Multiplier of the attention scores."""
        default = self.mup_attn_mult / self.kv_channels if self.mup else 1.0 / math.sqrt(self.kv_channels)
        if self.multi_latent_attention and self.rope_scaling_type == "yarn":
            default *= yarn_mscale(self.rope_scaling_factor, self.mscale_all_dim) ** 2
        return default if self.softmax_scale is None else self.softmax_scale
