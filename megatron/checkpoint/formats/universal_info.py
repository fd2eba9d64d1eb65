"""What DeepSpeed's tools and other Megatron programs read in the mp_rank files of a checkpoint.

DeepSpeed's converter needs `universal_checkpoint_info`: regular expressions for names of parameters, one list
per way of sharding. It concatenates a parameter that matches none along dimension 0. Checkpoints of this
program have a list for these too, which DeepSpeed ignores: so each of their parameters matches exactly one
pattern, and each pattern at least one parameter. The lists are derived from the `ParameterSpec`s. They are
only read where there are no specs, in checkpoints of other programs.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint.names import shown
from megatron.config.config import Config
from megatron.config.model import MEGATRON_MODEL_ARGS
from megatron.errors import UserError
from megatron.mpu.parameters import ParameterSpec

INFO_KEY = "universal_checkpoint_info"
VERSION_KEY = "universal_checkpoint_version"
# DeepSpeed 0.19.8's. 0.2 and 0.3 lack patterns that no parameter here needs: `parameter_with_sub_params`, for
# sub-parameters of unequal size, came with 0.3 and their widths per rank with 0.4.
VERSION = 0.4
VOCAB_SIZE_KEY = "original_vocab_size"
PIPELINE_REPLICATED_KEY = "pipeline_replicated_parameter_patterns"
TIED_PREFIX = "tied_modules."
REPLICATED = "tp_replicated_parameter_patterns"
# Replicas that differ in some programs.
AVERAGED = "parameter_to_average_patterns"
ROW_PARALLEL = "parameter_with_row_parallelism_patterns"
# A gated MLP: two matrices stacked along dimension 0, each sharded along it.
TWO_SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0"
# Sharded along dimension 0, with padded rows.
VOCABULARY = "vocabulary_parameter_patterns"
COLUMN_PARALLEL = "parameter_with_column_parallelism_patterns"
SHARDING: dict[str, tuple[int | None, int]] = {
    REPLICATED: (None, 1),
    AVERAGED: (None, 1),
    ROW_PARALLEL: (1, 1),
    TWO_SUB_PARAMS: (0, 2),
    VOCABULARY: (0, 1),
    COLUMN_PARALLEL: (0, 1),
}
"""Key of a list of patterns -> `shard_dim` and `num_fused_parts` of the parameters that match."""
# Lists that no parameter here needs. A checkpoint with them is refused.
_UNKNOWN_KEYS = (
    "parameter_with_sub_params",
    "autotp_unsupported_parameter_patterns",
    "expert_parameter_patterns",
)
# What `run.json` calls the fields of a ParameterSpec, where the names differ.
_FILE_KEYS = {
    "global_shape": "whole_shape",
    "num_valid_rows": "used_rows",
    "num_fused_parts": "blocks",
    "lr_mult": "rate_factor",
}


def spec_record(spec: ParameterSpec) -> dict[str, Any]:
    """A ParameterSpec as `run.json` stores it, in JSON types."""
    record = {_FILE_KEYS.get(name, name): value for name, value in asdict(spec).items()}
    return {**record, "whole_shape": list(spec.global_shape)}


def recorded_spec(record: Mapping[str, Any]) -> ParameterSpec:
    """The sharding in a `spec_record`; the other fields have their defaults."""
    rows = record["used_rows"]
    return ParameterSpec(
        tuple(record["whole_shape"]), record["shard_dim"], record["blocks"], num_valid_rows=rows
    )


def pattern_key(name: str, spec: ParameterSpec) -> str:
    """The list with the parameter's pattern. ValueError if universal checkpoints cannot describe the
    sharding."""
    has_padding = spec.num_valid_rows is not None
    if spec.shard_dim is None and not has_padding:
        return REPLICATED
    keys = (VOCABULARY,) if has_padding else (ROW_PARALLEL, TWO_SUB_PARAMS, COLUMN_PARALLEL)
    for key in keys:
        if SHARDING[key] == (spec.shard_dim, spec.num_fused_parts):
            return key
    raise ValueError(
        f"{name} is sharded along dimension {spec.shard_dim} with {spec.num_fused_parts} fused parts, valid "
        f"rows {spec.num_valid_rows}: universal checkpoints have no rule to merge it"
    )


def derive_info(specs: Mapping[str, ParameterSpec], vocab_size: int) -> dict[str, Any]:
    """`universal_checkpoint_info` of a model with these parameters, by name.

    vocab_size: without padding. Raises ValueError for a parameter that none or more than one pattern matches.
    """
    patterns: dict[str, list[str]] = {PIPELINE_REPLICATED_KEY: [], **{key: [] for key in SHARDING}}
    for name, spec in specs.items():
        tied = [PIPELINE_REPLICATED_KEY] if name.startswith(TIED_PREFIX) else []
        for key in (pattern_key(name, spec), *tied):
            if _pattern_of(name) not in patterns[key]:
                patterns[key].append(_pattern_of(name))
    info = {VERSION_KEY: VERSION, VOCAB_SIZE_KEY: vocab_size, **patterns}
    check_patterns(info, specs)
    return info


def _pattern_of(name: str) -> str:
    """A pattern that matches the parameter in every layer: the layer's number becomes `\\d+`."""
    number, dot, rest = name.partition(".")
    return rf"^\d+\.{re.escape(rest)}$" if dot and number.isdigit() else f"^{re.escape(name)}$"


