"""Multi-token prediction: layers that predict tokens after the next one, in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig(Section):
    """Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2). Names and defaults are
    Megatron-LM's."""

    group: ClassVar[str] = "multi-token prediction"

    mtp_num_layers: int | None = flag(
        None,
        at_least=1,
        at_most=64,
        summary="{} layers for multi-token prediction",
        changes_layer_time=False,
        help="number of layers for multi-token prediction (default: none). In training, layer k predicts "
        "the kth token after the next one, from the embeddings of the next k tokens and the hidden state of "
        "the layer before it. Each of these layers has a transformer layer like the model's last one, and "
        "shares the word embedding and the LM head. Evaluations and generated texts do not use them",
        excludes={
            "model.position_embedding_type=absolute": "the embedding of a later token has no position, as in "
            "Megatron-LM; set --position-embedding-type rotary or remove --mtp-num-layers",
            "model.embed_layernorm": "only the first stage has the norm after the embedding; remove one of "
            "the two",
            "training.cuda_graph_impl": "a graph has no layers of the loss; remove --cuda-graph-impl",
        },
    )
    mtp_loss_scaling_factor: float = flag(
        0.1,
        above=0,
        changes_model=False,
        changes_layer_time=False,
        help="factor of the mean loss of the --mtp-num-layers layers, which is added to the loss",
        needs={"model.mtp_num_layers": "no layer has such a loss; set --mtp-num-layers or remove the flag"},
    )

    def unused_fields(self) -> set[str]:
        return super().unused_fields() | (
            {"mtp_loss_scaling_factor"} if self.mtp_num_layers is None else set()
        )
