"""Reads a Hugging Face model: its settings, and its weights with the names of this program.

The module reads folders in the layout of `save_pretrained` and the hub: config.json, and the weights in
`model.safetensors` or `pytorch_model.bin`, or in several files with a JSON index (`weight_map`: weight ->
file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron.checkpoint.foreign_arguments import harmless_in_hugging_face
from megatron.checkpoint.formats.torch_archive import read_file as load_torch_file
from megatron.checkpoint.huggingface.family import (
    FAMILIES,
    LM_HEAD,
    Family,
    Parameter,
)
from megatron.checkpoint.huggingface.missing import lacking_for
from megatron.checkpoint.huggingface.mxfp4 import with_unpacked
from megatron.checkpoint.huggingface.rope import check_numbers
from megatron.checkpoint.names import check_plain, is_plain, shown
from megatron.config import BatchConfig, Config, DataConfig, ModelConfig, ScheduleConfig
from megatron.config.config import SETTINGS, settings_of_section
from megatron.config.fields import option_name
from megatron.config.mistakes import raise_first
from megatron.errors import UserError, one_line
from megatron.files import HostileFileError, expect_layout, open_regular, read_json
from megatron.model.inference.single_process import model_specs
from megatron.model.layer_list import PARAMETER_DTYPES, WORD_EMBEDDINGS
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.tokenizer.flags import tokenizer_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# Largest accepted integer in a config.json: far more than the tokens, layers or units of any model.
_LARGEST_SETTING = 1 << 40
# For each of these settings, transformers creates a list or a dictionary whose length is the setting's value.
_COUNTS = ("num_labels", "num_hidden_layers", "n_layer", "num_layers")
_LARGEST_COUNT = 100_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file. `read` maps it into memory. When the tensor is freed its pages are unmapped, so the
    resident memory does not grow with the size of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model in a Hugging Face folder. All of its weights are present.

    fields: values for ModelConfig. rows: number of word embeddings, which may exceed the number of tokens.
    precision: 'fp32', 'fp16' or 'bf16', the dtype of the weights (fp32 if they have several dtypes). stored:
    Hugging Face name with prefix -> weight.
    """

    folder: Path
    family: Family
    fields: dict[str, Any]
    rows: int
    precision: str
    stored: dict[str, StoredWeight]

    @cached_property
    def model(self) -> ModelConfig:
        """The settings of the model without its vocabulary size."""
        return ModelConfig(**self.fields)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Megatron name of a parameter -> its `Parameter`."""
        return {parameter.megatron: parameter for parameter in self.family.names(self.model)}

    def parts(self, name: str, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        """Returns the memory-mapped Hugging Face tensors of a parameter. If `ranks` > 1, returns the share of
        `rank`: its experts."""
        names = self.parameters[name].hf
        if len(names) == 1:  # one tensor contains all experts
            return [self.stored[names[0]].read().chunk(ranks)[rank]]
        first, stop = (len(names) * end // ranks for end in (rank, rank + 1))
        return [self.stored[hf_name].read() for hf_name in names[first:stop]]


def config_without_run(
    fields: Mapping[str, Any], vocab_size: int | None, data: DataConfig, **sections: Any
) -> Config:
    """Returns the config of a run that could have saved another framework's model. fields: fields of
    `ModelConfig`. vocab_size: the value of --vocab-size. sections: settings of other sections; all settings
    that are not given have their defaults."""
    batch = BatchConfig(micro_batch_size=1, global_batch_size=1)
    known = {"batch": batch, "schedule": ScheduleConfig(lr=1.0)} | sections
    return Config(model=ModelConfig(**fields, vocab_size=vocab_size), data=data, **known)


def own_tokenizer(folder: Path) -> dict[str, Any]:
    """Returns the flags of the tokenizer in the model's folder; {} if the folder has no tokenizer."""
    has_one = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return {"tokenizer_name_or_path": str(folder.resolve())} if has_one else {}


def read_flags(folder: Path) -> Config:
    """Returns the config of a run that starts from the model in `folder`: the settings of the model, and of
    the tokenizer in the folder. Without a tokenizer, every word embedding counts as a token. Reads no
    weights."""
    _, fields = read_settings(folder)
    rows, tokenizer = fields.pop("vocab_size"), own_tokenizer(folder)
    return config_without_run(fields, None if tokenizer else rows, DataConfig(**tokenizer))


