"""Translates the arguments that other Megatron programs save in a checkpoint into settings of this program.

A `Program` is a table of rules. A rule translates some arguments into some settings, and for Megatron-Core
also settings into arguments. All other arguments must be off, or be listed as harmless in
foreign_arguments.json. A conversion and a run that loads the checkpoint use the same `Program`, so both
accept the same models.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.checkpoint.foreign_experts import EXPERTS, WITHOUT_EQUIVALENT, read_experts, write_experts
from megatron.checkpoint.foreign_latent import (
    LATENT_ARGUMENTS,
    LATENT_SETTINGS,
    read_latent_attention,
    write_latent_attention,
)
from megatron.checkpoint.foreign_rope import (
    SCALING_ARGUMENTS,
    SCALING_SETTINGS,
    has_yarn,
    read_rope_scaling,
    write_rope_scaling,
)
from megatron.checkpoint.formats.megatron_deepspeed import NEWER_ARGUMENT, has_megatron_deepspeed_names
from megatron.checkpoint.formats.torch_archive import Stub
from megatron.checkpoint.names import is_plain, shown
from megatron.config import Config, ConfigError, ModelConfig
from megatron.config.config import SETTINGS, settings_of_section
from megatron.config.fields import option_name, value_text
from megatron.config.foreign_flags import foreign_flags
from megatron.config.registries import NORMALIZATIONS
from megatron.config.sections.layer_pattern import ROTARY_PATTERN, WINDOW_PATTERN, LayerPattern
from megatron.errors import UserError, one_line
from megatron.files import read_json

Arguments = Mapping[str, Any]
# Setting of any section -> whether its value changes the model.
_CHANGES_MODEL = {setting.field: setting.changes_model for setting in SETTINGS.values()}
# Settings of the model that are neither required nor derived from others.
_DEFAULTS = {
    setting.field: setting.default
    for setting in settings_of_section("model")
    if setting.changes_model and not (setting.is_required or setting.flag.derived)
}
TRAINING_ARGUMENTS = {
    "batch": ("global_batch_size",),
    "data": ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    "precision": ("bf16", "fp16", "fp32_residual_connection"),
    "optimizer": ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay"),
    "training": ("train_iters", "train_samples"),
    "schedule": (
        *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
        *("lr_warmup_samples", "lr_warmup_fraction", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
        "lr_wsd_decay_samples",
    ),
}
"""Section other than the model's -> arguments that have the name and the values of a setting in it."""


@dataclass(frozen=True)
class Rule:
    """Translates arguments into settings.

    read: translates all arguments of a checkpoint that has at least one argument of this rule into settings.
    Raises ValueError with the reason if this program does not support the model. write: translates a model's
    settings into arguments. Raises ValueError with the flag if the other program does not support the model.
    """

    settings: tuple[str, ...]
    arguments: tuple[str, ...]
    read: Callable[[Arguments], Mapping[str, Any]]
    write: Callable[[ModelConfig], Arguments] = lambda _: {}


