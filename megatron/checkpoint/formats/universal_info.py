"""The entries of a checkpoint's mp_rank files that DeepSpeed's tools and other Megatron programs read.

DeepSpeed's converter needs `universal_checkpoint_info`: lists of regular expressions for parameter names, one
list per way of sharding. It concatenates a parameter that no pattern matches along dimension 0. This program
also writes a list for such parameters, which DeepSpeed ignores. So in its checkpoints each parameter matches
exactly one pattern, and each pattern at least one parameter. The lists are derived from the `ParameterSpec`s.
They are read only from checkpoints of other frameworks, which have no specs.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint.foreign_arguments import MODEL_ARGUMENTS
from megatron.checkpoint.names import shown
from megatron.config.config import Config
from megatron.errors import UserError
from megatron.mpu.parameter_spec import ParameterSpec, Shard

INFO_KEY = "universal_checkpoint_info"
VERSION_KEY = "universal_checkpoint_version"
# The version that DeepSpeed 0.19.8 writes. This program does not need what 0.3 and 0.4 added for
# sub-parameters of unequal size (`parameter_with_sub_params`).
VERSION = 0.4
VOCAB_SIZE_KEY = "original_vocab_size"
PIPELINE_REPLICATED_KEY = "pipeline_replicated_parameter_patterns"
TIED_PREFIX = "tied_modules."
REPLICATED = "tp_replicated_parameter_patterns"
# Parameters whose replicas differ in some frameworks; their replicas are averaged.
AVERAGED = "parameter_to_average_patterns"
ROW_PARALLEL = "parameter_with_row_parallelism_patterns"
# A gated MLP: two matrices stacked along dimension 0, each of them sharded along dimension 0.
TWO_SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0"
# Parameters sharded along dimension 0 that have padded rows.
VOCABULARY = "vocabulary_parameter_patterns"
COLUMN_PARALLEL = "parameter_with_column_parallelism_patterns"
SHARDING: dict[str, tuple[Shard, ...]] = {
    REPLICATED: (),
    AVERAGED: (),
    ROW_PARALLEL: (Shard(1),),
    TWO_SUB_PARAMS: (Shard(0, parts=2),),
    VOCABULARY: (Shard(0),),
    COLUMN_PARALLEL: (Shard(0),),
}
"""Key of a list of patterns -> sharding of the parameters that match a pattern in it."""
# Lists for parameters that no model of this program has. Checkpoints with such a list are rejected.
_UNKNOWN_KEYS = (
    "parameter_with_sub_params",
    "autotp_unsupported_parameter_patterns",
    "expert_parameter_patterns",
)
# Field of ParameterSpec -> its key in `run.json`, for fields whose key has a different name.
_FILE_KEYS = {
    "global_shape": "whole_shape",
    "num_valid_rows": "used_rows",
    "lr_mult": "rate_factor",
}


def spec_record(spec: ParameterSpec) -> dict[str, Any]:
    """Returns a ParameterSpec in JSON types, as `run.json` stores it. A sharding over tensor-parallel ranks
    has the keys `shard_dim` and `blocks`; any other sharding has the key `sharding`."""
    fields = {name: value for name, value in asdict(spec).items() if name not in ("matrix_rows", "sharding")}
    record = {_FILE_KEYS.get(name, name): value for name, value in fields.items()}
    record |= {"whole_shape": list(spec.global_shape), "shard_dim": None, "blocks": 1}
    if spec.axis_names == ("tp",):
        (shard,) = spec.sharding
        return record | {"shard_dim": shard.dim, "blocks": shard.parts}
    return record | ({"sharding": [list(shard) for shard in spec.sharding]} if spec.sharding else {})


def recorded_spec(record: Mapping[str, Any]) -> ParameterSpec:
    """Returns the spec of a `spec_record`, with its sharding and `has_gradient`. All other fields have their
    defaults."""
    sharding = tuple(Shard(*shard) for shard in record.get("sharding", ()))
    if record["shard_dim"] is not None:
        sharding = (Shard(record["shard_dim"], parts=record["blocks"]),)
    return ParameterSpec(
        tuple(record["whole_shape"]),
        sharding,
        num_valid_rows=record["used_rows"],
        has_gradient=record.get("has_gradient", True),
    )


def pattern_key(name: str, spec: ParameterSpec) -> str:
    """Returns the key of the list that contains the parameter's pattern. Raises ValueError if universal
    checkpoints cannot describe the sharding."""
    has_padding = spec.num_valid_rows is not None
    over_tp = tuple(shard for shard in spec.sharding if shard.axis == "tp")  # DeepSpeed merges only these
    if not over_tp and not has_padding:
        return REPLICATED
    keys = (VOCABULARY,) if has_padding else (ROW_PARALLEL, TWO_SUB_PARAMS, COLUMN_PARALLEL)
    for key in keys:
        if SHARDING[key] == over_tp:
            return key
    raise ValueError(
        f"{name} is sharded as {spec.sharding}, valid rows {spec.num_valid_rows}: universal checkpoints have "
        "no rule to merge it"
    )


def derive_info(specs: Mapping[str, ParameterSpec], vocab_size: int) -> dict[str, Any]:
    """Returns the `universal_checkpoint_info` of a model. specs: parameter name -> spec.

    vocab_size: size of the vocabulary without padding. Raises ValueError for a parameter that no pattern, or
    more than one pattern, matches.
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
    """Returns a pattern that matches the parameter in every layer: `\\d+` replaces the layer's number."""
    number, dot, rest = name.partition(".")
    return rf"^\d+\.{re.escape(rest)}$" if dot and number.isdigit() else f"^{re.escape(name)}$"


