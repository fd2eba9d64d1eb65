"""Sizes of the attention that follow from the settings of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from megatron.config.fields import option_name
from megatron.config.sections.attention import AttentionConfig
from megatron.config.sections.latent_attention import LatentAttentionConfig, yarn_mscale
from megatron.config.sections.layer_pattern import WINDOW

_WINDOW_PARAMETERS = ("num_attention_heads", "num_query_groups", "kv_channels", "softmax_type")
_WINDOW_FIELDS = (*_WINDOW_PARAMETERS, "rotary_base", "rotary_percent")
"""Fields that a field window_NAME replaces in the layers with a window."""


class AttentionSizes(AttentionConfig, LatentAttentionConfig):
    """Properties of the attention: a base class of ModelConfig, which defines the fields that it reads."""

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
    window_size: int | None
    window_pattern: tuple[str, ...] | None
    window_rope_scaling: bool

    def has_window(self, layer: int) -> bool:
        """Returns whether a transformer layer has the window of --window-size. layer: index, counted from
        0."""
        pattern = self.window_pattern
        return self.window_size is not None and (not pattern or pattern[layer % len(pattern)] == WINDOW)

    def of_layer(self, layer: int) -> Self:
        """Returns the model with the settings of one transformer layer, see `of_kind`. layer: index, counted
        from 0."""
        return self.of_kind(self.has_window(layer))

    def of_kind(self, has_window: bool) -> Self:
        """Returns the model with the attention sizes and rotation of one kind of layers. has_window: whether
        these are the layers with a window."""
        return self._window_model if has_window and self.window_pattern is not None else self

    @cached_property
    def _window_model(self) -> Self:
        own = {name: value for name in _WINDOW_FIELDS if (value := self._window_value(name)) is not None}
        if self.rope_scaling_type is not None and not self.window_rope_scaling:
            own["rope_scaling_type"] = None
        return replace(self, **own) if own else self

    def _window_value(self, name: str) -> Any:
        return getattr(self, f"window_{name}")

    def option_of(self, name: str, has_window: bool) -> str:
        """Returns the flag that sets a field in the layers with a window, or in the layers without one."""
        own = has_window and self._window_value(name) is not None
        return option_name(f"window_{name}" if own else name)

    @property
    def windows_have_own_parameters(self) -> bool:
        """Returns whether the layers with a window may have parameters whose shapes differ from the
        parameters of layers without a window."""
        return any(self._window_value(name) is not None for name in _WINDOW_PARAMETERS)

    @property
    def query_groups(self) -> int:
        """Returns the number of key heads, which is also the number of value heads. Without grouped queries
        it is the number of query heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def heads_problem(self, tp_size: int) -> str | None:
        """Returns a sentence with the remedy if the tensor-parallel ranks cannot have whole query groups or
        equal parts of one query group; None if they can."""
        problem = self._heads_problem(tp_size, False)
        return problem or self.of_kind(True)._heads_problem(tp_size, True)

    def _heads_problem(self, tp_size: int, has_window: bool) -> str | None:
        heads, groups, tensor = self.num_attention_heads, self.query_groups, "--tensor-model-parallel-size"
        rows = (self.kv_channels + self.value_channels) * groups
        of_heads, of_groups = (
            self.option_of(name, has_window) for name in ("num_attention_heads", "num_query_groups")
        )
        if heads % tp_size:
            return f"{of_heads} {heads} is not divisible by {tensor} {tp_size}: change one of them"
        if heads % groups:
            return (
                f"{of_heads} {heads} is not divisible by {of_groups} {groups}, each group has the same "
                "number of heads: change one of them"
            )
        if groups % tp_size and tp_size % groups:
            return (
                f"{of_groups} {groups} with {tensor} {tp_size}: expected one to be a multiple of the other, "
                "so that a rank has whole groups or a part of one: change one of them"
            )
        if tp_size > groups and rows % tp_size:
            return (
                f"{of_groups} {groups} and a head dimension of {self.kv_channels} make {rows} rows of keys "
                f"and values, which are not divisible by {tensor} {tp_size}: decrease the tensor-parallel "
                "size"
            )
        return None

    @property
    def query_width(self) -> int:
        """Returns the total size of the query heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def value_channels(self) -> int:
        """Returns the size of a value head."""
        return self.v_head_dim if self.multi_latent_attention else self.v_channels or self.kv_channels

    @property
    def output_width(self) -> int:
        """Returns the size of the attention's output, which has a value head for each query head."""
        return self.num_attention_heads * self.value_channels

    @property
    def attention_head_dim(self) -> int:
        """Returns the size of the heads in attention kernels. Smaller query, key or value heads are padded to
        it."""
        return max(self.kv_channels, self.value_channels)

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Returns the numbers of rows that the projection has for a group of heads: rows of the group's
        queries, with --attention-output-gate rows of their gates, rows of its key, rows of its value."""
        heads = self.num_attention_heads // self.query_groups
        gates = heads * (1 if self.attention_output_gate_scope == "head" else self.value_channels)
        return (
            heads * self.kv_channels,
            *(gates,) * self.attention_output_gate,
            self.kv_channels,
            self.value_channels,
        )

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """Returns a dictionary: name of each linear layer of an attention layer -> (output size, input
        size)."""
        if self.multi_latent_attention:
            return self.latent_matrices(self.hidden_size, self.num_attention_heads)
        return {
            "query_key_value": (self.query_groups * sum(self.group_rows), self.hidden_size),
            "dense": (self.hidden_size, self.output_width),
        }

    @property
    def key_width(self) -> int:
        """Returns the total size of the key heads."""
        return self.query_groups * self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Returns the number of rotated elements in each head."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent)

    @property
    def qkv_bias(self) -> bool:
        """Returns whether the projection to queries, keys and values has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def attention_scale(self) -> float:
        """Returns the multiplier of the attention scores."""
        default = self.mup_attn_mult / self.kv_channels if self.mup else 1.0 / math.sqrt(self.kv_channels)
        if self.multi_latent_attention and self.rope_scaling_type == "yarn":
            default *= yarn_mscale(self.rope_scaling_factor, self.mscale_all_dim) ** 2
        return default if self.softmax_scale is None else self.softmax_scale
