"""Converts native checkpoints into universal checkpoints, in DeepSpeed's layout (`formats.universal`).

    global_step5_universal/
        zero/                           one folder per parameter
        zero/optimizer_state.pt         optimizer state that is not per parameter
        mp_rank_XX_model_states.pt      copied from the source
        run.json                        copied, if the source has one
    latest_universal                    the name of the folder

The vocabulary is stored without padding. This format is for exchange with other Megatron programs; `--load`
opens native checkpoints on any layout without a conversion. Hugging Face models are imported in this format,
without moments (`huggingface.importer`). A conversion copies one block at a time, in several threads:
reading, checksums and writing release the GIL.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial as partial_function
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.deepspeed_files import (
    SHARDED_WEIGHTS,
    layer_files,
    model_files,
    sharded_weight_files,
)
from megatron.checkpoint.formats.native import BLOCK_BYTES, NativeReader
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.state import ReplicaMismatch
from megatron.checkpoint.formats.torch_archive import Stub, read_file, write_plain
from megatron.checkpoint.formats.universal import (
    LOSS_SCALE_KEY,
    OPTIMIZER_STATE_FILE,
    UNFINISHED_FOLDER,
    UniversalWriter,
)
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
from megatron.checkpoint.names import check_parameter, is_shape, shown
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState
from megatron.errors import UserError
from megatron.files import (
    expect_layout,
    open_regular,
    read_small,
    rename_synced,
    sync_file,
    sync_tree,
    write_atomically,
    write_json,
)
from megatron.mpu.parameters import ParameterSpec

# In an unfinished conversion: the identity of the source.
SOURCE_FILE = "source.json"
# Holds an empty file per parameter whose replicas differed and were averaged.
AVERAGED_FOLDER = "averaged"
# Suffix of an unfinished conversion.
PARTIAL = ".partial"
# Entries that optimizer_state.pt lacks, because the parameters' files hold them.
_PER_PARAMETER = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class Source:
    """A native checkpoint to convert.

    reader: has the specs of the saved parameters. warnings: accepted problems with the merge patterns.
    """

    reader: NativeReader
    warnings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def run(self) -> dict[str, Any] | None:
        """The content of `run.json`; None if another framework wrote the checkpoint."""
        return None if self.reader.checkpoint.is_external else self.reader.checkpoint.run

    @property
    def identity(self) -> str:
        """Identifies the source, so that an interrupted conversion resumes only with the same source."""
        digest = self.run["sha256"] if self.run is not None else _digest_of_names(self.folder)
        return json.dumps([str(self.folder.resolve()), digest])

    def step(self, name: str) -> float | None:
        """Returns the optimizer's step of a parameter; None if it has none."""
        step = self.reader.optimizer_scalars(name).get("step")
        with expect_layout(self.folder, "the optimizer's step"):
            return None if step is None else float(step)


@dataclass(frozen=True)
class Converted:
    """A parameter that was written. mismatch: largest difference between replicas of its values or moments,
    which were averaged; 0 if they were equal."""

    name: str
    mismatch: float = 0.0


# --- the source ---


def open_source(folder: Path, strict: bool = True, derive_patterns: bool = False) -> Source:
    """Opens a checkpoint for conversion; sizes of files are compared with `run.json`.

    strict: raise an error for patterns that match no parameter, instead of a warning. derive_patterns: derive
    the merge patterns from the parameters in `run.json` if the checkpoint of an older version has none.

    Raises UserError for a checkpoint that is damaged, incomplete, or lacks information.
    """
    source = (_own_source if (folder / RUN_FILE).is_file() else _external_source)(
        folder, strict, derive_patterns
    )
    missing = sorted(source.reader.specs.keys() - set(source.reader.stored_names))
    if missing:
        raise UserError(
            f"checkpoint {folder}: the optimizer files hold no state of {missing[0]} ({len(missing)} "
            "such parameters): use another checkpoint"
        )
    return source


def _own_source(folder: Path, strict: bool, derive_patterns: bool) -> Source:
    checkpoint = open_checkpoint(folder)
    run = checkpoint.run
    with expect_layout(folder / RUN_FILE, "the record of a checkpoint of this program"):
        specs = {name: recorded_spec(record) for name, record in run["parameters"].items()}
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
    warnings: tuple[str, ...] = ()
    try:
        check_patterns(info, specs)
    except ValueError as error:
        if strict or any(len(matching(info, name)) != 1 for name in specs):
            raise UserError(f"checkpoint {folder}: {error}") from error
        warnings = (str(error),)
    for name, spec in specs.items():
        _check_spec(name, spec, tp_size, folder)
    return Source(NativeReader(checkpoint, specs, tp_size), warnings)


