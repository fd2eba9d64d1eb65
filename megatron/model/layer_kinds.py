"""What an entry of the layer list is, for the partition, the planner and the counts of FLOPs.

A layer class describes itself: its method `describe` has the arguments of its constructor (see
`pipeline_module.describe`). Transformer layers of one `LayerKind` have equal costs. A new kind of layer needs
a `LayerKind`; what reads the descriptions does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron.config import ModelConfig
from megatron.config.sections.window_pattern import FULL, WINDOW


@dataclass(frozen=True)
class LayerKind:
    """A kind of transformer layer.

    letter: stands for the kind in --window-pattern. suffix: follows the class name in the names that
    --partition-method type:REGEX matches; '' if all layers are of one kind. window: see --window-size.
    matrix_elements: number of elements in the layer's weight matrices.
    """

    letter: str
    suffix: str
    window: int | None
    matrix_elements: int

    @property
    def without_window(self) -> LayerKind:
        """The kind with equal parameters that has no window."""
        return replace(self, letter=FULL, suffix="", window=None)

    def keys(self, seq_length: int) -> int:
        """Returns the number of keys with which each query is multiplied."""
        return min(self.window or seq_length, seq_length)


def layer_kind(model: ModelConfig, layer: int) -> LayerKind:
    """Returns the kind of a transformer layer, counted from 0."""
    attention = 2 * model.query_width + 2 * model.key_width
    mlp = (3 if model.glu_activation else 2) * model.ffn_hidden_size
    elements = (attention + mlp) * model.hidden_size
    has_window = model.has_window(layer)
    window = model.window_size if has_window else None
    if model.window_pattern is None:
        return LayerKind(WINDOW, "", window, elements)
    letter, suffix = (WINDOW, "@window") if has_window else (FULL, "@full")
    return LayerKind(letter, suffix, window, elements)


def layer_kinds(model: ModelConfig) -> list[LayerKind]:
    """Returns the kinds of all transformer layers."""
    return [layer_kind(model, layer) for layer in range(model.num_layers)]


def settings_for_kinds(kinds: Sequence[LayerKind]) -> dict[str, Any]:
    """Returns the settings of a model with transformer layers of these kinds: 'section.field' -> value."""
    pattern = tuple(kind.letter for kind in kinds) if any(kind.suffix for kind in kinds) else None
    return {"model.num_layers": len(kinds), "model.window_pattern": pattern}


def period(kinds: Sequence[LayerKind]) -> int:
    """Returns the number of layers after which the kinds repeat."""
    return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[: len(kinds) - n])


class Role(Enum):
    """What an entry of the layer list does. The value is its title in reports."""

    FUNCTION = ""
    EMBEDDING = "embedding"
    TRANSFORMER = "transformer layer"
    NORM = "final norm"
    HEAD = "LM head"


@dataclass(frozen=True)
class LayerDescription:
    """An entry of the layer list.

    name: its class or function. kind: of a transformer layer. is_tied: whether a head has the weight of the
    embedding.
    """

    name: str
    role: Role = Role.FUNCTION
    kind: LayerKind | None = None
    is_tied: bool = False

    @property
    def title(self) -> str:
        """Its title in reports; '' for a function between layers."""
        return self.role.value

    @property
    def type_name(self) -> str:
        """The name that --partition-method type:REGEX matches."""
        return self.name + (self.kind.suffix if self.kind else "")

    @property
    def time_name(self) -> str:
        """The name of the layer's time in a file of --partition-profile."""
        is_last = {Role.EMBEDDING: "@first", Role.HEAD: "@last" * self.is_tied}
        return self.type_name + is_last.get(self.role, "")


def embedding_and_head(layers: Sequence[LayerDescription]) -> tuple[int, int]:
    """Returns the indices of the input embedding and of the head."""
    roles = [layer.role for layer in layers]
    return roles.index(Role.EMBEDDING), roles.index(Role.HEAD)


def transformer_layers(layers: Sequence[LayerDescription]) -> range:
    """Returns the indices of the transformer layers."""
    roles = [layer.role for layer in layers]
    first = roles.index(Role.TRANSFORMER)
    return range(first, first + roles.count(Role.TRANSFORMER))