def read_hugging_face(
    folder: str | Path, read_weights: Callable[[Path, ModelConfig], Mapping[str, StoredWeight]] | None = None
) -> HuggingFaceModel:
    """Returns the model in `folder`, which must belong to one of the `FAMILIES`.

    read_weights: returns Hugging Face name -> weight; None to read files of transformers. Raises UserError if
    the folder cannot be read, if the model cannot be converted, or if weights are missing, unknown or of
    other shapes than config.json describes.
    """
    folder = Path(folder)
    family, fields = read_settings(folder)
    rows = fields.pop("vocab_size")
    stored = (read_weights or _all_weights)(folder, ModelConfig(**fields))
    stored = _known_weights(folder, family, stored, fields)
    precisions = {dtype: name for name, dtype in PARAMETER_DTYPES.items()}
    for name, tensor in stored.items():
        if tensor.dtype not in precisions:
            raise UserError(
                f"{folder} holds {name} as {tensor.dtype}: expected weights in fp32, fp16 or bf16"
            )
    model = HuggingFaceModel(folder, family, fields, rows, "fp32", stored)
    _check_shapes(model)
    cast = (name for parameter in model.parameters.values() if not parameter.is_fp32 for name in parameter.hf)
    dtypes = {stored[name].dtype for name in cast}
    return replace(model, precision=precisions[dtypes.pop()]) if len(dtypes) == 1 else model


def read_settings(folder: Path) -> tuple[Family, dict[str, Any]]:
    """Returns the family of the model in `folder`/config.json, and values for ModelConfig. vocab_size in them
    is the number of word embeddings. Raises UserError for a model that cannot be converted."""
    path, settings = folder / "config.json", _check_settings(folder)
    family: Family = FAMILIES.load(settings["model_type"])
    with expect_layout(path, "the settings of a model that can be built"):
        try:
            check_numbers(settings)
            hf_config = _hf_config(folder, settings, family.config_type)
            fields = _fields(family, hf_config, settings)
            if fields.get("mtp_num_layers") and not _has_layer(folder, family, fields["num_layers"]):
                fields["mtp_num_layers"] = None  # because transformers writes models without these layers
            raise_first(ModelConfig(**fields).router_mistakes())
        except UserError as error:
            pairs = [(*pair.megatron, *pair.hf) for pair in family.conversions if len(pair.hf) == 1]
            keys = {option_name(one[0]): one[1] for one in (*family.fields, *pairs) if len(one) == 2}
            sentence = re.sub(r"--[\w-]+", lambda flag: keys.get(flag[0], flag[0]), str(error))
            raise UserError(f"{path}: {sentence}") from error
    _check_names(folder, settings, family, type(hf_config))
    return family, fields


def _hf_config(folder: Path, settings: Mapping[str, Any], config_type: str | None) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        if config_type is not None:
            return AutoConfig.for_model(config_type).from_dict({**settings, "model_type": config_type})
        # Without trust_remote_code=False, transformers would ask whether it may run code from the folder.
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the error's type depends on the problem
        # The first line of the message names the failed check, the next lines say what it found.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"transformers rejects it ({one_line(reason)})") from error


