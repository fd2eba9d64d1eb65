"""How the shards of each parameter are merged: patterns of parameter names, in DeepSpeed's format.

DeepSpeed's converter reads them under `universal_checkpoint_info` in the mp_rank files of a checkpoint: lists
of regular expressions, one list per merge rule. It concatenates a parameter that matches no pattern along
dimension 0. Here that rule has its own list, which DeepSpeed ignores. So each parameter must match exactly
one pattern, and each pattern at least one parameter.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.convert.patterns import check_pattern, matches
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.model_fields import MEGATRON_MODEL_ARGS
from megatron.files import HostileFileError

if TYPE_CHECKING:
    from megatron.mpu.parameters import ParameterSpec

INFO_KEY = "universal_checkpoint_info"
VERSION_KEY = "universal_checkpoint_version"
# DeepSpeed 0.19.8's. 0.2 and 0.3 lack patterns that no rule here needs: `parameter_with_sub_params`, for
# sub-parameters of unequal size, came with 0.3 and their widths per rank with 0.4.
VERSION = 0.4
VOCAB_SIZE_KEY = "original_vocab_size"
PIPELINE_REPLICATED_KEY = "pipeline_replicated_parameter_patterns"
TIED_PREFIX = "tied_modules."
# A model has some twenty kinds of parameters.
_MAX_PATTERNS = 1000
# DeepSpeed's merge rules that no parameter here needs. A checkpoint with them is refused.
_UNKNOWN_KEYS = (
    "parameter_with_sub_params",
    "autotp_unsupported_parameter_patterns",
    "expert_parameter_patterns",
)


class Rule(Enum):
    """A merge rule. Its value is the key of its patterns in `universal_checkpoint_info`."""

    REPLICATED = "tp_replicated_parameter_patterns"
    """Replicated over TP ranks, with equal replicas."""
    AVERAGED = "parameter_to_average_patterns"
    """Replicated over TP ranks; in some programs the replicas differ, and their mean is used."""
    ROWS = "parameter_with_row_parallelism_patterns"
    """Row-parallel (Megatron-LM): sharded along dimension 1."""
    TWO_SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0"
    """A gated MLP: two matrices stacked along dimension 0, each sharded along it."""
    VOCABULARY = "vocabulary_parameter_patterns"
    """Sharded along dimension 0, with padded rows that are not stored."""
    COLUMNS = "parameter_with_column_parallelism_patterns"
    """Column-parallel: sharded along dimension 0."""


@dataclass(frozen=True)
class MergePlan:
    """How a parameter is merged. shape: global, without padding. saved_rows: rows of all shards, with
    padding."""

    name: str
    rule: Rule
    shape: tuple[int, ...]
    saved_rows: int

    @property
    def is_sharded(self) -> bool:
        return self.rule not in (Rule.REPLICATED, Rule.AVERAGED)

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return 1 if self.rule is Rule.ROWS else 0

    @property
    def num_fused_parts(self) -> int:
        """`num_fused_parts` of the `ParameterSpec`."""
        return 2 if self.rule is Rule.TWO_SUB_PARAMS else 1

    @property
    def bytes_per_state(self) -> int:
        """Size in fp32."""
        return 4 * prod(self.shape)

    def entry(self) -> dict[str, Any]:
        """What DeepSpeed's file of the parameter contains beside the tensor."""
        entry: dict[str, Any] = {"cat_dim": self.dim} if self.is_sharded else {}
        if self.num_fused_parts > 1:
            entry["param_n_sub_params"] = self.num_fused_parts
        if self.rule is Rule.VOCABULARY:
            entry["vocab_tensor"] = True
        return entry


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


def rule_of(name: str, record: Mapping[str, Any]) -> Rule:
    """The merge rule for a `ParameterSpec`, given as its `spec_record`; ValueError if there is none."""
    sharding = (record["shard_dim"], record["blocks"])
    if record["used_rows"] is not None:
        rules = {(0, 1): Rule.VOCABULARY}
    else:
        rules = {(0, 1): Rule.COLUMNS, (0, 2): Rule.TWO_SUB_PARAMS, (1, 1): Rule.ROWS}
        if record["shard_dim"] is None:
            return Rule.REPLICATED
    if sharding not in rules:
        raise ValueError(
            f"{name} is sharded along dimension {sharding[0]} with {sharding[1]} fused parts, valid rows "
            f"{record['used_rows']}: universal checkpoints have no rule to merge it"
        )
    return rules[sharding]


