"""The activation of the MLP: --activation, and its names in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.checkpoint.convert.huggingface.family import Conversion
from megatron.config import ConfigError
from megatron.config.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Name in --activation -> names in transformers (its activations.py) of the same function.
_NAMES = {"gelu_exact": ("gelu",), "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")}


def exact_or_tanh(setting: str) -> Conversion:
    """--activation and the `setting` of a family whose models have GELU, exact or in its tanh form."""

    def to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
        found = getattr(hf_config, setting)
        for activation, names in _NAMES.items():
            if found in names:
                return {"activation": activation}
        expected = " or ".join(name for names in _NAMES.values() for name in names)
        raise ConfigError(f"the model has {setting} = {one_line(found)}: expected {expected}")

    return Conversion(
        megatron=("activation",),
        hf=(setting,),
        to_hf=lambda model: {setting: _NAMES[model.activation][0]},
        to_megatron=to_megatron,
        megatron_values={"activation": tuple(_NAMES)},
    )
