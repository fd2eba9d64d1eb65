"""Variants of the attention, and the soft-capping of scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import Section, flag
from megatron.config.sections.layer_pattern import NO_ROTARY

_CAP: dict[str, Any] = {"above": 0, "metavar": "X"}
_NO_ALIBI = {"model.position_embedding_type=alibi": "ALiBi's bias would be added to scores that have a limit"}
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
GATE_SCOPES = ("element", "head")
GATE_ACTIVATIONS = ("sigmoid", "softplus")
_GATE: dict[str, Any] = {"needs": {"model.attention_output_gate": ""}}
_SIZE: dict[str, Any] = {"at_least": 1, "at_most": 2**16}
_NOT_LATENT = {"model.multi_latent_attention": "latent attention has sizes of its own"}
_WINDOW: dict[str, Any] = {"model.window_pattern": "only some layers can have other heads than the rest"}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """Variants of the attention, which change softmax(query @ key.T * scale) @ value. The names and defaults
    of the first three fields are Megatron-LM's, and the remaining ones are Hugging Face's and
    Megatron-Bridge's."""

    group: ClassVar[str] = "attention variants"

    softmax_type: str = flag(
        "vanilla",
        choices=SOFTMAX_TYPES,
        summary="{} softmax",
        help="denominator of the attention's softmax. A sink is an additional score without a value, with "
        "which a head can attend to nothing\n"
        "vanilla: the sum of exp(score)\n"
        "off-by-one: the sum and a sink of 0, which adds 1\n"
        "learnable: the sum and a learned sink for each head, as in gpt-oss",
    )
    attention_output_gate: bool = flag(
        False,
        summary="attention output gate",
        help="multiply the attention's output by the activation of a gate, before the output projection. "
        "The projection to queries, keys and values then also computes the gate",
    )
    attention_output_gate_scope: str = flag(
        "element",
        choices=GATE_SCOPES,
        summary="a gate per {}",
        help="what has a separate gate: each element of the attention's output, or each head",
        **_GATE,
    )
    attention_output_gate_activation: str = flag(
        "sigmoid",
        choices=GATE_ACTIVATIONS,
        summary="{} gate",
        help="activation function of the attention's output gate",
        **_GATE,
    )
    attention_value_scale: float = flag(
        1.0,
        above=0,
        summary="values x {:g}",
        help="multiplier of the attention's values, as in MiMo-V2; 1: values are not scaled",
        excludes=_NOT_LATENT,
    )
    v_channels: int | None = flag(
        None,
        summary="{} per value head",
        help="dimension of each value head in attention without --multi-latent-attention (default: "
        "--kv-channels)",
        excludes=_NOT_LATENT,
        **_SIZE,
    )
    window_num_attention_heads: int | None = flag(
        None,
        summary="{} heads in windows",
        help="with --window-pattern: number of attention heads of the layers with a window (default: "
        "--num-attention-heads)",
        needs=_WINDOW,
        **_SIZE,
    )
    window_num_query_groups: int | None = flag(
        None,
        summary="{} query groups in windows",
        help="with --window-pattern: number of key and value heads of the layers with a window (default: "
        "--num-query-groups)",
        needs={**_WINDOW, "model.group_query_attention": ""},
        **_SIZE,
    )
    window_kv_channels: int | None = flag(
        None,
        summary="heads of {} in windows",
        help="with --window-pattern: dimension of each attention head of the layers with a window (default: "
        "--kv-channels)",
        needs=_WINDOW,
        excludes=_NOT_LATENT,
        **_SIZE,
    )
    window_softmax_type: str | None = flag(
        None,
        choices=SOFTMAX_TYPES,
        summary="{} softmax in windows",
        help="with --window-pattern: --softmax-type of the layers with a window (default: --softmax-type)",
        needs={"model.window_pattern": ""},
    )
    no_rope_freq: tuple[str, ...] | None = flag(
        None,
        nargs="+",
        metavar="R|N",
        group="rotary embeddings",
        summary="rotary layers {}",
        help="layers without rotary embeddings, as in R R R N: an R is a layer with them, an N is a layer "
        "without them, and the letters are repeated to --num-layers (default: all layers have them). "
        "Megatron-LM's number N (every Nth layer has none) and its lists, such as ([0]*3+[1])*8, are "
        "accepted, too",
        changes_layer_time=False,
        needs={"model.position_embedding_type=rotary": "other position embeddings are not in the layers"},
    )
    attn_logit_softcapping: float | None = flag(
        None,
        summary="scores capped at {:g}",
        help="limit the attention scores to (-X, X): X * tanh(score / X), as in Gemma 2 (default: no limit)",
        excludes=_NO_ALIBI,
        **_CAP,
    )
    final_logit_softcapping: float | None = flag(
        None,
        summary="logits capped at {:g}",
        help="limit the logits of the LM head to (-X, X): X * tanh(logit / X), as in Gemma 2 (default: no "
        "limit)",
        **_CAP,
    )

    def has_rotary(self, layer: int) -> bool:
        """Returns whether rotary embeddings apply to a transformer layer, if the model has them. layer:
        index, counted from 0."""
        pattern = self.no_rope_freq
        return not pattern or pattern[layer % len(pattern)] != NO_ROTARY