def _external_source(folder: Path, strict: bool, _: bool) -> Source:
    """Opens a checkpoint of another Megatron program: DeepSpeed's files hold shapes of shards, and
    patterns."""
    paths = model_files(folder)
    if sharded_weight_files(folder):
        raise UserError(f"--input_folder {folder}: {SHARDED_WEIGHTS}")
    if not paths:
        raise UserError(
            f"--input_folder {folder} is not a checkpoint: it has neither {RUN_FILE} nor mp_rank files"
        )
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
    warnings = tuple(f"pattern {pattern} matches no parameter" for pattern in unused)
    return Source(NativeReader(Checkpoint(folder, TrainingState(), {}), specs, tp_size), warnings)


def _check_spec(name: str, spec: ParameterSpec, tp_size: int, folder: Path) -> None:
    """Raises UserError for a shape or sharding that no parameter can have."""
    shape, rows = spec.global_shape, spec.num_valid_rows
    if not is_shape(shape) or (rows is not None and not 0 < rows <= shape[0]):
        raise UserError(f"checkpoint {folder} gives {name} a shape that no tensor has: it is damaged")
    parts = tp_size * spec.num_fused_parts
    if spec.shard_dim is not None and (spec.shard_dim >= len(shape) or shape[spec.shard_dim] % parts):
        raise UserError(
            f"checkpoint {folder}: {name} of shape {shape} cannot have been sharded into {parts} parts "
            f"along dimension {spec.shard_dim}: it is damaged"
        )


def _digest_of_names(folder: Path) -> str:
    """Returns a digest of the names, sizes and modification times of the files in a folder."""
    stats = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


# --- the conversion ---


def convert(
    source: Source, target: Path, workers: int = 1, allow_replica_mismatch: bool = False
) -> Iterator[Converted]:
    """Writes the universal checkpoint `target`; yields each parameter when it is written, large ones first.

    It resumes an interrupted conversion of the same source: parameters that are complete and match their
    checksums are kept. allow_replica_mismatch: average replicas of a parameter that differ.

    Raises UserError for a damaged source, too little disk space or memory, and replicas that differ.
    """
    if target.exists():
        if not _is_conversion_of(source, target):
            raise UserError(f"--output_folder {target} exists: remove it, or give another")
        _announce(target)
        return
    partial = target.with_name(target.name + PARTIAL)
    _begin(source, partial)
    reader, writer = source.reader, UniversalWriter(partial)
    todo = {
        name: 4 * prod(spec.valid_shape)
        for name, spec in reader.specs.items()
        if not writer.has_parameter(name, spec, reader.state_names(name), source.step(name))
    }
    check_space(partial, sum(todo[name] * len(reader.state_names(name)) for name in todo), "--output_folder")
    _check_memory(workers)
    pool = ThreadPoolExecutor(workers)
    convert_one = partial_function(_convert_parameter, source, writer, allow_replica_mismatch)
    try:
        yield from pool.map(convert_one, sorted(todo, key=lambda name: todo[name], reverse=True))
    finally:
        pool.shutdown(cancel_futures=True)
    _write_common_files(source, partial)
    move_into_place(partial, target)


def move_into_place(partial: Path, target: Path) -> None:
    """Renames a finished universal checkpoint, syncs it, and writes its name into `latest_universal`."""
    shutil.rmtree(partial / UNFINISHED_FOLDER, ignore_errors=True)
    sync_file(partial)
    rename_synced(partial, target)
    _announce(target)


def _announce(target: Path) -> None:
    """Ends a conversion: names the checkpoint in `latest_universal`, then removes `SOURCE_FILE`."""
    write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)
    shutil.rmtree(target / AVERAGED_FOLDER, ignore_errors=True)
    (target / SOURCE_FILE).unlink(missing_ok=True)
    sync_file(target)


def _is_conversion_of(source: Source, target: Path) -> bool:
    """Returns whether `target` is a complete conversion of this source that may lack only `_announce`."""
    mark = target / SOURCE_FILE
    return mark.is_file() and _source_identity(mark) == source.identity


def _source_identity(mark: Path) -> str:
    return read_small(mark).decode(errors="replace")


