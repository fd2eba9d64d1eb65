"""The mapping between the models of one Hugging Face family and Megatron models.

A `Family` is a table of corresponding settings and parameters. Names with `megatron` belong to this program,
names with `hf` to transformers. `exporter` uses the table to write a folder from a checkpoint, `importer`
uses it to write a checkpoint from a folder. The folder families/ contains the tables, and `FAMILIES` lists
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.config import settings_of_section
from megatron.config.fields import option_name, value_text
from megatron.config.registry import Choice, Registry
from megatron.errors import UserError, one_line
from megatron.model.layer_list import FIRST_TRANSFORMER_LAYER, final_norm_of, first_mtp_layer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LM_HEAD = "lm_head.weight"
"""Hugging Face name of the LM head. Some files contain it although the LM head is tied."""
NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"
"""Setting with the number of layers for multi-token prediction. In files they follow the model's layers."""


# Number of elements that are checked at a time. The check needs temporaries of twice their size.
_CHECKED_ELEMENTS = 2**24


def count_non_finite(values: Tensor) -> int:
    """Returns how many values are NaN or infinite."""
    return sum(int((~part.isfinite()).sum()) for part in values.reshape(-1).split(_CHECKED_ELEMENTS))


@dataclass(frozen=True)
class Transform:
    """Conversion between one Megatron tensor and one or more Hugging Face tensors of a model.

    slice_dim: dimension along which equal slices of the Hugging Face tensors become tensor-parallel shards,
    if they are converted with the number of heads and query groups of one rank. None: there is no such
    dimension, or it varies.
    """

    to_hf: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    to_megatron: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    slice_dim: int | None = None
    needs_whole_groups: bool = False
    """Whether a slice must contain whole query groups, because keys and values have fewer rows than
    queries."""


def one_to_one(
    to_hf: Callable[[Tensor, ModelConfig], Tensor], to_megatron: Callable[[Tensor, ModelConfig], Tensor]
) -> Transform:
    """Returns the conversion between one Megatron tensor and one Hugging Face tensor."""
    return Transform(lambda x, model: [to_hf(x, model)], lambda parts, model: to_megatron(parts[0], model))


IDENTITY = one_to_one(lambda x, model: x, lambda x, model: x)


