"""The shape of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.errors import ConfigError
from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Sizes and variants of the GPT; two runs with equal ModelConfigs have equal parameters."""

    group: ClassVar[str] = "network size"

    num_layers: int = flag(help="number of transformer layers", at_least=1)
    hidden_size: int = flag(help="width of the residual stream", at_least=1)
    ffn_hidden_size: int = flag(
        derived="4 x hidden size",
        at_least=1,
        help="width inside the MLP; with --glu-activation that of each half",
    )
    num_attention_heads: int = flag(help="number of attention heads", at_least=1)
    kv_channels: int = flag(derived="hidden size / heads", at_least=1, help="width of one attention head")
    seq_length: int = flag(help="tokens per sample", group="data and dataloader", at_least=1)
    max_position_embeddings: int = flag(
        derived="--seq-length, but to be given for absolute positions",
        at_least=1,
        help="rows of the table of absolute positions: the longest sequence that the model can read",
    )
    position_embedding_type: str = flag(
        "absolute",
        choices=("absolute", "rotary", "alibi"),
        help="learnt table of positions, rotary embedding, or linear attention biases",
    )
    vocab_size: int | None = flag(
        None,
        at_least=1,
        help="true size of the vocabulary, where no tokenizer gives it (for example with --dry-run)",
    )
    make_vocab_size_divisible_by: int = flag(
        128, at_least=1, help="the vocabulary is padded to a multiple of this times the tensor-parallel size"
    )
    pad_vocab_size_to: int | None = flag(
        None,
        at_least=1,
        help="pad the vocabulary to exactly this size, which makes it the same for every layout",
    )
    layernorm_epsilon: float = flag(1e-5, above=0, help="added to the variance inside layer norms")
    embed_layernorm: bool = flag(False, help="a layer norm right after the word embedding")
    glu_activation: str | None = flag(
        None,
        choices=("geglu", "liglu", "reglu", "swiglu"),
        help="gated MLP with this activation in place of GELU",
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False, help="the residual branches off after the layer norm in place of before"
    )
    init_method_std: float = flag(
        0.02,
        above=0,
        group="initialization",
        help="standard deviation of the normal distribution of initial weights",
    )
    mup: bool = flag(
        False,
        group="initialization",
        help="maximal update parametrisation (Tensor Programs V, for Adam): settings found on a narrow "
        "model hold for a wide one. With W = hidden size / --mup-base-hidden-size, matrices of transformer "
        "layers start with a standard deviation of --init-method-std / sqrt(W) and learn at 1 / W of the "
        "rate, logits are multiplied by --mup-output-mult / W, attention scores by --mup-attn-mult / head "
        "width",
    )
    mup_base_hidden_size: int = flag(
        1,
        at_least=1,
        group="initialization",
        help="hidden size at which --mup changes neither start nor rate",
    )
    mup_input_mult: float = flag(
        1.0, above=0, group="initialization", help="with --mup, factor of the embedding's output"
    )
    mup_output_mult: float = flag(1.0, above=0, group="initialization", help="with --mup, see there")
    mup_attn_mult: float = flag(1.0, above=0, group="initialization", help="with --mup, see there")
    hidden_dropout: float = flag(
        0.1, at_least=0, below=1, group="regularization", help="dropout on the residual branches"
    )
    attention_dropout: float = flag(
        0.1,
        at_least=0,
        below=1,
        group="regularization",
        help="dropout on the attention probabilities; above 0 no fused kernel can be used, which takes "
        "longer, and memory of sequence length squared (--recompute-granularity selective gives it back)",
    )

    @property
    def width_ratio(self) -> float:
        """How many times as wide as the base of --mup the model is; 1 without --mup."""
        return self.hidden_size / self.mup_base_hidden_size if self.mup else 1.0

    @property
    def matrix_init_std(self) -> float:
        """Standard deviation of the initial matrices of transformer layers."""
        return self.init_method_std / math.sqrt(self.width_ratio)

    @property
    def matrix_rate_factor(self) -> float:
        """Factor of the learning rate of the matrices of transformer layers."""
        return 1.0 / self.width_ratio

    @property
    def embedding_multiplier(self) -> float:
        """Factor of what the embedding gives to the first transformer layer."""
        return self.mup_input_mult if self.mup else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor of query x key."""
        return self.mup_attn_mult / self.kv_channels if self.mup else 1.0 / math.sqrt(self.kv_channels)

    @property
    def logits_multiplier(self) -> float:
        """Factor of the logits."""
        return self.mup_output_mult / self.width_ratio if self.mup else 1.0

    def derive(self) -> dict[str, Any]:
        derived: dict[str, Any] = {}
        if self.ffn_hidden_size is None:
            derived["ffn_hidden_size"] = 4 * self.hidden_size
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                    f"{self.num_attention_heads}: change one of them, or give the head width as --kv-channels"
                )
            derived["kv_channels"] = self.hidden_size // self.num_attention_heads
        if self.max_position_embeddings is None:
            if self.position_embedding_type == "absolute":
                raise ConfigError(
                    "--position-embedding-type absolute without --max-position-embeddings: "
                    f"give the size of its table, at least --seq-length {self.seq_length}"
                )
            derived["max_position_embeddings"] = self.seq_length
        return derived