def matching(info: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """(key of the list, pattern) of all patterns that match a parameter's name."""
    return [(key, pattern) for key in SHARDING for pattern in info.get(key, []) if re.match(pattern, name)]


def check_info(info: Any, source: Path) -> dict[str, Any]:
    """Returns `universal_checkpoint_info` read from the file `source` if it consists of patterns and numbers.
    Raises UserError otherwise."""
    lists: list[Any] = [info.get(key, []) for key in SHARDING] if isinstance(info, dict) else [None]
    if not all(isinstance(entry, (list, tuple)) for entry in lists):
        raise UserError(f"{source}: its {INFO_KEY} holds something other than lists of patterns")
    for pattern in (pattern for patterns in lists for pattern in patterns):
        try:
            re.compile(pattern if isinstance(pattern, str) else "(")
        except (re.error, OverflowError, RecursionError):
            raise UserError(
                f"{source} has the pattern {shown(pattern)}, expected a regular expression for names of "
                "parameters"
            ) from None
    size = info.get(VOCAB_SIZE_KEY, 1)
    if not (type(size) is int and 0 < size < 1 << 62):
        raise UserError(f"{source}: the {VOCAB_SIZE_KEY} in its {INFO_KEY} is not a positive number")
    return info


def check_patterns(info: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError naming a parameter that not exactly one pattern matches, and a pattern that matches
    none."""
    names = list(names)
    for name in names:
        found = matching(info, name)
        if len(found) != 1:
            keys = ", ".join(f"{pattern} ({key})" for key, pattern in found) or "none"
            raise ValueError(f"parameter {name} must match one pattern of {INFO_KEY}, and matches {keys}")
    for pattern in unused_patterns(info, names):
        raise ValueError(f"pattern {pattern} of {INFO_KEY} matches no parameter")


def unused_patterns(info: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Patterns that match none of the names."""
    names = list(names)
    patterns = (pattern for key in SHARDING for pattern in info.get(key, []))
    return [pattern for pattern in patterns if not any(re.match(pattern, name) for name in names)]


def external_spec(
    info: Mapping[str, Any], name: str, shard_shape: tuple[int, ...], tp_size: int
) -> ParameterSpec:
    """The spec of a parameter of another program, of which each of tp_size ranks has a shard of this shape.

    Chosen as by DeepSpeed's converter: a parameter that no pattern matches is concatenated along dimension 0,
    and a vocabulary pattern may match together with a column pattern. Raises UserError for lists that are
    not supported, and for contradicting patterns.
    """
    for key in _UNKNOWN_KEYS:
        if info.get(key):
            raise UserError(
                f"the checkpoint's {INFO_KEY} has {key}: only deepspeed's own converter merges those"
            )
    found = {key for key, _ in matching(info, name)} or {COLUMN_PARALLEL}
    found = found - {COLUMN_PARALLEL} if VOCABULARY in found else found
    if len(found) > 1:
        raise UserError(
            f"the checkpoint's {INFO_KEY} gives {name} more than one rule: {', '.join(sorted(found))}"
        )
    key = found.pop()
    dim, num_fused_parts = SHARDING[key]
    shape = list(shard_shape)
    if dim is not None:
        shape[dim] *= tp_size
    rows = info[VOCAB_SIZE_KEY] if key == VOCABULARY else None
    return ParameterSpec(tuple(shape), dim, num_fused_parts, num_valid_rows=rows)


def megatron_args(config: Config, state: Mapping[str, Any]) -> Namespace:
    """What Megatron programs read under 'args' in an mp_rank file: the model and the progress of the run.

    state: the fields of `TrainingState`.
    """
    model, parallel = config.model, config.parallel
    return Namespace(
        **{name: getattr(model, name) for name in MEGATRON_MODEL_ARGS},
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        consumed_train_samples=state["consumed_samples"],
        consumed_train_tokens=state["consumed_tokens"],
    )


def client_state(info: dict[str, Any], config: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's engine writes into every mp_rank file for its tools and other Megatron programs."""
    return {INFO_KEY: info, "iteration": state["iteration"], "args": megatron_args(config, state)}