@dataclass(frozen=True)
class Program:
    """A program that writes checkpoints. has_defaults: whether a setting that no argument determines has this
    program's default value. If false, it has the default only if the arguments contain sizes of the model."""

    title: str
    rules: tuple[Rule, ...]
    has_defaults: bool = True

    def translate(self, args: Arguments) -> tuple[dict[str, Any], list[str]]:
        """Returns the settings of the model, and a list of what this program does not support, each as
        'argument is value in the arguments of the program, expected value'."""
        has_defaults = self.has_defaults or args.get("num_layers") is not None
        settings, problems = dict(_DEFAULTS) if has_defaults else {}, []
        settings.pop("activation", None)  # the default differs between versions of the programs
        for rule in self.rules:
            try:
                settings |= rule.read(args) if args.keys() & {*rule.arguments} else {}
            except (ValueError, TypeError) as error:
                problems.append(one_line(error))
        for name in sorted(args.keys() - {name for rule in self.rules for name in rule.arguments}):
            if not _is_harmless(name, args[name]):
                expected = " or ".join(map(str, [None, *_table()["values"].get(name, ())]))
                found = f"{name if is_plain(name) else shown(name)} is {one_line(args[name])}"
                problems.append(f"{found} in the arguments of {self.title}, expected {expected}")
        return settings, problems

    def settings(self, args: Arguments, folder: Path) -> dict[str, Any]:
        """Returns the settings of the model. Raises UserError if this program does not support the model."""
        settings, problems = self.translate(args)
        if problems:
            raise UserError(
                f"checkpoint {folder} was written by {self.title}, with arguments that cannot be converted: "
                f"{'; '.join(problems)}"
            )
        return settings

    def differences(self, args: Arguments, config: Config) -> list[str]:
        """Returns why a run with this config cannot load the model: arguments that this program does not
        support, and settings whose values differ."""
        saved, found = self.translate(args)
        sources = {name: rule.arguments for rule in self.rules for name in rule.settings}
        for name, value in config.model_settings().items():
            is_compared = name in saved and (hasattr(config.model, name) or not config.checkpoint.finetune)
            if is_compared and saved[name] != value:
                given = [key for key in sources.get(name, ()) if key != name and args.get(key) is not None]
                means = ", ".join(f"{key} {one_line(args[key])}" for key in given)
                found.append(f"{means and means + ': '}{option_name(name)} was {saved[name]}, is {value}")
        return found

    def arguments(self, model: ModelConfig) -> dict[str, Any]:
        """Returns the arguments that describe a model. Raises UserError if the program does not support
        it."""
        written: dict[str, Any] = {}
        try:
            for rule in self.rules:
                written |= rule.write(model)
            translated = {name for rule in self.rules for name in rule.settings} | model.unused_fields()
            for name in _DEFAULTS.keys() - translated:
                if (value := getattr(model, name)) != _DEFAULTS[name]:
                    raise ValueError(f"{option_name(name)} {value_text(value)}")
        except ValueError as error:
            raise UserError(f"{error} has no equivalent in {self.title}: use --format dcp") from error
        return written


def plain_arguments(args: Arguments) -> dict[str, Any]:
    """Returns the arguments in JSON types. An enumeration becomes its value, any other object its text."""
    return {name: _plain(value) for name, value in args.items() if isinstance(name, str)}


def _plain(value: Any) -> Any:
    if isinstance(value, Stub) and len(value.constructor_args) == 1:
        value = value.constructor_args[0]
    return value if isinstance(value, (str, int, float, bool, list, tuple, type(None))) else shown(value)


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = read_json(Path(__file__).with_suffix(".json"))
    return content


def _words(lines: Iterable[str]) -> list[str]:
    return " ".join(lines).split()


def harmless_in_hugging_face() -> frozenset[str]:
    """Returns the names of the settings in a Hugging Face config.json that never change the logits."""
    return frozenset(_words(_table()["huggingface"]))


def _is_harmless(name: str, value: Any) -> bool:
    if value is None or name in _table()["values"]:
        return value is None or value in _table()["values"][name]
    is_own = _CHANGES_MODEL.get(name) is False
    is_known = is_own or name in _ignored_arguments()
    # In this comparison the number 0 equals False.
    return is_known or value in (False, "", [], ()) or _harmless_names().match(name) is not None


@cache
def _harmless_names() -> re.Pattern[str]:
    patterns = (pattern for lines in _table()["harmless"].values() for pattern in _words(lines))
    return re.compile("|".join(map(fnmatch.translate, patterns)))


@cache
def _ignored_arguments() -> frozenset[str]:
    """Returns the arguments of flags that a run ignores whatever their values and other flags are."""
    ignored = foreign_flags().ignored.values()
    return frozenset(flag.name[2:].replace("-", "_") for flag in ignored if not flag.has_conditions)


# --- rules ---


def _renamed(setting: str, *arguments: str) -> Rule:
    """Returns the rule of a setting that has different names in other programs. arguments: these names; each
    such argument holds the setting's value."""

    def read(args: Arguments) -> Mapping[str, Any]:
        given = {name: args[name] for name in arguments if args.get(name) is not None}
        if len({*map(str, given.values())}) > 1:
            raise ValueError(f"the arguments {one_line(given)} contradict each other")
        if not given and _DEFAULTS.get(setting, False) is None:
            return {setting: None}
        return dict.fromkeys([setting] if given else [], next(iter(given.values()), None))

    def write(model: ModelConfig) -> Arguments:
        return dict.fromkeys(arguments, getattr(model, setting)) if hasattr(model, setting) else {}

    return Rule((setting,), arguments, read, write)


def _same(*names: str) -> tuple[Rule, ...]:
    """Returns the rules of arguments whose names and values equal a setting's."""
    return tuple(_renamed(name, name) for name in names)


