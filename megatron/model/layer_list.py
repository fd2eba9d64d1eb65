"""The layer list's indices and names, and dtypes, for checkpoint tools. This module imports only torch, since
the model's modules import DeepSpeed and torch.compile, which takes seconds."""

import torch

FIRST_TRANSFORMER_LAYER = 3
TIED_EMBEDDING = "embed"
# Global names: the prefix of the embedding's parameters, and the embedding's weight, which a tied LM
# head uses.
EMBEDDING = f"tied_modules.{TIED_EMBEDDING}."
WORD_EMBEDDINGS = f"{EMBEDDING}word_embeddings.weight"


def final_norm_of(num_layers: int) -> int:
    """Returns the final norm's index in the layer list. An untied LM head has the next index."""
    return FIRST_TRANSFORMER_LAYER + num_layers + 1


def first_mtp_layer_of(num_layers: int) -> int:
    """Returns the index of the first layer for multi-token prediction, the one after float16_to_fp32. The
    loss runs this layer and all later ones: their input is not the output of the previous layer of the
    list."""
    return final_norm_of(num_layers) + 3


def layer_number(layer_index: int, num_layers: int) -> int:
    """Returns the number, counted from 0, of the transformer layer that determines the kind of a layer of the
    list. A layer for multi-token prediction has the kind of the last transformer layer."""
    return min(layer_index - FIRST_TRANSFORMER_LAYER, num_layers - 1)


ONLY_IN_TRAINING = (".mlp.router.expert_load",)
"""Name endings of states that exist only with --moe-router-load-balancing-type global_aux_loss. A checkpoint
may lack them: a run without them starts from their initial value."""

PARAMETER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
