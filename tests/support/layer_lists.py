"""Descriptions of layer lists, for tests that need no model."""

from megatron.model.layer_kinds import LayerDescription, LayerKind, Role

LAYER = "ParallelTransformerLayerPipe"


def layer_list(layers: int, casts: bool = False, norm: str = "MixedFusedLayerNorm") -> list[LayerDescription]:
    """Returns a list with `layers` transformer layers and a tied head. casts: whether the model is in 16
    bits, with layers that cast."""
    kind = LayerKind(None, 400)
    return [
        LayerDescription("_to_float16"),
        LayerDescription("EmbeddingPipe", Role.EMBEDDING),
        LayerDescription("to_sequence_first"),
        *[LayerDescription(LAYER, Role.TRANSFORMER, kind)] * layers,
        LayerDescription("to_batch_first"),
        LayerDescription(norm, Role.NORM),
        LayerDescription("EmbeddingPipe", Role.HEAD, is_tied=True),
        *[LayerDescription("float16_to_fp32")] * casts,
    ]