def _read_norm(args: Arguments) -> Mapping[str, Any]:
    name = SETTINGS["model.normalization"].flag.spellings.get(args["normalization"], args["normalization"])
    if name not in (None, *NORMALIZATIONS):
        raise ValueError(f"normalization is {one_line(name)}, expected {' or '.join(NORMALIZATIONS)}")
    return {} if name is None else {"normalization": name}


def _write_norm(model: ModelConfig) -> Arguments:
    if model.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"--normalization {model.normalization}")
    return {"normalization": model.normalization}


def _read_core_positions(args: Arguments) -> Mapping[str, Any]:
    """Reads the position embedding. Microsoft's Megatron-DeepSpeed has no `position_embedding_type`."""
    kind = args.get("position_embedding_type", "learned_absolute")
    if kind in ("rope", "yarn") or args.get("use_rotary_position_embeddings"):
        return {"position_embedding_type": "rotary"}
    if kind == "learned_absolute" and args.get("add_position_embedding", True):
        return {"position_embedding_type": "absolute"}
    if kind == "learned_absolute":
        raise ValueError(
            "it has neither learned nor rotary position embeddings: add_position_embedding is False"
        )
    raise ValueError(f"position_embedding_type is {one_line(kind)}, expected rope, yarn or learned_absolute")


def _write_core_positions(model: ModelConfig) -> Arguments:
    kind = {"rotary": "rope", "absolute": "learned_absolute"}.get(model.position_embedding_type)
    if kind is None:
        raise ValueError(f"--position-embedding-type {model.position_embedding_type}")
    if kind == "rope" and model.rope_scaling_type == "yarn" and not model.multi_latent_attention:
        kind = "yarn"
    named = {"position_embedding_type": kind, "add_position_embedding": True}
    return named | {"use_rotary_position_embeddings": False}


def _read_positions(args: Arguments) -> Mapping[str, Any]:
    kind = args["position_embedding_type"]
    kind = {1: "rotary", 2: "absolute", 3: "alibi"}.get(kind, kind)
    return {} if kind is None else {"position_embedding_type": kind}


def _read_mlp(args: Arguments) -> Mapping[str, Any]:
    gate = "swiglu" if args.get("swiglu") else args.get("glu_activation")
    settings = {"glu_activation": gate} if {"swiglu", "glu_activation"} & args.keys() else {}
    if gate is None and args.get("activation") is not None:
        settings["activation"] = args["activation"]
    elif gate is None and {*_FUSED, "openai_gelu", "onnx_safe"} & args.keys():
        # openai_gelu and the fused kernel use the tanh approximation; onnx_safe and torch's GELU are exact.
        is_fused = any(args.get(name) for name in _FUSED) and not args.get("onnx_safe")
        settings["activation"] = "gelu" if args.get("openai_gelu") or is_fused else "gelu_exact"
    return settings


def _write_core_mlp(model: ModelConfig) -> Arguments:
    gate, activation = model.glu_activation, model.activation
    if gate not in (None, "swiglu", "quick_geglu"):
        raise ValueError(f"--glu-activation {gate}")
    # Only the fused kernel uses the tanh approximation, and only a model with biases can use this kernel.
    kinds = ("gelu_exact",) if model.disable_bias_linear else ("gelu", "gelu_exact")
    if gate is None and activation not in kinds:
        raise ValueError(f"--activation {activation}{' without biases' * model.disable_bias_linear}")
    gates = {"swiglu": gate == "swiglu", "quick_geglu": gate == "quick_geglu"}
    gates |= {name: getattr(model, name) for name in _GATE}
    return {**gates, "bias_gelu_fusion": gate is None and activation == "gelu"}


def _read_core_mlp(args: Arguments) -> Mapping[str, Any]:
    for name in _TE_GELU:
        if args.get(name) and not args.get("swiglu"):
            raise ValueError(f"{name} is {one_line(args[name])} without swiglu, expected False: another GELU")
    if args.get("quick_geglu") and args.get("swiglu"):
        raise ValueError("quick_geglu is True with swiglu, expected one of them")
    known = {name: value for name, value in args.items() if name not in ("openai_gelu", "onnx_safe")}
    settings = {"glu_activation": "quick_geglu"} if args.get("quick_geglu") else _read_mlp(known)
    given = {name: args[name] for name in _GATE if args.get(name)}
    if given and settings.get("glu_activation") is None:
        raise ValueError(f"{one_line(given)} without swiglu and quick_geglu, expected None")
    return {**settings, **given}