def derive_info(records: Mapping[str, Mapping[str, Any]], vocab_size: int) -> dict[str, Any]:
    """`universal_checkpoint_info` of a model with these parameters, by name, as `spec_record`s.

    vocab_size: without padding. Raises ValueError for a parameter that none or more than one pattern matches.
    """
    patterns: dict[str, list[str]] = {PIPELINE_REPLICATED_KEY: [], **{rule.value: [] for rule in Rule}}
    for name, record in records.items():
        keys = [
            rule_of(name, record).value,
            *([PIPELINE_REPLICATED_KEY] if name.startswith(TIED_PREFIX) else []),
        ]
        for key in keys:
            if pattern_of(name) not in patterns[key]:
                patterns[key].append(pattern_of(name))
    info = {VERSION_KEY: VERSION, VOCAB_SIZE_KEY: vocab_size, **patterns}
    check_rules(info, records)
    return info


def pattern_of(name: str) -> str:
    """A pattern that matches the parameter in every layer: the layer's number becomes `\\d+`."""
    number, dot, rest = name.partition(".")
    return rf"^\d+\.{re.escape(rest)}$" if dot and number.isdigit() else f"^{re.escape(name)}$"


def matching(info: Mapping[str, Any], name: str) -> list[tuple[Rule, str]]:
    """The rules, each with its pattern, that match a parameter's name."""
    return [
        (rule, pattern) for rule in Rule for pattern in info.get(rule.value, []) if matches(pattern, name)
    ]


def check_info(info: Any, source: Path) -> dict[str, Any]:
    """Returns `universal_checkpoint_info` read from the file `source` if it consists of patterns and numbers.
    Raises ConfigError otherwise."""
    lists = [info.get(rule.value, []) for rule in Rule] if isinstance(info, dict) else [None]
    if not all(isinstance(entry, (list, tuple)) for entry in lists):
        raise ConfigError(f"{source}: its {INFO_KEY} holds something other than lists of patterns")
    if sum(map(len, lists)) > _MAX_PATTERNS:
        raise HostileFileError(f"{source}: its {INFO_KEY} has more than {_MAX_PATTERNS} patterns")
    for pattern in (pattern for patterns in lists for pattern in patterns):
        check_pattern(pattern, source)
    size = info.get(VOCAB_SIZE_KEY, 1)
    if not (type(size) is int and 0 < size < 1 << 62):
        raise ConfigError(f"{source}: the {VOCAB_SIZE_KEY} in its {INFO_KEY} is not a positive number")
    return info


def check_rules(info: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError naming a parameter that not exactly one pattern matches, and a pattern that matches
    none."""
    names = list(names)
    for name in names:
        found = matching(info, name)
        if len(found) != 1:
            rules = ", ".join(f"{pattern} ({rule.value})" for rule, pattern in found) or "none"
            raise ValueError(f"parameter {name} must match one pattern of {INFO_KEY}, and matches {rules}")
    for pattern in unused_patterns(info, names):
        raise ValueError(f"pattern {pattern} of {INFO_KEY} matches no parameter")


def external_rule(info: Mapping[str, Any], name: str) -> Rule:
    """The rule for a parameter of another program, chosen as DeepSpeed's converter does.

    A parameter that no pattern matches is concatenated along dimension 0. A vocabulary pattern may match
    together with a column pattern. Raises ConfigError for unsupported rules and contradicting patterns.
    """
    for key in _UNKNOWN_KEYS:
        if info.get(key):
            raise ConfigError(
                f"the checkpoint's {INFO_KEY} has {key}: only deepspeed's own converter merges those"
            )
    found = {rule for rule, _ in matching(info, name)} or {Rule.COLUMNS}
    found = found - {Rule.COLUMNS} if Rule.VOCABULARY in found else found
    if len(found) > 1:
        names = ", ".join(sorted(rule.value for rule in found))
        raise ConfigError(f"the checkpoint's {INFO_KEY} gives {name} more than one rule: {names}")
    return found.pop()


def unused_patterns(info: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Patterns of merge rules that match none of the names."""
    names = list(names)
    patterns = (pattern for rule in Rule for pattern in info.get(rule.value, []))
    return [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]


# --- what other Megatron programs expect in the files ---


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
