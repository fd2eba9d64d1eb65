"""Multi-head latent attention (MLA): sizes of the compressed queries, keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron.config.fields import Section, flag

_SIZE: dict[str, Any] = {"at_least": 1, "at_most": 2**19}
_MLA = "model.multi_latent_attention"
_NEEDS: dict[str, Any] = {
    "needs": {
        _MLA: "it belongs to latent attention: add --multi-latent-attention, or remove the flag",
    }
}
_YARN: dict[str, Any] = {
    "needs": {**_NEEDS["needs"], "model.rope_scaling_type=yarn": "it is a factor of YaRN"},
    "changes_layer_time": False,
}


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(Section):
    """Multi-head latent attention of DeepSeek-V2 and V3. Names and defaults are Megatron-LM's."""

    group: ClassVar[str] = "latent attention"

    multi_latent_attention: bool = flag(
        False,
        summary="latent attention",
        help="use multi-head latent attention (arXiv:2405.04434, section 2.1): queries, keys and values are "
        "computed from compressed vectors, and one rotary key is shared by all heads. With --qk-layernorm "
        "the compressed vectors are normalized, as in all published models",
        needs={"model.position_embedding_type=rotary": "a part of each head is rotated"},
        excludes={
            "model.group_query_attention": "each head has keys and values of its own; remove "
            "--group-query-attention",
            "model.add_qkv_bias": "its projections have no bias; remove --add-qkv-bias",
            "model.rotary_percent": "it rotates --qk-pos-emb-head-dim elements; remove --rotary-percent",
            "model.window_rotary_percent": "it rotates --qk-pos-emb-head-dim elements; remove "
            "--window-rotary-percent",
            "model.attention_output_gate": "it has no gate; remove --attention-output-gate",
            "model.no_rope_freq": "it rotates in all layers; remove --no-rope-freq",
            "model.mup": "muP has no rule for compressed vectors; remove --mup",
        },
    )
    q_lora_rank: int | None = flag(
        None,
        summary="queries of rank {}",
        help="with --multi-latent-attention: size of the compressed queries (default: queries are not "
        "compressed)",
        **_NEEDS,
        **_SIZE,
    )
    kv_lora_rank: int = flag(
        32,
        summary="keys and values of rank {}",
        help="with --multi-latent-attention: size of the compressed keys and values",
        **_NEEDS,
        **_SIZE,
    )
    qk_head_dim: int = flag(
        128,
        summary="{} per query without rotation",
        help="with --multi-latent-attention: number of elements of each query and key head that are not "
        "rotated",
        **_NEEDS,
        **_SIZE,
    )
    qk_pos_emb_head_dim: int = flag(
        64,
        summary="{} with rotation",
        help="with --multi-latent-attention: number of rotated elements in each query head and in the key "
        "that all heads share; neighboring elements are rotated in pairs",
        **_NEEDS,
        **_SIZE,
    )
    v_head_dim: int = flag(
        128,
        summary="{} per value",
        help="with --multi-latent-attention: dimension of each value head",
        **_NEEDS,
        **_SIZE,
    )
    latent_layernorm_epsilon: float | None = flag(
        None,
        above=0,
        summary="their norms' epsilon {:g}",
        help="epsilon of the norms of compressed vectors (default: --layernorm-epsilon). All models in "
        "transformers use 1e-6",
        changes_layer_time=False,
        **_NEEDS,
    )
    mscale: float = flag(
        1.0,
        above=0,
        summary="mscale {:g}",
        help="with --rope-scaling-type yarn and its factor k: cosines and sines are multiplied by (0.1 X ln "
        "k + 1) / (0.1 Y ln k + 1), where X is --mscale and Y is --mscale-all-dim",
        **_YARN,
    )
    mscale_all_dim: float = flag(
        0.0,
        at_least=0,
        summary="mscale of all elements {:g}",
        help="with --rope-scaling-type yarn and its factor k: the attention scores are multiplied by (0.1 Y "
        "ln k + 1)^2, where Y is this number",
        **{
            **_YARN,
            "needs": {
                **_YARN["needs"],
                "model.window_rope_scaling|model.window_pattern=None": "the layers with a window would have "
                "no YaRN, but its multiplier of the scores",
            },
        },
    )

    @property
    def latent_head_dim(self) -> int:
        """Returns the size of a query head, which is also the size of a key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def latent_matrices(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Returns a dictionary: name of each linear layer of latent attention -> (output size, input size).

        hidden: hidden size. heads: number of heads.
        """
        rank, queries = self.q_lora_rank, heads * self.latent_head_dim
        of_queries = {"q_proj": (queries, hidden)}
        if rank is not None:
            of_queries = {"q_down_proj": (rank, hidden), "q_up_proj": (queries, rank)}
        return {
            **of_queries,
            "kv_down_proj": (self.kv_lora_rank + self.qk_pos_emb_head_dim, hidden),
            "kv_up_proj": (heads * (self.qk_head_dim + self.v_head_dim), self.kv_lora_rank),
            "dense": (hidden, heads * self.v_head_dim),
        }

    def yarn_multiplier(self, factor: float) -> float:
        """Returns the multiplier of cosines and sines for YaRN's scaling factor."""
        return yarn_mscale(factor, self.mscale) / yarn_mscale(factor, self.mscale_all_dim)

    def unused_fields(self) -> set[str]:
        unused = super().unused_fields()
        return unused if self.multi_latent_attention else unused | OPTIONS_OF_LATENT_ATTENTION


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns 0.1 mscale ln(factor) + 1 (DeepSeek's `yarn_get_mscale`)."""
    return 0.1 * mscale * math.log(factor) + 1.0


OPTIONS_OF_LATENT_ATTENTION = frozenset(field.name for field in fields(LatentAttentionConfig)) - {
    "multi_latent_attention"
}
"""Fields that have no effect without --multi-latent-attention."""
