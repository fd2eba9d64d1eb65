"""How the models of one Hugging Face family map to ours.

A `Family` is a table of corresponding settings and parameters. `exporter` uses it to write a folder from a
checkpoint, and `importer` to write a checkpoint from a folder. families/ has the tables, registry.py a list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.fields import changes_model, option_name
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


EMBED = "tied_modules.embed"
WORD_EMBEDDINGS = f"{EMBED}.word_embeddings.weight"
"""Our name of the word embeddings, which are tied to the LM head."""

LM_HEAD = "lm_head.weight"
"""Their name of the LM head. Some files contain a tied one as well."""


# Of a part of a tensor. The check needs temporaries of twice the part's size.
_CHECKED_ELEMENTS = 2**24


def count_non_finite(values: Tensor) -> int:
    """How many numbers are NaN or infinite."""
    return sum(int((~part.isfinite()).sum()) for part in values.reshape(-1).split(_CHECKED_ELEMENTS))


@dataclass(frozen=True)
class Transform:
    """Conversion between one tensor of ours and one or more of theirs, with the model's sizes.

    slice_dim: a tensor-parallel shard of ours is made from equal slices of theirs along this dimension, with
    the number of heads and groups of one rank; None: not so, or in a dimension that depends on the parameter.
    """

    to_theirs: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    slice_dim: int | None = None
    of_groups: bool = False
    """Whether a slice must hold whole groups of heads: their keys and values have fewer rows."""


def one_to_one(
    to_theirs: Callable[[Tensor, ModelConfig], Tensor], to_ours: Callable[[Tensor, ModelConfig], Tensor]
) -> Transform:
    """Conversion between one tensor of ours and one of theirs."""
    return Transform(lambda x, model: [to_theirs(x, model)], lambda parts, model: to_ours(parts[0], model))


SAME = one_to_one(lambda x, model: x, lambda x, model: x)


@dataclass(frozen=True)
class Parameter:
    """A parameter's name in ours and its names in theirs. In ours `{layer}` is a transformer layer's index in
    the pipeline's list, `{final}` that of the final norm, `{head}` that of an untied LM head; in theirs
    `{block}` counts transformer layers from 0."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


def with_bias(
    ours: str, theirs: str, weight: Transform = SAME, bias: Transform = SAME
) -> tuple[Parameter, Parameter]:
    """The weight and the bias of a layer."""
    return (
        Parameter(f"{ours}.weight", (f"{theirs}.weight",), weight),
        Parameter(f"{ours}.bias", (f"{theirs}.bias",), bias),
    )