def check_space(folder: Path, needed: int, flag: str) -> None:
    """Raises UserError, which names the flag, if the folder's disk has fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{flag}: {folder.parent} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "free space, or pass another folder"
        )


def _convert_parameter(
    source: Source, writer: UniversalWriter, allow_replica_mismatch: bool, name: str
) -> Converted:
    mismatch = ReplicaMismatch()
    reader = source.reader
    blocks = {state: reader.read_blocks(name, state, mismatch) for state in reader.state_names(name)}
    writer.write_parameter(name, reader.specs[name], blocks, source.step(name))
    if mismatch.largest and not allow_replica_mismatch:
        raise UserError(
            f"checkpoint {source.folder}: the replicas of {name} on the TP ranks differ by up to "
            f"{mismatch.largest:.2e}: convert an older checkpoint, or use their mean with "
            "--allow-replica-mismatch"
        )
    if mismatch.largest:
        # Written before the parameter is finished: a resumed conversion does not compare its replicas again.
        (writer.folder / AVERAGED_FOLDER).mkdir(exist_ok=True)
        (writer.folder / AVERAGED_FOLDER / name).touch()
        sync_tree(writer.folder / AVERAGED_FOLDER)
        sync_file(writer.folder)
    writer.finish_parameter(name)
    return Converted(name, mismatch.largest)


# --- before and after the parameters ---


def _begin(source: Source, partial: Path) -> None:
    """Creates the folder, or accepts the folder of an interrupted conversion of the same source."""
    partial.mkdir(parents=True, exist_ok=True)
    if links := [path for path in (partial, *partial.iterdir()) if path.is_symlink()]:
        raise UserError(f"{links[0]} is a link, which no conversion creates: remove it")
    mark = partial / SOURCE_FILE
    if not mark.is_file() and (partial / PARAMETER_FOLDER).exists():
        raise UserError(
            f"{partial} is not an interrupted conversion of a native checkpoint: it has no {SOURCE_FILE}: "
            "remove it, or give another --output_folder"
        )
    if mark.is_file() and _source_identity(mark) != source.identity:
        raise UserError(
            f"{partial} is an interrupted conversion of another checkpoint "
            f"({shown(_source_identity(mark))}): finish that conversion, or remove the folder"
        )
    write_atomically(mark, source.identity)


def _check_memory(workers: int) -> None:
    """Raises UserError if the workers need more memory than is available. Each holds one block of a parameter
    and as many bytes of its shards, however large the parameter is."""
    needed, available = workers * 2 * BLOCK_BYTES, _available_memory()
    if available is not None and available < needed:
        raise UserError(
            f"{workers} workers need {needed / 1e6:,.0f} MB of memory and {available / 1e6:,.0f} MB are "
            "available: lower --num_extract_workers and --num_merge_workers"
        )


def _available_memory() -> int | None:
    """Returns available memory in bytes; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _write_common_files(source: Source, partial: Path) -> None:
    """Writes what does not belong to a single parameter, as DeepSpeed's converter does, and `run.json`."""
    common = {key: value for key, value in source.reader.files.common.items() if key not in _PER_PARAMETER}
    common["param_groups"] = source.reader.files.common["base_optimizer_state"].get("param_groups")
    common[LOSS_SCALE_KEY] = common.pop("loss_scaler", None)
    write_plain(partial / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE, _plain_types(common))
    sync_file(partial / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE)
    sync_file(partial / PARAMETER_FOLDER)
    for path in model_files(source.folder):
        if source.reader.files.stage == 0:  # then this file also holds the optimizer state
            write_plain(partial / path.name, _plain_types({**read_file(path), "optimizer": None}))
        else:
            with open_regular(path) as file, open(partial / path.name, "wb") as copy:
                shutil.copyfileobj(file, copy)
        sync_file(partial / path.name)
    if source.run is not None:
        sizes = {
            str(path.relative_to(partial)): {"bytes": path.stat().st_size}
            for path in sorted(partial.rglob("*.pt"))
            if UNFINISHED_FOLDER not in path.parts
        }
        content = {**source.run, "files": sizes}
        folder = partial / AVERAGED_FOLDER
        averaged = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if averaged and "certificate" in content:
            content["certificate"] = _integrity_record_without(averaged, content["certificate"])
        write_json(partial / RUN_FILE, add_checksum(content))


def _integrity_record_without(averaged: set[str], record: dict[str, Any]) -> dict[str, Any]:
    """Returns an integrity record without what is invalid after these parameters were averaged."""
    digests = {
        state_name: {name: digest for name, digest in by_parameter.items() if name not in averaged}
        for state_name, by_parameter in record["digests"].items()
    }
    return {**record, "digests": digests, "probe": None}


def _plain_types(value: Any) -> Any:
    """Returns the value in types that any program can read. Tensors and objects of other frameworks' classes
    become None; the arguments stay an `argparse.Namespace`, which Megatron programs expect."""
    if isinstance(value, dict):
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_types(entry) for entry in value)
    if isinstance(value, Namespace):
        return Namespace(**{key: _plain_types(entry) for key, entry in vars(value).items()})
    return None if isinstance(value, Stub) or isinstance(value, Tensor) else value
