"""What checkpoint tools need to know of the pipeline's layer list and of dtypes. It imports only torch: the
model's modules import DeepSpeed and torch.compile, which takes seconds."""

import torch

FIRST_TRANSFORMER_LAYER = 3
TIED_EMBEDDING = "embed"
# Global names: the prefix of the embedding's parameters, and its weight, which is tied to the LM head.
EMBEDDING = f"tied_modules.{TIED_EMBEDDING}."
WORD_EMBEDDINGS = f"{EMBEDDING}word_embeddings.weight"


def final_norm_of(num_layers: int) -> int:
    """Returns the index of the final norm in the pipeline's layer list. An untied LM head follows it."""
    return FIRST_TRANSFORMER_LAYER + num_layers + 1


def first_mtp_layer_of(num_layers: int) -> int:
    """Returns the index of the first layer for multi-token prediction, after float16_to_fp32. The layers from
    there on belong to the loss: they do not follow the layers before them."""
    return final_norm_of(num_layers) + 3


def layer_number(layer_index: int, num_layers: int) -> int:
    """Returns the transformer layer, counted from 0, whose kind a layer of the list has: layers for
    multi-token prediction are of the last one's kind."""
    return min(layer_index - FIRST_TRANSFORMER_LAYER, num_layers - 1)


ONLY_IN_TRAINING = (".mlp.router.expert_load",)
"""Ends of the names of state that only --moe-router-load-balancing-type global_aux_loss has. No model needs
it: without it a run begins with its initial value."""

PARAMETER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