@dataclass(frozen=True)
class Conversion:
    """Settings that do not correspond one to one: fields of ModelConfig, their settings, and functions that
    give the values of the ones for those of the others. `to_ours` raises ConfigError. our_values: the values
    that a field of ours can have, if these are not all. check_file: raises ConfigError for settings of a
    config.json that transformers reads from elsewhere and that have another value there."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[ModelConfig], dict[str, Any]]
    to_ours: Callable[[PreTrainedConfig], dict[str, Any]]
    our_values: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    check_file: Callable[[Mapping[str, Any], PreTrainedConfig], None] = lambda _settings, _theirs: None


@dataclass(frozen=True)
class Family:
    """The mapping of one Hugging Face model type.

    fields: (field of ModelConfig, their setting). training_fields: the same for settings that only affect
    training; if two map to one field, the first is read. our_constants, their_constants: values that every
    model of the family has. our_derived: fields of ModelConfig that other fields determine. All other
    fields of ModelConfig that change the model have their defaults. conversions: other pairs of settings.
    our_training: values of settings that only affect training, for a run that starts from the model.
    default_seq_length: for a config.json without a length. head: the parameter of an untied LM head. prefix:
    of all their names except the head's; files that were saved without the head lack it. buffers: names in
    their files that are not weights and are ignored. ignored: their settings that do not change the model.
    aliases: names of weights in files of other versions of transformers -> names in the table.
    """

    title: str
    architecture: str
    fields: tuple[tuple[str, str], ...]
    training_fields: tuple[tuple[str, str], ...]
    our_constants: Mapping[str, Any]
    their_constants: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    buffers: tuple[str, ...]
    our_derived: Mapping[str, Callable[[ModelConfig], Any]] = dataclasses.field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()
    our_training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default_seq_length: int | None = None
    head: Parameter | None = None
    prefix: str = "transformer."
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def differences(self, model: ModelConfig) -> dict[str, Any]:
        """Field -> the value that the family has, for each setting of a model that the family cannot express.

        A field that no table of the family has is among them unless it has its default value.
        """
        mapped = {ours for ours, _ in self.fields}.union(*(pair.ours for pair in self.conversions))
        unused = dataclasses.replace(model, **self.our_constants).unused_fields()
        needed = {
            name: values[0]
            for pair in self.conversions
            for name, values in pair.our_values.items()
            if name not in unused and getattr(model, name) not in values
        }
        for field in dataclasses.fields(model):
            name = field.name
            if not changes_model(ModelConfig, field) or name in mapped | unused:
                continue
            if name in self.our_derived:
                needed[name] = self.our_derived[name](model)
            else:
                needed[name] = self.our_constants.get(name, field.default)
        return {name: value for name, value in needed.items() if getattr(model, name) != value}

    def our_settings(self, their_config: PreTrainedConfig) -> dict[str, Any]:
        """Values of ModelConfig's fields for their configuration, unchecked."""
        # If two of their settings map to one of ours, the first is read.
        pairs = (*self.fields, *reversed(self.training_fields))
        values = {ours: getattr(their_config, theirs, None) for ours, theirs in pairs}
        fields = {name: value for name, value in values.items() if value is not None}
        fields.setdefault("seq_length", fields.get("max_position_embeddings", self.default_seq_length))
        for pair in self.conversions:
            fields |= pair.to_ours(their_config)
        return {**self.our_training, **self.our_constants, **fields}

    def their_settings(self, model: ModelConfig) -> dict[str, Any]:
        """The settings of their configuration for a model that the family can express."""
        mapped = {theirs: getattr(model, ours) for ours, theirs in self.fields + self.training_fields}
        converted = [item for pair in self.conversions for item in pair.to_theirs(model).items()]
        return {**mapped, **dict(converted), **self.their_constants}

    def known_settings(self) -> set[str]:
        """The names of their settings that a table of the family has."""
        pairs = {theirs for _, theirs in self.fields + self.training_fields}
        return pairs.union(self.their_constants, self.ignored, *(pair.theirs for pair in self.conversions))

    def names(self, num_layers: int, untied: bool = False) -> Iterator[Parameter]:
        """The parameters of a model with `num_layers` layers and a tied or `untied` LM head, with the layer
        numbers filled in."""
        final = FIRST_TRANSFORMER_LAYER + num_layers + 1
        head = (self.head,) if untied and self.head is not None else ()
        for parameter in (*self.parameters, *head):
            blocks = range(num_layers) if "{layer}" in parameter.ours else (0,)
            for block in blocks:
                layer = FIRST_TRANSFORMER_LAYER + block
                yield Parameter(
                    parameter.ours.format(layer=layer, final=final, head=final + 1),
                    tuple(name.format(block=block) for name in parameter.theirs),
                    parameter.transform,
                )

    def buffer_names(self, num_layers: int) -> set[str]:
        """The names of the buffers of a model with `num_layers` layers."""
        return {name.format(block=block) for name in self.buffers for block in range(num_layers)}


def equal_heads(model: ModelConfig) -> int:
    """Head dimension of attention heads that divide the hidden size among them."""
    return model.hidden_size // model.num_attention_heads


def setting(field: str, value: Any) -> str:
    """A field and its value as a user types them: '--kv-channels 16', '--mup', 'no --mup'."""
    if value is None or value is False:
        return f"no {option_name(field)}"
    return option_name(field) if value is True else f"{option_name(field)} {value}"
