"""The source of a conversion: a native checkpoint, its parameters and how their shards are merged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.convert.rules import (
    INFO_KEY,
    VOCAB_SIZE_KEY,
    MergePlan,
    Rule,
    check_info,
    check_rules,
    derive_info,
    external_rule,
    matching,
    unused_patterns,
)
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.deepspeed_files import (
    SHARDED_WEIGHTS,
    OptimizerFiles,
    model_files,
    sharded_weight_files,
)
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.integrity.names import check_parameter, is_shape
from megatron.checkpoint.record import RUN_FILE
from megatron.config.errors import ConfigError
from megatron.files import expect_layout


@dataclass(frozen=True)
class Source:
    """A native checkpoint. run: the content of `run.json`; None if another program wrote it.

    warnings: problems with its merge rules that were accepted.
    """

    folder: Path
    tensor_size: int
    plans: dict[str, MergePlan]
    files: OptimizerFiles
    run: dict[str, Any] | None
    warnings: tuple[str, ...] = ()


def open_source(folder: Path, strict: bool = True, derive_rules: bool = False) -> Source:
    """Opens a checkpoint for conversion; sizes of files are compared with `run.json`.

    strict: refuse patterns that match no parameter, instead of warning. derive_rules: derive the merge rules
    from the parameters in `run.json` if the checkpoint has none, as in old checkpoints of this repository.

    Raises ConfigError for a checkpoint that is damaged, incomplete, or lacks information.
    """
    if (folder / RUN_FILE).is_file():
        return _native_source(folder, strict, derive_rules)
    return _external_source(folder, strict)


def _native_source(folder: Path, strict: bool, derive_rules: bool) -> Source:
    run = open_checkpoint(folder).run
    with expect_layout(folder / RUN_FILE, "the record of a checkpoint of this program"):
        records, vocab_size = run["parameters"], run["vocab_size"]
        tensor_size = run["layout"]["tensor_model_parallel_size"]
    info = run.get(INFO_KEY)
    if info is None:
        if not derive_rules:
            raise ConfigError(
                f"checkpoint {folder}: {RUN_FILE} has no {INFO_KEY}, for it comes from an older version: "
                "--inject_missing_state derives it from the parameters"
            )
        info = derive_info(records, vocab_size)
        run = {**run, INFO_KEY: info}
    check_info(info, folder / RUN_FILE)
    warnings: tuple[str, ...] = ()
    try:
        check_rules(info, records)
    except ValueError as error:
        if strict or any(len(matching(info, name)) != 1 for name in records):
            raise ConfigError(f"checkpoint {folder}: {error}") from error
        warnings = (str(error),)
    plans = {}
    for name, record in records.items():
        ((rule, _),) = matching(info, name)
        saved_rows, *others = record["whole_shape"]
        rows = info.get(VOCAB_SIZE_KEY) if rule is Rule.VOCABULARY else saved_rows
        plans[name] = _checked(MergePlan(name, rule, (rows, *others), saved_rows), tensor_size, folder)
    return _complete(Source(folder, tensor_size, plans, OptimizerFiles(folder, tensor_size), run, warnings))


def _external_source(folder: Path, strict: bool) -> Source:
    """A checkpoint of another Megatron program: DeepSpeed's files hold shapes of shards, and patterns."""
    paths = model_files(folder)
    if sharded_weight_files(folder):
        raise ConfigError(f"--input_folder {folder}: {SHARDED_WEIGHTS}")
    if not paths:
        raise ConfigError(
            f"--input_folder {folder} is not a checkpoint: it has neither {RUN_FILE} nor mp_rank files"
        )
    states = [read_file(path) for path in paths]
    if not all(isinstance(state, dict) for state in states):
        raise ConfigError(f"checkpoint {folder}: an mp_rank file holds no dict: use another one")
    info = states[0].get(INFO_KEY)
    if not isinstance(info, dict):
        raise ConfigError(
            f"checkpoint file {paths[0]} has no {INFO_KEY}, so the merge rules of its shards are not "
            "known: convert it with the program that wrote it"
        )
    check_info(info, paths[0])
    first_layer = list(folder.glob("layer_01-model_*-model_states.pt"))
    plans: dict[str, MergePlan] = {}
    with expect_layout(paths[0], "the states of a model-parallel rank"):
        dimensions = states[0].get("checkpoint_parallel_dimensions") or {}
        tensor_size = dimensions.get("tp_degree") or len(first_layer) or len(paths)
        if type(tensor_size) is not int or not 0 < tensor_size <= len(paths):
            raise ValueError("the tensor-parallel degree is not a number of ranks")
        for path, state in zip(paths, states, strict=True):
            for group in state.get("param_shapes") or ():
                for name, shape in group.items():
                    check_parameter(name, path)
                    plan = _external_plan(info, name, tuple(shape), tensor_size)
                    if plans.setdefault(name, _checked(plan, tensor_size, folder)) != plan:
                        raise ConfigError(
                            f"checkpoint {folder}: the ranks hold shards of {name} with unequal shapes"
                        )
    if not plans:
        raise ConfigError(
            f"checkpoint {folder}: the mp_rank files have no param_shapes: it was not saved with ZeRO-1"
        )
    unused = unused_patterns(info, plans)
    if unused and strict:
        raise ConfigError(
            f"checkpoint {folder}: {unused[0]} of its {INFO_KEY} matches no parameter: use --no_strict to "
            "accept it"
        )
    warnings = tuple(f"pattern {pattern} matches no parameter" for pattern in unused)
    return _complete(Source(folder, tensor_size, plans, OptimizerFiles(folder, tensor_size), None, warnings))


