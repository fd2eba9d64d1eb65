"""The architecture of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, flag
from megatron.config.registries import (
    ACTIVATIONS,
    GLU_ACTIVATIONS,
    LAYER_ARRANGEMENTS,
    NORMALIZATIONS,
    POSITION_EMBEDDINGS,
    QK_NORMS,
    ROPE_SCALINGS,
)
from megatron.config.sections.attention_sizes import AttentionSizes
from megatron.config.sections.experts import SIZE, ExpertConfig
from megatron.config.sections.fp8_layers import Fp8LayerConfig
from megatron.config.sections.layer_pattern import (
    BF16,
    EXPERT_PATTERN,
    FP8_PATTERN,
    ROTARY_PATTERN,
    WINDOW_PATTERN,
)
from megatron.config.sections.multi_token import MultiTokenConfig
from megatron.errors import ConfigError

_MUP_FLAG: dict[str, Any] = {"group": "initialization", "used_with": ("model.mup",)}
_VOCABULARY: dict[str, Any] = {
    **{"changes_model": False, "changes_layer_time": False},
    **{"at_least": 1, "at_most": 2**31 - 1},
}
_ROPE_SCALING_FLAG: dict[str, Any] = {"group": "rotary embeddings", "changes_layer_time": False}

_ROTARY_PERCENT: dict[str, Any] = {"group": "rotary embeddings", "above": 0, "at_most": 1}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AttentionSizes, ExpertConfig, Fp8LayerConfig, MultiTokenConfig):
    """Sizes and variants of the GPT. Two runs with equal ModelConfigs have parameters of equal shapes.

    The arguments of `flag` are the only description of a field. The command line, checkpoints, summaries,
    profiles of layer times and conversions read this description.
    """

    group: ClassVar[str] = "network size"
    changes_model: ClassVar[bool] = True

    num_layers: int = flag(
        help="number of transformer layers",
        at_least=1,
        at_most=100_000,
        changes_layer_time=False,
        group=COMMON_FLAGS,
    )
    hidden_size: int = flag(
        help="hidden size of the transformer", at_least=1, at_most=2**20, group=COMMON_FLAGS
    )
    ffn_hidden_size: int = flag(
        derived="4 x hidden size",
        help="hidden size of the MLP; with --glu-activation, the size of the gate and of the value",
        **SIZE,
    )
    num_attention_heads: int = flag(
        help="number of attention heads", at_least=1, at_most=2**16, group=COMMON_FLAGS
    )
    kv_channels: int = flag(
        derived="hidden size / heads",
        at_least=1,
        at_most=2**20,
        help="dimension of each attention head",
        unused_with=("model.multi_latent_attention",),
    )
    group_query_attention: bool = flag(
        False,
        summary="grouped-query attention",
        help="use grouped-query attention (arXiv:2305.13245): --num-query-groups key and value heads, each "
        "shared by an equal number of query heads",
    )
    num_query_groups: int = flag(
        1,
        at_least=1,
        at_most=2**16,
        summary="{} query groups",
        help="number of key and value heads with --group-query-attention; 1 is multi-query attention",
        needs={"model.group_query_attention": ""},
    )
    qk_layernorm: bool = flag(
        False,
        summary="query and key norms",
        help="normalize queries and keys before rotary embeddings are applied (arXiv:2302.05442)",
    )
    qk_layernorm_scope: str = flag(
        "head",
        choices=QK_NORMS,
        unused_with=("model.multi_latent_attention",),
        summary="over the {}",
        help="what --qk-layernorm normalizes as one vector",
        excludes={"model.apply_layernorm_1p": "norms over all heads have no 1 + weight"},
        needs={"model.qk_layernorm": "", "model.normalization=RMSNorm": "norms over all heads are RMS norms"},
    )
    softmax_scale: float | None = flag(
        None,
        above=0.0,
        summary="softmax scale {}",
        help="multiplier of the attention scores (default: 1 / sqrt(head dimension); with --mup: "
        "--mup-attn-mult / head dimension)",
        changes_layer_time=False,
    )
    window_size: int | None = flag(
        None,
        metavar="TOKENS",
        summary="window of {} tokens",
        help="use sliding-window attention: each token attends to itself and to the TOKENS - 1 tokens "
        "before it (default: to all tokens before it). Megatron-LM's LEFT,0 does not count the token "
        "itself: give LEFT + 1",
        **SIZE,
    )
    window_pattern: tuple[str, ...] | None = flag(
        None,
        nargs="+",
        metavar="W|F",
        summary="layers {}",
        help="layers with the window of --window-size, as in W W W F: a W is a layer with the window, an F "
        "is a layer that attends to the whole sequence, and the letters are repeated to --num-layers "
        "(default: all layers have the window). --rope-scaling-type then applies only to the layers without "
        "a window, unless --window-rope-scaling is given. Megatron-LM's --window-attn-skip-freq N (every "
        "Nth layer is an F) and its lists are accepted, too",
        changes_layer_time=False,
        needs={"model.window_size": ""},
    )
    seq_length: int = flag(changes_model=False, help="sequence length in tokens", group=COMMON_FLAGS, **SIZE)
    max_position_embeddings: int = flag(
        derived="--seq-length",
        help="maximum sequence length in tokens; with absolute positions, the number of position embeddings",
        changes_layer_time=False,
        **SIZE,
    )
    position_embedding_type: str = flag(
        "absolute",
        choices=POSITION_EMBEDDINGS,
        spellings={"rope": "rotary", "learned_absolute": "absolute"},
        help="type of position embeddings",
    )
    rotary_base: float = flag(
        10000.0,
        above=1,
        group="rotary embeddings",
        summary="rotary base {:g}",
        help="base of the rotary frequencies base^(-2i / dimension); Hugging Face calls it rope_theta",
        changes_layer_time=False,
    )
    window_rotary_base: float | None = flag(
        None,
        above=1,
        group="rotary embeddings",
        summary="rotary base {:g} in windows",
        help="with --window-pattern: rotary base of the layers with a window (default: --rotary-base)",
        changes_layer_time=False,
        needs={"model.window_pattern": ""},
    )
    rotary_percent: float = flag(
        1.0,
        summary="{:.0%} of each head rotated",
        help="fraction of each head's dimension that is rotated, above 0 and at most 1",
        **_ROTARY_PERCENT,
    )
    window_rotary_percent: float | None = flag(
        None,
        summary="{:.0%} of each head rotated in windows",
        help="with --window-pattern: fraction of each head's dimension that is rotated in the layers with a "
        "window (default: --rotary-percent)",
        needs={"model.window_pattern": ""},
        **_ROTARY_PERCENT,
    )
    rotary_interleaved: bool = flag(
        False,
        group="rotary embeddings",
        unused_with=("model.multi_latent_attention",),
        summary="interleaved rotation",
        help="rotate pairs of neighboring elements (2i, 2i + 1), as in the RoPE paper (without the flag: "
        "pairs (i, i + dimension / 2))",
    )
    rope_scaling_type: str | None = flag(
        None,
        choices=ROPE_SCALINGS,
        summary="{} RoPE scaling",
        help="scale the rotary frequencies for a context longer than the original context of the model "
        "(default: no scaling)",
        **_ROPE_SCALING_FLAG,
    )
    rope_scaling_factor: float = flag(
        8.0,
        at_least=1,
        summary="scaling factor {:g}",
        help="with --rope-scaling-type: length of the new context divided by the original length",
        **_ROPE_SCALING_FLAG,
    )
    rope_original_max_position_embeddings: int = flag(
        8192,
        help="with --rope-scaling-type llama3 or yarn: original context length in tokens, before scaling",
        **_ROPE_SCALING_FLAG,
        **SIZE,
    )
    rope_low_freq_factor: float = flag(
        1.0,
        above=0,
        help="with --rope-scaling-type llama3: frequencies with at most this many rotations in the original "
        "context are divided by --rope-scaling-factor",
        **_ROPE_SCALING_FLAG,
    )
    rope_high_freq_factor: float = flag(
        4.0,
        above=0,
        help="with --rope-scaling-type llama3: frequencies with at least this many rotations in the "
        "original context are unchanged",
        **_ROPE_SCALING_FLAG,
    )
    rope_beta_slow: float = flag(
        1.0,
        above=0,
        help="with --rope-scaling-type yarn: frequencies with fewer than this many rotations in the "
        "original context are divided by --rope-scaling-factor",
        **_ROPE_SCALING_FLAG,
    )
    rope_beta_fast: float = flag(
        32.0,
        above=0,
        help="with --rope-scaling-type yarn: frequencies with more than this many rotations in the original "
        "context are unchanged",
        **_ROPE_SCALING_FLAG,
    )
    rope_exact_range: bool = flag(
        False,
        summary="exact YaRN range",
        help="with --rope-scaling-type yarn: interpolate between the exact indices of --rope-beta-fast and "
        "--rope-beta-slow, as in gpt-oss (without the flag, the indices are rounded outwards)",
        **_ROPE_SCALING_FLAG,
    )
    window_rope_scaling: bool = flag(
        False,
        summary="scaling in windows",
        help="with --window-pattern: --rope-scaling-type applies also to the layers with a window",
        needs={"model.window_pattern": "", "model.rope_scaling_type": ""},
        **_ROPE_SCALING_FLAG,
    )
    # Layer times depend only on the padded vocabulary size, which layer_times.py records.
    vocab_size: int | None = flag(
        None,
        help="vocabulary size before padding. It is required if no tokenizer is given, for example with "
        "--dry-run",
        **_VOCABULARY,
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        help="pad the vocabulary size to a multiple of N x tensor-parallel size",
        **_VOCABULARY,
        unused_with=("model.pad_vocab_size_to",),
    )
    pad_vocab_size_to: int | None = flag(
        None,
        help="pad the vocabulary to exactly this size, independent of the tensor-parallel size (default: "
        "see --make-vocab-size-divisible-by)",
        **_VOCABULARY,
    )
    layernorm_epsilon: float = flag(1e-5, above=0, help="epsilon of all norms", changes_layer_time=False)
    embed_layernorm: bool = flag(False, summary="embedding norm", help="apply a norm to the word embeddings")
    normalization: str = flag(
        "LayerNorm",
        choices=NORMALIZATIONS,
        spellings={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
        summary="{}",
        help="type of all norms in the model",
    )
    apply_layernorm_1p: bool = flag(
        False,
        summary="zero-centered norms",
        help="multiply by 1 + weight in all norms, as in Gemma (without the flag: by the weight). The "
        "weights are initialized to 0",
    )
    scale_embeddings: bool = flag(
        False,
        summary="scaled embeddings",
        help="multiply the word embeddings by the square root of --hidden-size, rounded to the precision of "
        "the run, as in Gemma",
    )
    logit_scale: float = flag(
        1.0,
        above=0,
        summary="logits x {:g}",
        help="multiplier of the logits, as in Cohere's models",
        changes_layer_time=False,
    )
    layer_arrangement: str = flag(
        "pre-norm",
        choices=LAYER_ARRANGEMENTS,
        summary="{} layers",
        help="order of norms, attention and MLP in a transformer layer",
    )
    activation: str = flag(
        "gelu",
        choices=ACTIVATIONS,
        summary="{}",
        help="activation function of the MLP",
        unused_with=("model.glu_activation",),
    )
    glu_activation: str | None = flag(
        None,
        choices=GLU_ACTIVATIONS,
        summary="{}",
        help="use a gated MLP with this activation function of the gate, instead of --activation (default: "
        "no gate)",
    )
    activation_func_clamp_value: float | None = flag(
        None,
        above=0,
        summary="clamped at {:g}",
        help="with --glu-activation: limit the gate to at most X and the value to the range -X to X, before "
        "the activation (default: no limit)",
        needs={"model.glu_activation": ""},
        changes_layer_time=False,
    )
    glu_linear_offset: float = flag(
        0.0,
        summary="offset {:g}",
        help="with --glu-activation: number that is added to the value: (value + X) * activation(gate)",
        needs={"model.glu_activation": ""},
        changes_layer_time=False,
    )
    disable_bias_linear: bool = flag(False, summary="no biases", help="use linear layers without bias")
    add_qkv_bias: bool = flag(
        False,
        summary="QKV bias",
        help="with --disable-bias-linear: keep the bias of the query, key and value projection",
        used_with=("model.disable_bias_linear",),
    )
    untie_embeddings_and_output_weights: bool = flag(
        False,
        summary="untied LM head",
        help="give the LM head its own weight, instead of sharing the word embeddings",
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False,
        summary="residual after norm",
        help="take the residual connection from the output of the norm (without the flag: from its input)",
    )
    init_method_std: float = flag(
        0.02,
        changes_model=False,
        above=0,
        group="initialization",
        help="standard deviation of the normal distribution that initializes the weights",
        changes_layer_time=False,
    )
    mup: bool = flag(
        False,
        group="initialization",
        help="use maximal update parametrization for Adam (muP, arXiv:2203.03466), with which "
        "hyperparameters transfer from a narrow model to a wide one. With W = hidden size / "
        "--mup-base-hidden-size, the weight matrices of transformer layers are initialized with "
        "--init-method-std / sqrt(W) and trained with --lr / W. The logits are multiplied by "
        "--mup-output-mult / W, and the attention scores by --mup-attn-mult / head dimension",
        needs={"optimizer.optimizer=adam|optimizer.optimizer=adamw": "muP's learning rates hold for Adam"},
        excludes={"model.softmax_scale": "muP's scale is --mup-attn-mult / head dimension, which can be set"},
    )
    mup_base_hidden_size: int = flag(
        1,
        at_least=1,
        help="with --mup: hidden size for which initialization and learning rates do not change",
        **_MUP_FLAG,
    )
    mup_input_mult: float = flag(
        1.0, above=0, help="with --mup: multiplier of the embedding output", **_MUP_FLAG
    )
    mup_output_mult: float = flag(1.0, above=0, help="with --mup: multiplier of the logits", **_MUP_FLAG)
    mup_attn_mult: float = flag(
        1.0, above=0, help="with --mup: multiplier of the attention scores", **_MUP_FLAG
    )
    hidden_dropout: float = flag(
        0.1,
        changes_model=False,
        at_least=0,
        below=1,
        group="regularization",
        help="dropout probability of the embeddings and of the attention and MLP outputs",
    )
    attention_dropout: float = flag(
        0.1,
        changes_model=False,
        at_least=0,
        below=1,
        group="regularization",
        help="dropout probability of the attention weights. Without the Triton kernels (on CPUs, and on "
        "GPUs below compute capability 8.0), a value above 0 makes the memory grow with the square of the "
        "sequence length; --recompute-granularity selective avoids this growth",
    )

    @property
    def normalizes_inputs(self) -> bool:
        """Returns whether attention and MLP read the output of a norm."""
        return "input_layernorm" in LAYER_ARRANGEMENTS[self.layer_arrangement].norms

    def is_bf16_layer(self, layer: int) -> bool:
        """Returns whether a transformer layer computes in bf16 in an FP8 run. layer: index, counted from
        0."""
        if self.fp8_layer_pattern is not None:
            return self.fp8_layer_pattern[layer % len(self.fp8_layer_pattern)] == BF16
        inner = range(self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16)
        return self.first_last_layers_bf16 and layer not in inner

    @property
    def width_ratio(self) -> float:
        """Returns the hidden size divided by the base hidden size of --mup; 1 without --mup."""
        return self.hidden_size / self.mup_base_hidden_size if self.mup else 1.0

    @property
    def matrix_init_std(self) -> float:
        """Returns the standard deviation of the initial weight matrices in transformer layers."""
        return self.init_method_std / math.sqrt(self.width_ratio)

    @property
    def output_init_std(self) -> float:
        """Returns the standard deviation of the initial weight matrices whose output is added to the residual
        stream. It decreases with the number of layers, so that the variance of the stream does not grow (as
        in GPT-2)."""
        return self.matrix_init_std / math.sqrt(2.0 * self.num_layers)

    @property
    def matrix_lr_mult(self) -> float:
        """Returns the multiplier of the learning rate of the weight matrices in transformer layers."""
        return 1.0 / self.width_ratio

    @property
    def embedding_multiplier(self) -> float:
        """Returns the multiplier of the embedding output."""
        return self.mup_input_mult if self.mup else 1.0

    @property
    def logits_multiplier(self) -> float:
        """Returns the multiplier of the logits."""
        return self.logit_scale * (self.mup_output_mult / self.width_ratio if self.mup else 1.0)

    def derive(self) -> dict[str, Any]:
        derived: dict[str, Any] = {}
        if self.ffn_hidden_size is None:
            derived["ffn_hidden_size"] = 4 * self.hidden_size
        if self.multi_latent_attention:
            derived["kv_channels"] = self.latent_head_dim
        elif self.kv_channels is None:
            derived["kv_channels"] = self.hidden_size // self.num_attention_heads
            if self.hidden_size % self.num_attention_heads:
                derived["kv_channels"] = ConfigError(
                    f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                    f"{self.num_attention_heads}: change one of them, or set --kv-channels"
                )
        if self.num_experts == 1:
            derived["num_experts"] = None
        elif self.num_experts is not None and self.moe_ffn_hidden_size is None:
            derived["moe_ffn_hidden_size"] = derived.get("ffn_hidden_size", self.ffn_hidden_size)
        patterns = {
            **{"window_pattern": WINDOW_PATTERN, "no_rope_freq": ROTARY_PATTERN},
            **{"moe_layer_freq": EXPERT_PATTERN, "fp8_layer_pattern": FP8_PATTERN},
        }
        for name, syntax in patterns.items():
            if (words := getattr(self, name)) is not None:
                try:
                    derived[name] = syntax.parse(words, self.num_layers)
                except ConfigError as error:
                    derived[name] = error
        if self.max_position_embeddings is None:
            derived["max_position_embeddings"] = self.seq_length
        return derived