@dataclass(frozen=True)
class Parameter:
    """A parameter's Megatron name and its Hugging Face names. In `megatron`, placeholders stand for indices
    in the pipeline's layer list: `{layer}` for a transformer layer, `{final}` for the final norm, `{head}`
    for an untied LM head, `{mtp}` for a layer of multi-token prediction. In `hf`, `{block}` numbers the
    transformer layers from 0, then the layers of multi-token prediction, and `{expert}` numbers the experts
    of a layer. All names of one expert precede the names of the next expert.

    exists: returns whether the model, or its transformer layer with this number from 0, has the parameter.
    is_fp32: whether Hugging Face's files store it in fp32, whatever the precision of the weights. block: the
    number of its transformer layer, which `Family.names` sets; `transform` gets this layer's model. copies:
    names of copies in Hugging Face's files, with `{block}` for each layer of multi-token prediction.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform = IDENTITY
    exists: Callable[[ModelConfig, int], bool] = lambda _model, _block: True
    is_fp32: bool = False
    copies: tuple[str, ...] = ()
    block: int = 0


def with_bias(
    megatron: str, hf: str, weight: Transform = IDENTITY, bias: Transform = IDENTITY
) -> tuple[Parameter, Parameter]:
    """Returns the weight and the bias of a linear layer or norm."""
    return (
        Parameter(f"{megatron}.weight", (f"{hf}.weight",), weight),
        Parameter(f"{megatron}.bias", (f"{hf}.bias",), bias),
    )


LAYER_MODULES = (
    *("input_layernorm", "self_attention.query_key_value", "self_attention.dense"),
    *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)


def layers_of_megatron(layer: str, attention: str = "self_attention") -> tuple[Parameter, ...]:
    """Returns the parameters of transformer layers for a family that uses Megatron's names in them. layer:
    the name of a layer, with `{block}`. attention: the name of the attention in a layer."""
    names = {name: f"{layer}.{name.replace('self_attention', attention)}" for name in LAYER_MODULES}
    pairs = [with_bias(f"{{layer}}.{name}", hf) for name, hf in names.items()]
    return tuple(parameter for pair in pairs for parameter in pair)


@dataclass(frozen=True)
class Conversion:
    """A group of settings that do not correspond one to one, with a function for each direction.

    megatron: fields of ModelConfig. hf: settings of config.json. `to_megatron` raises UserError for values
    without an equivalent. megatron_values: field -> its convertible values, if some are not convertible.
    needed: for a model without an equivalent, returns further fields -> the values that the family needs.
    check_file: raises UserError if a setting of config.json differs from the value that transformers uses.
    """

    megatron: tuple[str, ...] = ()
    hf: tuple[str, ...] = ()
    to_hf: Callable[[ModelConfig], dict[str, Any]] = lambda _model: {}
    to_megatron: Callable[[PreTrainedConfig], dict[str, Any]] = lambda _hf_config: {}
    megatron_values: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    needed: Callable[[ModelConfig], dict[str, Any]] = lambda _model: {}
    check_file: Callable[[Mapping[str, Any], PreTrainedConfig], None] = lambda _settings, _hf_config: None


def inverted(field: str, setting: str) -> Conversion:
    """Returns the conversion of a setting that is true when the field is false."""
    return Conversion(
        megatron=(field,),
        hf=(setting,),
        to_hf=lambda model: {setting: not getattr(model, field)},
        to_megatron=lambda hf_config: {field: not getattr(hf_config, setting)},
    )


INITIALIZATION = (("init_method_std", "initializer_range"),)
DROPOUT = (("hidden_dropout", "hidden_dropout"), ("attention_dropout", "attention_dropout"))


@dataclass(frozen=True)
class Family:
    """The mapping of one Hugging Face model type.

    fields: pairs (field of ModelConfig, Hugging Face setting). training_fields: such pairs for settings that
    affect only training; if two pairs have the same field, the first pair is read. megatron_constants,
    hf_constants: values that every model of the family has. megatron_derived: fields of ModelConfig that
    other fields determine, unless they are in `fields`. All other fields of ModelConfig that change the model
    must have their defaults. conversions: see `Conversion`. megatron_training: training settings of a run
    that starts from the model. default_seq_length: the sequence length if config.json has none. head: the
    parameter of an untied LM head. prefix: begins all Hugging Face names except the head's; files that were
    saved without the head lack it. buffers: ignored names in Hugging Face files that are not weights.
    ignored: Hugging Face settings that do not change the model. aliases: names of weights in files of other
    transformers versions -> names in the table. config_type: if transformers lacks the family's model type, a
    model type that it has and whose architecture is equal.
    """

    title: str
    architecture: str
    fields: tuple[tuple[str, str], ...]
    megatron_constants: Mapping[str, Any]
    hf_constants: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    buffers: tuple[str, ...]
    training_fields: tuple[tuple[str, str], ...] = (*INITIALIZATION, *DROPOUT)
    megatron_derived: Mapping[str, Callable[[ModelConfig], Any]] = dataclasses.field(
        default_factory=lambda: {"kv_channels": equal_heads}
    )
    conversions: tuple[Conversion, ...] = ()
    megatron_training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default_seq_length: int | None = None
    head: Parameter | None = None
    prefix: str = "transformer."
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config_type: str | None = None

    def differences(self, model: ModelConfig) -> dict[str, Any]:
        """Returns the settings that the family cannot express: field -> the value that the family needs.

        A field that is in none of the family's tables must have its default value.
        """
        mapped = {field for field, _ in self.fields}.union(*(pair.megatron for pair in self.conversions))
        unused = dataclasses.replace(model, **self.megatron_constants).unused_fields()
        needed = {
            name: values[0]
            for pair in self.conversions
            for name, values in pair.megatron_values.items()
            if name not in unused and getattr(model, name) not in values
        }
        for pair in self.conversions:
            needed |= pair.needed(model)
        for setting in settings_of_section("model"):
            name = setting.field
            if not setting.changes_model or name in mapped | unused:
                continue
            if name in self.megatron_derived:
                needed[name] = self.megatron_derived[name](model)
            else:
                needed[name] = self.megatron_constants.get(name, setting.default)
        return {name: value for name, value in needed.items() if getattr(model, name) != value}

    def megatron_settings(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """Returns ModelConfig fields for a Hugging Face configuration, without a check of the values."""
        # If two Hugging Face settings have the same field, the first one is read.
        pairs = (*self.fields, *reversed(self.training_fields))
        values = {field: getattr(hf_config, setting, None) for field, setting in pairs}
        fields = {name: value for name, value in values.items() if value is not None}
        fields.setdefault("seq_length", fields.get("max_position_embeddings", self.default_seq_length))
        for pair in self.conversions:
            fields |= pair.to_megatron(hf_config)
        return {**self.megatron_training, **self.megatron_constants, **fields}

    def hf_settings(self, model: ModelConfig) -> dict[str, Any]:
        """Returns the Hugging Face settings of a model that the family can express."""
        mapped = {setting: getattr(model, field) for field, setting in self.fields + self.training_fields}
        converted = [item for pair in self.conversions for item in pair.to_hf(model).items()]
        return {**mapped, **dict(converted), **self.hf_constants}

    def known_settings(self) -> set[str]:
        """Returns the names of the Hugging Face settings in the tables of the family."""
        pairs = {setting for _, setting in self.fields + self.training_fields}
        return pairs.union(self.hf_constants, self.ignored, *(pair.hf for pair in self.conversions))

    def named_experts(self, model: ModelConfig) -> int:
        """Returns how many experts of a layer have weights of their own; 0 if one tensor holds all
        experts."""
        is_named = any("{expert}" in name for parameter in self.parameters for name in parameter.hf)
        return (model.num_experts or 0) * is_named

    def names_of_head(self, model: ModelConfig) -> tuple[str, ...]:
        """Returns the names in files of the LM head and of its copies."""
        tied = dataclasses.replace(model, untie_embeddings_and_output_weights=True)
        heads = [each for each in self.names(tied) if self.head is not None and each.hf == self.head.hf]
        return tuple(name for each in heads for name in (*each.hf, *each.copies))

    def names(self, model: ModelConfig) -> Iterator[Parameter]:
        """Yields the parameters of a model, with the numbers of layers and experts in their names."""
        final, first_mtp = final_norm_of(model.num_layers), first_mtp_layer_of(model.num_layers)
        later = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
        head = (self.head,) if model.untie_embeddings_and_output_weights and self.head is not None else ()
        for parameter in (*self.parameters, *head):
            blocks = range(model.num_layers) if "{layer}" in parameter.megatron else range(1)
            blocks = later if "{mtp}" in parameter.megatron else blocks
            is_expert = any("{expert}" in name for name in parameter.hf)
            experts = range(model.num_experts or 0) if is_expert else (0,)
            # Layers of multi-token prediction have the kind of the last transformer layer.
            for block in (n for n in blocks if parameter.exists(model, min(n, model.num_layers - 1))):
                layer, mtp = FIRST_TRANSFORMER_LAYER + block, first_mtp + block - model.num_layers
                yield dataclasses.replace(
                    parameter,
                    megatron=parameter.megatron.format(layer=layer, final=final, head=final + 1, mtp=mtp),
                    hf=tuple(
                        name.format(block=block, expert=expert) for expert in experts for name in parameter.hf
                    ),
                    block=min(block, model.num_layers - 1),
                    copies=tuple(name.format(block=block) for block in later for name in parameter.copies),
                )


# Fields and settings that several families share.
SIZES = (
    ("num_layers", "num_hidden_layers"),
    ("hidden_size", "hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_position_embeddings"),
)


def checked_count(name: str, value: Any, at_least: int = 1) -> int:
    """Returns the value of a setting of config.json if it is an integer of at least `at_least`. Raises
    UserError for any other value."""
    if type(value) is not int or value < at_least:
        raise UserError(
            f"the model has {name} = {one_line(value)}: expected an integer of at least {at_least}"
        )
    return value


def equal_heads(model: ModelConfig) -> int:
    """Returns the head dimension that results if the heads divide the hidden size equally."""
    return model.hidden_size // model.num_attention_heads


def setting(field: str, value: Any) -> str:
    """Returns a field and its value as a user types them: '--kv-channels 16', '--mup', 'no --mup'."""
    if value is None or value is False:
        return f"no {option_name(field)}"
    return option_name(field) if value is True else f"{option_name(field)} {value_text(value)}"


_FAMILIES = "megatron.checkpoint.huggingface.families"

# Instances of `Family`. A model that several families can express is exported as the first of them.
FAMILIES = Registry(
    "Hugging Face model type",
    {
        "bloom": Choice("BLOOM", f"{_FAMILIES}.bloom:BLOOM"),
        "gpt2": Choice("GPT-2", f"{_FAMILIES}.gpt2:GPT2"),
        "llama": Choice("Llama 1 to 3", f"{_FAMILIES}.llama:LLAMA"),
        "mistral": Choice("Mistral", f"{_FAMILIES}.llama:MISTRAL"),
        "qwen2": Choice("Qwen 2 and 2.5", f"{_FAMILIES}.llama:QWEN2"),
        "qwen3": Choice("Qwen 3", f"{_FAMILIES}.llama:QWEN3"),
        "olmo2": Choice("OLMo 2", f"{_FAMILIES}.llama:OLMO2"),
        "olmo3": Choice("OLMo 3", f"{_FAMILIES}.llama:OLMO3"),
        "gemma": Choice("Gemma", f"{_FAMILIES}.gemma:GEMMA"),
        "gemma2": Choice("Gemma 2", f"{_FAMILIES}.gemma:GEMMA2"),
        "gemma3_text": Choice("Gemma 3 (text)", f"{_FAMILIES}.gemma:GEMMA3"),
        "gpt_neox": Choice("GPT-NeoX and Pythia", f"{_FAMILIES}.gpt_neox:GPT_NEOX"),
        "falcon": Choice("Falcon 7B", f"{_FAMILIES}.falcon:FALCON"),
        "mixtral": Choice("Mixtral", f"{_FAMILIES}.experts:MIXTRAL"),
        "olmoe": Choice("OLMoE", f"{_FAMILIES}.experts:OLMOE"),
        "qwen3_moe": Choice("Qwen 3 with experts", f"{_FAMILIES}.experts:QWEN3_MOE"),
        "glm4_moe": Choice("GLM 4.5 to 4.7", f"{_FAMILIES}.experts:GLM4_MOE"),
        "deepseek_v3": Choice("DeepSeek-V3 and R1", f"{_FAMILIES}.latent:DEEPSEEK_V3"),
        "deepseek_v2": Choice("DeepSeek-V2", f"{_FAMILIES}.latent:DEEPSEEK_V2"),
        "kimi_k2": Choice("Kimi K2", f"{_FAMILIES}.latent:KIMI_K2"),
        "glm4_moe_lite": Choice("GLM 4.7 Flash", f"{_FAMILIES}.latent:GLM4_MOE_LITE"),
        "cohere": Choice("Cohere's Command R and Aya", f"{_FAMILIES}.cohere:COHERE"),
        "cohere2": Choice("Cohere's Command R7B and A", f"{_FAMILIES}.cohere:COHERE2"),
        "smollm3": Choice("SmolLM3", f"{_FAMILIES}.relatives:SMOLLM3"),
        "seed_oss": Choice("Seed-OSS", f"{_FAMILIES}.relatives:SEED_OSS"),
        "ernie4_5": Choice("ERNIE 4.5", f"{_FAMILIES}.relatives:ERNIE"),
        "helium": Choice("Helium", f"{_FAMILIES}.relatives:HELIUM"),
        "ministral": Choice("Ministral", f"{_FAMILIES}.relatives:MINISTRAL"),
        "cwm": Choice("CWM", f"{_FAMILIES}.relatives:MINISTRAL"),
        "internlm3": Choice("InternLM 3", f"{_FAMILIES}.llama:LLAMA"),
        "iquestcoder": Choice("IQuest-Coder", f"{_FAMILIES}.llama:LLAMA"),
        "exaone4": Choice("EXAONE 4", f"{_FAMILIES}.relatives:EXAONE4"),
        "stablelm": Choice("StableLM", f"{_FAMILIES}.relatives:STABLELM"),
        "starcoder2": Choice("StarCoder 2", f"{_FAMILIES}.relatives:STARCODER2"),
        "phi3": Choice("Phi 3 and 4", f"{_FAMILIES}.fused:PHI3"),
        "glm": Choice("GLM 4", f"{_FAMILIES}.fused:GLM"),
        "glm4": Choice("GLM-4-0414", f"{_FAMILIES}.fused:GLM4"),
        "gpt_oss": Choice("gpt-oss", f"{_FAMILIES}.gpt_oss:GPT_OSS"),
        "qwen2_moe": Choice("Qwen 1.5 and 2 with experts", f"{_FAMILIES}.experts:QWEN2_MOE"),
        "flex_olmo": Choice("FlexOlmo", f"{_FAMILIES}.experts:FLEX_OLMO"),
        "mellum": Choice("Mellum", f"{_FAMILIES}.experts:MELLUM"),
        "dots1": Choice("dots.llm1", f"{_FAMILIES}.sigmoid_experts:DOTS1"),
        "solar_open": Choice("Solar Open", f"{_FAMILIES}.experts:GLM4_MOE"),
        "hy_v3": Choice("Hunyuan 3", f"{_FAMILIES}.sigmoid_experts:HUNYUAN3"),
        "exaone_moe": Choice("K-EXAONE", f"{_FAMILIES}.sigmoid_experts:K_EXAONE"),
        "afmoe": Choice("Trinity (AFMoE)", f"{_FAMILIES}.sigmoid_experts:TRINITY"),
        "minimax_m2": Choice("MiniMax M2", f"{_FAMILIES}.sigmoid_experts:MINIMAX_M2"),
        "flint": Choice("Flint", f"{_FAMILIES}.sigmoid_experts:FLINT"),
        "mimo_v2_flash": Choice("MiMo-V2-Flash", f"{_FAMILIES}.window_heads:MIMO_V2_FLASH"),
        "laguna": Choice("Laguna", f"{_FAMILIES}.window_heads:LAGUNA"),
    },
)


def family_of(model: ModelConfig) -> tuple[str, Family]:
    """Returns the model type and the family with which a model is exported.

    Raises UserError if no family can express the model. The message names the settings in which the model
    differs from the most similar families, and the values that these families need.
    """
    families: dict[str, Family] = {name: FAMILIES.load(name) for name in FAMILIES}
    differences = {name: family.differences(model) for name, family in families.items()}
    fewest = min(len(needed) for needed in differences.values())
    nearest = {name: needed for name, needed in differences.items() if len(needed) == fewest}
    if fewest == 0:
        name = next(iter(nearest))
        return name, families[name]
    fields = dict.fromkeys(field for needed in nearest.values() for field in needed)
    found = _joined({field: getattr(model, field) for field in fields})
    needs = dict.fromkeys(f"{families[name].title} needs {_joined(each)}" for name, each in nearest.items())
    raise UserError(f"a model with {found} cannot be written for Hugging Face: {'; '.join(needs)}")


def _joined(settings: Mapping[str, Any]) -> str:
    return " and ".join(setting(field, value) for field, value in settings.items())


# Value of --activation -> names of the function in transformers (activations.py).
_NAMES = {"gelu_exact": ("gelu",), "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")}


def exact_or_tanh(setting: str) -> Conversion:
    """Returns the conversion between --activation and a family's `setting`, for exact GELU and its tanh
    approximation."""

    def to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
        found = getattr(hf_config, setting)
        for activation, names in _NAMES.items():
            if found in names:
                return {"activation": activation}
        expected = " or ".join(name for names in _NAMES.values() for name in names)
        raise UserError(f"the model has {setting} = {one_line(found)}: expected {expected}")

    return Conversion(
        megatron=("activation",),
        hf=(setting,),
        to_hf=lambda model: {setting: _NAMES[model.activation][0]},
        to_megatron=to_megatron,
        megatron_values={"activation": tuple(_NAMES)},
    )
