"""The Hugging Face model families that can be converted, by the `model_type` of their config.json.

A family is one file in families/ and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.convert.huggingface.family import Family, setting
from megatron.config import ConfigError, ModelConfig
from megatron.config.registry import Choice, Registry

_FAMILIES = "megatron.checkpoint.convert.huggingface.families"

# Instances of `Family`. A model that several families can express is exported as the first of them.
FAMILIES = Registry(
    "Hugging Face model type",
    {
        "bloom": Choice("BLOOM", f"{_FAMILIES}.bloom:BLOOM"),
        "gpt2": Choice("GPT-2", f"{_FAMILIES}.gpt2:GPT2"),
        "llama": Choice("Llama 1 to 3", f"{_FAMILIES}.llama:LLAMA"),
        "mistral": Choice("Mistral", f"{_FAMILIES}.mistral:MISTRAL"),
        "qwen2": Choice("Qwen 2 and 2.5", f"{_FAMILIES}.qwen2:QWEN2"),
        "qwen3": Choice("Qwen 3", f"{_FAMILIES}.qwen3:QWEN3"),
        "olmo2": Choice("OLMo 2", f"{_FAMILIES}.olmo2:OLMO2"),
        "gpt_neox": Choice("GPT-NeoX and Pythia", f"{_FAMILIES}.gpt_neox:GPT_NEOX"),
        "falcon": Choice("Falcon 7B", f"{_FAMILIES}.falcon:FALCON"),
    },
)


def family_of(model: ModelConfig) -> tuple[str, Family]:
    """The model type and family that a model is exported as.

    ConfigError for a model that no family can express. It names the settings in which the model differs from
    the most similar families, and what these need.
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
    needs = "; ".join(f"{families[name].title} needs {_joined(needed)}" for name, needed in nearest.items())
    raise ConfigError(f"a model with {found} cannot be written for Hugging Face: {needs}")


def _joined(settings: Mapping[str, Any]) -> str:
    return " and ".join(setting(field, value) for field, value in settings.items())