def _read_biases(args: Arguments) -> Mapping[str, Any]:
    has_biases = args.get("add_bias_linear")
    return {
        "disable_bias_linear": bool(args.get("disable_bias_linear") if has_biases is None else not has_biases)
    }


def _read_groups(args: Arguments) -> Mapping[str, Any]:
    if not args.get("group_query_attention"):
        return {"group_query_attention": False}
    return {name: args[name] for name in _GROUPS if args.get(name) is not None}


def _read_key_value_heads(args: Arguments) -> Mapping[str, Any]:
    groups, heads = args["num_key_value_heads"], args.get("num_attention_heads")
    if groups in (None, heads):
        return {"group_query_attention": False}
    if NEWER_ARGUMENT in args:
        raise ValueError(
            f"num_key_value_heads is {one_line(groups)}, expected {one_line(heads)}: since commit 676a482c "
            "Megatron-DeepSpeed takes each third of the rows for queries, keys and values"
        )
    return {"group_query_attention": True, "num_query_groups": groups}


def _read_window(args: Arguments) -> Mapping[str, Any]:
    """Reads the size of the attention window. This program's window counts the token itself; Megatron-LM's
    does not."""
    window = args.get("window_size")
    if window is None:
        return {"window_size": None, "window_pattern": None, "window_rope_scaling": False}
    before, after = window if isinstance(window, (list, tuple)) and len(window) == 2 else (None, None)
    if type(before) is not int or before < 0 or after != 0:
        raise ValueError(f"window_size is {one_line(window)}, expected (N, 0): tokens before, and none after")
    pattern = _read_pattern(WINDOW_PATTERN, "window_attn_skip_freq", args)
    has_scaling = bool(args.get("use_rope_scaling")) or has_yarn(args)
    windows = {"window_size": before + 1, "window_pattern": pattern}
    return {**windows, "window_rope_scaling": has_scaling and pattern is not None}


def _read_pattern(syntax: LayerPattern, name: str, args: Arguments) -> tuple[str, ...] | None:
    """Returns the pattern of layers in the argument `name` (in Megatron-LM a number or a list); None if the
    argument is absent."""
    if (layers := args.get(name)) is None:
        return None
    try:
        return syntax.parse([str(layers)], min(int(args["num_layers"]), 100_000))  # bounds a wrong number
    except (ConfigError, KeyError, TypeError) as error:
        raise ValueError(f"{name} is {one_line(layers)} ({one_line(error)})") from error


def _read_rotary_layers(args: Arguments) -> Mapping[str, Any]:
    pattern = _read_pattern(ROTARY_PATTERN, "no_rope_freq", args)
    has_effect = pattern and "rotary" in _read_core_positions(args).values()
    return {"no_rope_freq": pattern if has_effect else None}


def _write_rotary_layers(model: ModelConfig) -> Arguments:
    layers = [int(not model.has_rotary(layer)) for layer in range(model.num_layers)]
    return {"no_rope_freq": layers if any(layers) else None}


def _write_window(model: ModelConfig) -> Arguments:
    if model.window_pattern is not None and model.rope_scaling_type and not model.window_rope_scaling:
        raise ValueError("--window-pattern with --rope-scaling-type and without --window-rope-scaling")
    window = None if model.window_size is None else (model.window_size - 1, 0)
    layers = [int(model.has_window(layer)) for layer in range(model.num_layers)]
    return {"window_size": window, "window_attn_skip_freq": layers if model.window_pattern else None}


# A dense model has this default in Megatron-DeepSpeed.
_NUMBER, _NUMBERS = "num_experts", {"1": None, "[1]": None}
_SIZES = _same(
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("max_position_embeddings", "untie_embeddings_and_output_weights", "rotary_percent", "seq_length"),
    *("make_vocab_size_divisible_by", "fp32_residual_connection", *TRAINING_ARGUMENTS["data"]),
)
_NORM = Rule(("normalization",), ("normalization",), _read_norm, _write_norm)
_BIASES = Rule(
    ("disable_bias_linear",),
    ("add_bias_linear", "disable_bias_linear"),
    _read_biases,
    lambda model: {"add_bias_linear": not model.disable_bias_linear},
)
_GROUPS = ("group_query_attention", "num_query_groups")
_MLP, _FUSED = ("glu_activation", "activation"), ("bias_gelu_fusion", "bias_activation_fusion")
_GATE = ("activation_func_clamp_value", "glu_linear_offset")
_GELU = (*_FUSED, "openai_gelu", "onnx_safe")
# Transformer Engine's GELU has the tanh approximation, whatever the other GELU arguments are.
_TE_GELU = ("use_te_activation_func", "use_transformer_engine_op_fuser")
_POSITIONS, _ROTARY = (
    ("position_embedding_type",),
    ("add_position_embedding", "use_rotary_position_embeddings"),
)
_WINDOW = ("window_size", "window_attn_skip_freq")