def _fields(family: Family, hf_config: PreTrainedConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values for ModelConfig, with the right types. settings: the content of config.json."""
    for name, needed in family.hf_constants.items():
        found = getattr(hf_config, name, needed)
        if found != needed:
            raise UserError(f"the model has {name} = {one_line(found)}: only {needed} can be converted")
    fields = family.megatron_settings(hf_config)
    for pair in family.conversions:
        pair.check_file(settings, hf_config)
    for field, key in family.fields:
        value, setting = fields.get(field), SETTINGS[f"model.{field}"]
        is_missing = value is None and (setting.is_required or field == "vocab_size")
        if is_missing or (value is not None and not setting.has_type(value)):
            expected = {int: "an integer", float: "a number", bool: "true or false"}[setting.kind]
            raise UserError(f"the model has {key} = {one_line(value)}: expected {expected}")
    return fields


def _check_settings(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises UserError if transformers could need unbounded time to read
    it."""
    path = folder / "config.json"
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not the folder of a Hugging Face model ({one_line(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds a {type(settings).__name__}, expected an object with settings")
    if isinstance(kind := settings.get("model_type"), str) and (lacking := lacking_for(kind)):
        raise UserError(
            f"{folder} holds a model of type {kind}, which needs {lacking}: it is not implemented"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{folder} holds a model of type {one_line(kind)}: expected one of {', '.join(FAMILIES)}"
        )
    for name, value in settings.items():
        limit = _LARGEST_COUNT if name in _COUNTS else _LARGEST_SETTING
        if type(value) is int and abs(value) > limit:
            raise HostileFileError(f"{path} has {shown(name)} beyond {limit:,}, expected less")
    return settings


def _check_names(
    folder: Path, settings: dict[str, Any], family: Family, hf_class: type[PreTrainedConfig]
) -> None:
    """Raises UserError for a setting that is in none of the family's tables and differs from the default of
    `hf_class`."""
    from transformers import PreTrainedConfig

    known = family.known_settings() | harmless_in_hugging_face() | PreTrainedConfig().to_dict().keys()
    # Also the names that transformers writes instead of names in the tables, and older names.
    known |= {stored for name, stored in hf_class.attribute_map.items() if name in known}
    known |= hf_class.attribute_map.keys()
    defaults = hf_class().to_dict()
    for name, value in settings.items():
        if name not in known and (name not in defaults or value != defaults[name]):
            raise UserError(
                f"{folder} has {shown(name)} = {one_line(value)} in its config.json, which has no equivalent "
                f"in this program: only a {family.title} model without this setting can be converted"
            )


# Setting of a part of a model that is not converted -> a sentence that says so.
_NOT_CONVERTED = {
    "router_aux_loss_coef": "transformers normalizes the balance loss in another way, so that "
    "router_aux_loss_coef is not converted: to train with a balance loss, set --moe-aux-loss-coeff",
}


def losses(folder: Path) -> list[str]:
    """Returns one sentence for each part of the model in `folder` that is not converted."""
    settings = _check_settings(folder)
    return [sentence for name, sentence in _NOT_CONVERTED.items() if settings.get(name)]


def _all_weights(folder: Path, _: ModelConfig) -> Mapping[str, StoredWeight]:
    """Returns stored name -> weight for every weight in a folder."""
    files = _weight_files(folder)
    return with_unpacked({name: tensor for file in files for name, tensor in _read(file).items()})


def _known_weights(
    folder: Path, family: Family, stored: Mapping[str, StoredWeight], fields: Mapping[str, Any]
) -> dict[str, StoredWeight]:
    """Returns Hugging Face name -> weight for the weights in the family's table. Raises UserError if one of
    them is missing, and for any other weight in the folder, except buffers and equal copies of a weight."""
    model = ModelConfig(**fields)
    num_layers = model.num_layers
    num_experts = family.named_experts(model) * sum(map(model.has_experts, range(num_layers)))
    if max(num_layers, num_experts) > len(stored):
        raise HostileFileError(
            f"{folder} has {num_layers:,} layers and {num_experts:,} experts in its config.json, and "
            f"{len(stored):,} weights in all"
        )
    expected = {name: parameter for parameter in family.names(model) for name in parameter.hf}
    buffers = {name.format(block=block) for name in family.buffers for block in range(num_layers)}
    found: dict[str, StoredWeight] = {}
    unexpected, copies = [], dict[str, tuple[str, StoredWeight]]()
    (words,) = (name for name, parameter in expected.items() if parameter.megatron == WORD_EMBEDDINGS)
    copied = {copy: one.hf[0] for one in expected.values() for copy in one.copies}
    # The LM head of a model with tied embeddings is a copy of the word embeddings.
    copied |= dict.fromkeys((LM_HEAD, *family.names_of_head(model)), words) if LM_HEAD not in expected else {}
    for stored_name, tensor in stored.items():
        name = family.aliases.get(stored_name, stored_name)
        full_name = name if name.startswith(family.prefix) or name in expected else family.prefix + name
        if full_name in expected:
            found[full_name] = tensor
        elif original := copied.get(name, copied.get(full_name)):
            copies[name] = original, tensor
        elif full_name not in buffers:
            unexpected.append(name if is_plain(name) else shown(name))
    if missing := expected.keys() - found.keys():
        raise UserError(f"{folder} lacks {len(missing)} weights, among them {min(missing)}")
    if unexpected:
        raise UserError(
            f"{folder} holds {len(unexpected)} weights that the model does not have, among them "
            f"{min(unexpected)}"
        )
    for name, (original, tensor) in copies.items():
        if not torch.equal(tensor.read(), found[original].read()):
            raise UserError(
                f"{folder} holds {name} that differs from {original}, although its config.json ties them: "
                "the files are not of one model"
            )
    return found


def _has_layer(folder: Path, family: Family, layer: int) -> bool:
    """Returns whether a folder has a weight of this layer, counted from 0."""
    with suppress(UserError):
        prefix = f"{family.prefix}layers.{layer}."
        return any(name.startswith(prefix) for file in _weight_files(folder) for name in _read(file))
    return False


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                names = list(read_json(index)["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is not an index of weights ({one_line(error)})") from error
            # Each name must be a name in the folder, but the file may be a link, as in the hub's cache.
            return [folder / name for name in sorted({check_plain(name, index) for name in names})]
    raise UserError(f"{folder} holds no weights: expected {' or '.join(WEIGHT_FILES)}, or an index of them")


def _read(path: Path) -> Mapping[str, StoredWeight]:
    """Returns name -> weight for all weights of a file. Weights in a .safetensors file are read when they are
    used."""
    if path.suffix != ".safetensors":
        content = load_torch_file(path)
        if not isinstance(content, dict) or not all(
            type(name) is str and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise UserError(f"the weights in {path} cannot be read: expected a dict of tensors")
        return {name: StoredWeight(t.shape, t.dtype, t.detach) for name, t in content.items()}
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            mapped = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # a damaged file can raise any error inside the library
        raise UserError(f"the weights in {path} cannot be read ({one_line(error)})") from error
    return {
        name: StoredWeight(tensor.shape, tensor.dtype, partial(_map_weight, path, name))
        for name, tensor in mapped.items()
    }


def _map_weight(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _check_shapes(model: HuggingFaceModel) -> None:
    with expect_layout(model.folder / "config.json", "the settings of a model that can be built"):
        config = config_without_run(model.fields, None, DataConfig())
        specs = specs_without_padding(config, model.rows, None)
    for parameter in model.parameters.values():
        weight = torch.empty(specs[parameter.megatron].global_shape, device="meta")
        parts = parameter.transform.to_hf(weight, config.model.of_layer(parameter.block))
        for name, part in zip(parameter.hf, parts, strict=True):
            found = model.stored[name].shape
            if found != part.shape:
                raise UserError(
                    f"{model.folder} holds {name} of shape {tuple(found)}: its config.json makes it "
                    f"{tuple(part.shape)}"
                )


def specs_without_padding(config: Config, vocab_size: int, eod: int | None) -> dict[str, ParameterSpec]:
    """Returns parameter name -> spec for a model whose word embeddings have no padding."""
    return {
        name: replace(spec, global_shape=spec.valid_shape)
        for name, spec in model_specs(config, vocab_size, eod).items()
    }


def start_flags(config: Config, output: Path) -> list[str]:
    """Returns the flags of `pretrain_gpt.py` that start a run from `output`, a universal checkpoint of the
    model: flags for checkpoint, model and tokenizer. Settings with default values are left out."""
    model, chosen = config.model, config.model.chosen_settings()
    of_model = {setting.field: setting for setting in settings_of_section("model")}
    values = {name: getattr(model, name) for name in of_model}
    derived = {name for name, setting in of_model.items() if setting.flag.derived} - chosen
    plain = ModelConfig(**{name: value for name, value in values.items() if name not in derived})
    settings = {
        name: values[name]
        for name, setting in of_model.items()
        if values[name] != (getattr(plain, name) if name in derived else setting.default)
    }
    settings |= tokenizer_settings(config.data)
    words = ["--load", str(output.parent), "--universal_checkpoint"]
    for name, value in settings.items():
        if value is not None and value is not False:
            words.append(option_name(name))
            words += [] if value is True else map(str, value if isinstance(value, tuple) else (value,))
    return words