def _external_plan(info: Mapping[str, Any], name: str, shard: tuple[int, ...], tensor_size: int) -> MergePlan:
    rule = external_rule(info, name)
    whole = list(shard)
    if rule not in (Rule.REPLICATED, Rule.AVERAGED):
        whole[1 if rule is Rule.ROWS else 0] *= tensor_size
    saved_rows = whole[0]
    if rule is Rule.VOCABULARY:
        whole[0] = info[VOCAB_SIZE_KEY]
    return MergePlan(name, rule, tuple(whole), saved_rows)


def _checked(plan: MergePlan, tensor_size: int, folder: Path) -> MergePlan:
    """Returns the plan if tensors of these shapes can be merged; ConfigError otherwise."""
    shape = (plan.saved_rows, *plan.shape[1:])
    expected_dims = 2 if plan.rule is Rule.ROWS else len(shape)
    if not (is_shape(shape) and is_shape(plan.shape) and plan.shape[0] <= shape[0]):
        raise ConfigError(f"checkpoint {folder} gives {plan.name} a shape that no tensor has: it is damaged")
    parts = tensor_size * plan.num_fused_parts
    if len(shape) != expected_dims or (plan.is_sharded and shape[plan.dim] % parts):
        raise ConfigError(
            f"checkpoint {folder}: {plan.name} of shape {shape} cannot have been sharded into {parts} parts "
            f"along dimension {plan.dim}: it is damaged"
        )
    return plan


def _complete(source: Source) -> Source:
    missing = sorted(source.plans.keys() - set(source.files.names))
    if missing:
        raise ConfigError(
            f"checkpoint {source.folder}: the optimizer files hold no state of {missing[0]} ({len(missing)} "
            "such parameters): use another one"
        )
    return source


def identity(source: Source) -> str:
    """Identifies the source, so that an interrupted conversion is only resumed with the same one."""
    digest = source.run["sha256"] if source.run is not None else _digest_of_names(source.folder)
    return json.dumps([str(source.folder.resolve()), digest])


def _digest_of_names(folder: Path) -> str:
    """Digest of the names, sizes and modification times of the files of another program's checkpoint."""
    stats = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
