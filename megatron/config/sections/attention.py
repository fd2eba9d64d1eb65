"""Variants of the attention, and the soft-capping of scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import Section, flag
from megatron.config.sections.layer_pattern import NO_ROTARY

_CAP: dict[str, Any] = {"above": 0, "metavar": "X"}
_NO_ALIBI = {"model.position_embedding_type=alibi": "ALiBi's bias would be added to scores that have a limit"}
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """What the attention does beyond softmax(query @ key.T * scale) @ value. The first three names and
    defaults are Megatron-LM's; the others are Hugging Face's and Megatron-Bridge's."""

    group: ClassVar[str] = "attention variants"

    softmax_type: str = flag(
        "vanilla",
        choices=SOFTMAX_TYPES,
        summary="{} softmax",
        help="denominator of the attention's softmax. A sink is one more score without a value, so that a "
        "head can attend to nothing\n"
        "vanilla: the sum of exp(score)\n"
        "off-by-one: with a sink of 0, which adds 1\n"
        "learnable: with a learned sink for each head, as in gpt-oss",
    )
    attention_output_gate: bool = flag(
        False,
        summary="attention output gate",
        help="multiply the attention's output by the sigmoid of a gate, before the output projection. The "
        "projection to queries, keys and values then also has the gate, which has the size of the queries",
    )
    no_rope_freq: tuple[str, ...] | None = flag(
        None,
        nargs="+",
        metavar="R|N",
        group="rotary embeddings",
        summary="rotary layers {}",
        help="layers without rotary embeddings, as in R R R N: an R has them, an N has none, and the letters "
        "are repeated to --num-layers (default: all layers have them). Megatron-LM's N (every Nth layer has "
        "none) and its lists, such as ([0]*3+[1])*8, are accepted, too",
        changes_layer_time=False,
        needs={"model.position_embedding_type=rotary": "other position embeddings are not in the layers"},
    )
    attn_logit_softcapping: float | None = flag(
        None,
        summary="scores capped at {:g}",
        help="limit the attention scores to (-X, X): X * tanh(score / X), as in Gemma 2",
        excludes=_NO_ALIBI,
        **_CAP,
    )
    final_logit_softcapping: float | None = flag(
        None,
        summary="logits capped at {:g}",
        help="limit the logits of the LM head to (-X, X): X * tanh(logit / X), as in Gemma 2",
        **_CAP,
    )

    def has_rotary(self, layer: int) -> bool:
        """Returns whether rotary embeddings, if the model has them, apply to a transformer layer, counted
        from 0."""
        pattern = self.no_rope_freq
        return not pattern or pattern[layer % len(pattern)] != NO_ROTARY