MEGATRON_CORE = Program(
    "Megatron-Core",
    (
        *_SIZES,
        *_same("rotary_base", "rotary_interleaved", "qk_layernorm", "attention_output_gate", "softmax_type"),
        *_same("mtp_num_layers", "mtp_loss_scaling_factor"),
        Rule(("no_rope_freq",), ("no_rope_freq",), _read_rotary_layers, _write_rotary_layers),
        # Megatron-LM sets this argument for every model whose linear layers have biases.
        Rule(
            ("add_qkv_bias",),
            ("add_qkv_bias",),
            lambda args: {
                "add_qkv_bias": bool(args["add_qkv_bias"]) and args.get("add_bias_linear") is False
            },
            lambda model: {"add_qkv_bias": model.qkv_bias},
        ),
        _renamed("layernorm_epsilon", "layernorm_epsilon", "norm_epsilon"),
        _renamed("apply_layernorm_1p", "apply_layernorm_1p", "layernorm_zero_centered_gamma"),
        _NORM,
        _BIASES,
        Rule(_GROUPS, _GROUPS, _read_groups, lambda model: {name: getattr(model, name) for name in _GROUPS}),
        Rule(_POSITIONS, (*_POSITIONS, *_ROTARY), _read_core_positions, _write_core_positions),
        # Megatron-LM's GELU is exact or fused: it ignores openai_gelu and onnx_safe.
        Rule(
            (*_MLP, *_GATE),
            ("swiglu", "quick_geglu", *_GATE, *_FUSED, *_TE_GELU),
            _read_core_mlp,
            _write_core_mlp,
        ),
        Rule(("window_size", "window_pattern", "window_rope_scaling"), _WINDOW, _read_window, _write_window),
        Rule(SCALING_SETTINGS, SCALING_ARGUMENTS, read_rope_scaling, write_rope_scaling),
        Rule(LATENT_SETTINGS, LATENT_ARGUMENTS, read_latent_attention, write_latent_attention),
        Rule(EXPERTS, (*EXPERTS, "num_moe_experts", *WITHOUT_EQUIVALENT), read_experts, write_experts),
        # This rule writes nothing: Megatron-LM has no flag for the setting.
        Rule((), ("softmax_scale",), lambda args: {"softmax_scale": args["softmax_scale"]}),
    ),
)
MICROSOFT = Program(
    "Microsoft's Megatron-DeepSpeed",
    (
        *_SIZES,
        *_same("layernorm_epsilon", "apply_residual_connection_post_layernorm"),
        _renamed("rotary_base", "rope_theta"),
        _NORM,
        _BIASES,
        Rule(_GROUPS, ("num_key_value_heads",), _read_key_value_heads),
        Rule(_POSITIONS, _ROTARY, _read_core_positions),
        Rule(_MLP, ("swiglu", *_GELU), _read_mlp),
    ),
)
MODEL_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length"),
    *("max_position_embeddings", "make_vocab_size_divisible_by", *_DEFAULTS),
)
"""Settings of the model that this program saves among the arguments of its own checkpoints."""
OWN_NAMES = Program(
    "a Megatron-DeepSpeed program",
    (
        *_SIZES,
        *_same(*sorted(_DEFAULTS.keys() - {*_MLP, *_POSITIONS, *_NORM.settings, *_BIASES.settings, _NUMBER})),
        Rule((_NUMBER,), (_NUMBER,), lambda args: {_NUMBER: _NUMBERS.get(str(args[_NUMBER]), args[_NUMBER])}),
        _NORM,
        _BIASES,
        Rule(_POSITIONS, _POSITIONS, _read_positions),
        Rule(_MLP, ("swiglu", *_MLP, *_GELU), _read_mlp),
    ),
    has_defaults=False,
)
"""BigScience's Megatron-DeepSpeed, whose arguments have the names of this program's settings. It also stands
for this program, because a tool of DeepSpeed may have converted one of its checkpoints."""


def program_of(names: Collection[str]) -> Program:
    """Returns the program that wrote DeepSpeed's files. names: the names of the parameters in the files."""
    return MICROSOFT if has_megatron_deepspeed_names(names) else OWN_NAMES
