"""Opens the checkpoint that is converted; it may be of this program or of another framework."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.foreign_arguments import plain_arguments, program_of
from megatron.checkpoint.formats.deepspeed_files import (
    layer_files,
    model_files,
    why_unreadable,
)
from megatron.checkpoint.formats.native import NativeReader
from megatron.checkpoint.formats.registry import NATIVE, format_of, open_reader
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.formats.universal import without_wrappers
from megatron.checkpoint.formats.universal_info import (
    INFO_KEY,
    check_info,
    check_patterns,
    derive_info,
    external_spec,
    matching,
    recorded_spec,
    unused_patterns,
)
from megatron.checkpoint.names import check_parameter, is_shape
from megatron.checkpoint.reading import read_checkpoint
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState
from megatron.errors import UserError
from megatron.files import expect_layout
from megatron.mpu.parameter_spec import ParameterSpec


def identity_of(reader: StateReader) -> str:
    """Returns a text that identifies a source, so that an interrupted conversion continues only with the same
    source. The text for another framework's checkpoint consists of the names, sizes and times of its files,
    and of what is known about its run."""
    digest = reader.checkpoint.run.get("sha256")
    if not digest:
        stats = ((path.name, path.stat()) for path in sorted(reader.folder.iterdir()) if path.is_file())
        listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        known = json.dumps([listing, reader.checkpoint.run], default=str)
        digest = hashlib.sha256(known.encode()).hexdigest()
    return json.dumps([str(reader.folder.resolve()), digest])


def open_any(
    folder: Path,
    universal: bool = False,
    tokenizer: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> StateReader:
    """Returns the reader of a checkpoint of any format, with the specs of its parameters.

    universal: see `read_checkpoint`. tokenizer, vocab_size: for a checkpoint of another framework, see
    `open_external`; None if not given. warn: see `open_external`. Raises UserError if no checkpoint exists,
    or if another framework wrote it and it does not describe its model.
    """
    checkpoint = read_checkpoint(folder, universal, allow_external=True)
    if checkpoint.is_external:
        # The import is late: this module loads DeepSpeed, which takes seconds.
        from megatron.checkpoint.conversion.external import open_external

        return open_external(open_reader(checkpoint), tokenizer or {}, vocab_size, warn)
    if tokenizer or vocab_size is not None:
        raise UserError(
            f"--from {folder} records its vocabulary: remove --vocab-size and the flags of the tokenizer"
        )
    if format_of(checkpoint.folder) == NATIVE:
        return open_source(checkpoint.folder, derive_patterns=True)
    reader = open_reader(checkpoint)
    reader.specs = _recorded_specs(checkpoint)
    reader.check_complete()
    return reader


def _recorded_specs(checkpoint: Checkpoint) -> dict[str, ParameterSpec]:
    with expect_layout(checkpoint.folder / RUN_FILE, "the record of a checkpoint of this program"):
        records = checkpoint.run["parameters"]
        return {name: recorded_spec(record) for name, record in records.items()}


def open_source(
    folder: Path,
    strict: bool = True,
    derive_patterns: bool = False,
    warn: Callable[[str], object] = lambda _: None,
) -> NativeReader:
    """Opens a native checkpoint for a conversion, with the specs of the saved parameters. Compares the sizes
    of the files with `run.json`.

    strict: raise an error for patterns that match no parameter, instead of calling `warn` with it.
    derive_patterns: derive the merge patterns from the parameters if the `run.json` (of an older version) has
    none.

    Raises UserError for a checkpoint that is damaged, incomplete, or lacks information.
    """
    if (folder / RUN_FILE).is_file():
        reader = _own_source(folder, strict, derive_patterns, warn)
    else:
        reader = _external_source(folder, strict, warn)
    reader.check_complete()
    return reader


def _own_source(
    folder: Path, strict: bool, derive_patterns: bool, warn: Callable[[str], object]
) -> NativeReader:
    checkpoint = open_checkpoint(folder)
    if checkpoint.format != NATIVE:
        raise UserError(
            f"checkpoint {folder} has the format {checkpoint.format}, expected {NATIVE}: convert it with "
            "tools/convert_checkpoint.py --format universal"
        )
    run, specs = checkpoint.run, _recorded_specs(checkpoint)
    with expect_layout(folder / RUN_FILE, "the record of a checkpoint of this program"):
        tp_size, vocab_size = run["layout"]["tensor_model_parallel_size"], run["vocab_size"]
    info = run.get(INFO_KEY)
    if info is None:
        if not derive_patterns:
            raise UserError(
                f"checkpoint {folder}: {RUN_FILE} has no {INFO_KEY}, because an older version wrote it: "
                "pass --inject_missing_state to derive it from the parameters"
            )
        info = derive_info(specs, vocab_size)
        checkpoint = replace(checkpoint, run={**run, INFO_KEY: info})
    check_info(info, folder / RUN_FILE)
    try:
        check_patterns(info, specs)
    except ValueError as error:
        if strict or any(len(matching(info, name)) != 1 for name in specs):
            raise UserError(f"checkpoint {folder}: {error}") from error
        warn(str(error))
    for name, spec in specs.items():
        _check_spec(name, spec, tp_size, folder)
    return NativeReader(checkpoint, specs, tp_size)


def _external_source(folder: Path, strict: bool, warn: Callable[[str], object]) -> NativeReader:
    """Opens another Megatron program's checkpoint with the shapes and patterns in DeepSpeed's files."""
    paths = model_files(folder)
    if reason := why_unreadable(folder):
        raise UserError(f"checkpoint {folder}: {reason}")
    if not paths:
        raise UserError(f"{folder} is not a checkpoint: it has neither {RUN_FILE} nor mp_rank files")
    states = [read_file(path) for path in paths]
    if not all(isinstance(state, dict) for state in states):
        raise UserError(f"checkpoint {folder}: an mp_rank file holds no dict: use another checkpoint")
    info = states[0].get(INFO_KEY)
    if not isinstance(info, dict):
        raise UserError(
            f"checkpoint file {paths[0]} has no {INFO_KEY}, so the merge rules of its shards are not "
            "known: convert it with the program that wrote it"
        )
    check_info(info, paths[0])
    first_layer = layer_files(folder).get(1, [])
    specs: dict[str, ParameterSpec] = {}
    with expect_layout(paths[0], "the states of a model-parallel rank"):
        dimensions = states[0].get("checkpoint_parallel_dimensions") or {}
        tp_size = dimensions.get("tp_degree") or len(first_layer) or len(paths)
        if type(tp_size) is not int or not 0 < tp_size <= len(paths):
            raise ValueError("the tensor-parallel degree is not a number of ranks")
        for path, state in zip(paths, states, strict=True):
            for group in state.get("param_shapes") or ():
                for name, shape in group.items():
                    check_parameter(name, path)
                    spec = external_spec(info, name, tuple(shape), tp_size)
                    _check_spec(name, spec, tp_size, folder)
                    if specs.setdefault(name, spec) != spec:
                        raise UserError(
                            f"checkpoint {folder}: the ranks hold shards of {name} with unequal shapes"
                        )
    if not specs:
        raise UserError(
            f"checkpoint {folder}: the mp_rank files have no param_shapes: it was not saved with ZeRO-1"
        )
    unused = unused_patterns(info, specs)
    if unused and strict:
        raise UserError(
            f"checkpoint {folder}: {unused[0]} of its {INFO_KEY} matches no parameter: use --no_strict to "
            "accept it"
        )
    for pattern in unused:
        warn(f"pattern {pattern} matches no parameter")
    if isinstance(args := states[0].get("args"), Namespace):
        program = program_of(without_wrappers(specs).keys())
        program.settings(plain_arguments(vars(args)), folder)
    return NativeReader(Checkpoint(folder, TrainingState(), {}), specs, tp_size)


def _check_spec(name: str, spec: ParameterSpec, tp_size: int, folder: Path) -> None:
    """Raises UserError for a shape or a sharding that no parameter can have."""
    shape, rows = spec.global_shape, spec.num_valid_rows
    if not is_shape(shape) or (rows is not None and not 0 < rows <= shape[0]):
        raise UserError(f"checkpoint {folder} gives {name} a shape that no tensor has: it is damaged")
    for dim, axis, parts in spec.sharding:
        # The files of each tensor-parallel rank hold all experts.
        count = parts * (tp_size if axis == "tp" else 1)
        if dim >= len(shape) or shape[dim] % count:
            raise UserError(
                f"checkpoint {folder}: {name} of shape {shape} cannot have been sharded into {count} parts "
                f"along dimension {dim}: it is damaged"
            )
