"""Describes each entry of the layer list for the partition, the planner and the FLOP counts.

A layer class describes itself: its method `describe` takes the arguments of its constructor (see
`pipeline_module.describe`). Transformer layers of one `LayerKind` have equal costs. A new kind of layer needs
a new `LayerKind`; the code that reads the descriptions needs no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from megatron.config import ModelConfig
from megatron.config.sections.layer_pattern import (
    BF16,
    DENSE,
    EXPERTS,
    FP8,
    FULL,
    NO_ROTARY,
    ROTARY,
    WINDOW,
)


@dataclass(frozen=True)
class LayerKind:
    """A kind of transformer layer.

    window: see --window-size. matrix_elements: number of elements of the layer's weight matrices.
    unused_elements: number of matrix elements that a token does not use, because they belong to experts that
    it does not choose. window_letter, expert_letter, fp8_letter, rotary_letter: the letter of this kind in
    --window-pattern, --moe-layer-freq, --fp8-layer-pattern and --no-rope-freq; '' without a pattern, without
    experts, and if all layers have one precision. window_parameters: whether the shapes of parameters may
    depend on whether a layer has a window. suffix: follows the class name in the names that
    --partition-method type:REGEX matches; '' if all layers are of one kind.
    """

    window: int | None
    matrix_elements: int
    unused_elements: int = 0
    window_letter: str = ""
    expert_letter: str = ""
    fp8_letter: str = ""
    rotary_letter: str = ""
    window_parameters: bool = False
    suffix: str = field(default="", compare=False)

    @property
    def has_experts(self) -> bool:
        """Whether the layer's MLP consists of experts."""
        return self.expert_letter == EXPERTS

    @property
    def active_elements(self) -> int:
        """Number of matrix elements that each token is multiplied by."""
        return self.matrix_elements - self.unused_elements

    @property
    def parameter_kind(self) -> LayerKind:
        """The kind that represents all kinds with equal parameters. It has no window, unless parameters
        depend on it."""
        if self.window_parameters:
            return self
        return replace(self, window=None, window_letter="", suffix="")

    def of(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with the settings of the layers of this kind."""
        return model.of_kind(has_window=self.window is not None)

    def keys(self, seq_length: int) -> int:
        """Returns the number of keys with which each query is multiplied."""
        return min(self.window or seq_length, seq_length)


def layer_kind(model: ModelConfig, layer: int) -> LayerKind:
    """Returns the kind of a transformer layer. layer: counted from 0."""
    hidden, matrices = model.hidden_size, 3 if model.glu_activation else 2
    attention = model.of_layer(layer).attention_matrices
    elements, unused = sum(n_out * n_in for n_out, n_in in attention.values()), 0
    window_letter = expert_letter = fp8_letter = rotary_letter = suffix = ""
    if model.window_pattern is not None:
        window_letter = WINDOW if model.has_window(layer) else FULL
        suffix += "@window" if model.has_window(layer) else "@full"
    if model.has_experts(layer):
        experts, shared = model.num_experts or 0, model.moe_shared_expert_intermediate_size or 0
        one = matrices * model.expert_hidden_size * hidden
        elements += experts * (hidden + one) + (matrices * shared + model.moe_shared_expert_gate) * hidden
        unused = (experts - model.moe_router_topk) * one
    else:
        elements += matrices * model.ffn_hidden_size * hidden
    if model.num_experts is not None:
        expert_letter = EXPERTS if model.has_experts(layer) else DENSE
        if len(model.moe_layer_freq) > 1:
            suffix += "@experts" if model.has_experts(layer) else "@dense"
    if model.first_last_layers_bf16 or model.fp8_layer_pattern:
        fp8_letter = BF16 if model.is_bf16_layer(layer) else FP8
        suffix += "@bf16" if fp8_letter == BF16 else "@fp8"
    if model.no_rope_freq is not None:
        rotary_letter = ROTARY if model.has_rotary(layer) else NO_ROTARY
        suffix += "@rotary" if model.has_rotary(layer) else "@no-rotary"
    window = model.window_size if model.has_window(layer) else None
    letters = (window_letter, expert_letter, fp8_letter, rotary_letter)
    return LayerKind(window, elements, unused, *letters, model.windows_have_own_parameters, suffix)


def layer_kinds(model: ModelConfig) -> list[LayerKind]:
    """Returns the kinds of all transformer layers."""
    return [layer_kind(model, layer) for layer in range(model.num_layers)]


def settings_for_kinds(kinds: Sequence[LayerKind]) -> dict[str, Any]:
    """Returns the model settings for transformer layers of these kinds: 'section.field' -> value."""
    windows = tuple(letter for kind in kinds if (letter := kind.window_letter))
    experts = tuple(letter for kind in kinds if (letter := kind.expert_letter))
    precisions = tuple(letter for kind in kinds if (letter := kind.fp8_letter))
    rotary = tuple(letter for kind in kinds if (letter := kind.rotary_letter))
    return {
        "model.num_layers": len(kinds),
        "model.window_pattern": windows or None,
        "model.moe_layer_freq": experts or (EXPERTS,),
        "model.fp8_layer_pattern": precisions or None,
        "model.no_rope_freq": rotary or None,
    }


def period(kinds: Sequence[LayerKind]) -> int:
    """Returns the number of layers after which the kinds repeat. If they do not repeat, this is the number of
    all layers."""
    halves = range(1, len(kinds) // 2 + 1)
    return next((n for n in halves if kinds[n:] == kinds[: len(kinds) - n]), len(kinds))


class Role(Enum):
    """What an entry of the layer list does. The value of the enumeration is the entry's title in reports."""

    FUNCTION = ""
    EMBEDDING = "embedding"
    TRANSFORMER = "transformer layer"
    NORM = "final norm"
    HEAD = "LM head"
    MULTI_TOKEN = "multi-token prediction"


@dataclass(frozen=True)
class LayerDescription:
    """An entry of the layer list.

    name: the class or function of the entry. kind: the kind of a transformer layer, otherwise None. is_tied:
    whether the layer uses the weight of the input embedding.
    """

    name: str
    role: Role = Role.FUNCTION
    kind: LayerKind | None = None
    is_tied: bool = False

    @property
    def has_transformer_layer(self) -> bool:
        """Whether the entry is a transformer layer or contains one."""
        return self.role in (Role.TRANSFORMER, Role.MULTI_TOKEN)

    @property
    def title(self) -> str:
        """The entry's title in reports; '' for a function between layers."""
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