def matching(info: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """Returns all patterns that match a parameter's name, as (key of the list, pattern)."""
    return [(key, pattern) for key in SHARDING for pattern in info.get(key, []) if re.match(pattern, name)]


def check_info(info: Any, source: Path) -> dict[str, Any]:
    """Returns the `universal_checkpoint_info` that was read from `source`. Raises UserError if it is
    malformed."""
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
    """Raises ValueError unless each parameter matches exactly one pattern, and each pattern matches at least
    one parameter."""
    names = list(names)
    for name in names:
        found = matching(info, name)
        if len(found) != 1:
            keys = ", ".join(f"{pattern} ({key})" for key, pattern in found) or "none"
            raise ValueError(f"parameter {name} must match one pattern of {INFO_KEY}, and matches {keys}")
    for pattern in unused_patterns(info, names):
        raise ValueError(f"pattern {pattern} of {INFO_KEY} matches no parameter")


def unused_patterns(info: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the patterns that match none of the names."""
    names = list(names)
    patterns = (pattern for key in SHARDING for pattern in info.get(key, []))
    return [pattern for pattern in patterns if not any(re.match(pattern, name) for name in names)]


def external_spec(
    info: Mapping[str, Any], name: str, shard_shape: tuple[int, ...], tp_size: int
) -> ParameterSpec:
    """Returns the spec of another framework's parameter. tp_size: number of tensor-parallel ranks that have a
    part of it. shard_shape: the shape of each part.

    Follows DeepSpeed's converter: a parameter that no pattern matches is concatenated along dimension 0, and
    a parameter may match a vocabulary pattern together with a column pattern. Raises UserError for lists that
    are not supported, and for contradicting patterns.
    """
    for key in _UNKNOWN_KEYS:
        if info.get(key):
            raise UserError(
                f"the checkpoint's {INFO_KEY} has {key}: only DeepSpeed's own converter merges it"
            )
    found = {key for key, _ in matching(info, name)} or {COLUMN_PARALLEL}
    found = found - {COLUMN_PARALLEL} if VOCABULARY in found else found
    if len(found) > 1:
        raise UserError(
            f"the checkpoint's {INFO_KEY} gives {name} more than one rule: {', '.join(sorted(found))}"
        )
    key = found.pop()
    shape = list(shard_shape)
    for dim, _, _ in SHARDING[key]:
        shape[dim] *= tp_size
    rows = info[VOCAB_SIZE_KEY] if key == VOCABULARY else None
    return ParameterSpec(tuple(shape), SHARDING[key], num_valid_rows=rows)


def client_state(info: dict[str, Any], config: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that DeepSpeed adds to every mp_rank file; its tools and Megatron programs read
    them. state: the fields of `TrainingState`."""
    model, parallel = config.model, config.parallel
    unused = {"num_experts", *model.unused_fields()} if model.num_experts is None else ()
    args = Namespace(
        **{name: getattr(model, name) for name in MODEL_ARGUMENTS if name not in unused},
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        consumed_train_samples=state["consumed_samples"],
        consumed_train_tokens=state["consumed_tokens"],
    )
    return {
        INFO_KEY: info,
        "iteration": state["iteration"],
        "global_steps": state["iteration"],
        "global_samples": state["consumed_samples"],
        "args": args,
    }
