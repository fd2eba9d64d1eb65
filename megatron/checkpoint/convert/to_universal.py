"""Writes universal checkpoints in DeepSpeed's layout: one file per parameter and moment, global, in fp32.

    global_step5_universal/
        zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": global tensor, "cat_dim": ...}
        zero/<parameter name>/step.pt                               the optimizer's step
        zero/optimizer_state.pt                                     optimizer state that is not per parameter
        mp_rank_XX_model_states.pt                                  copied from the source
        run.json                                                    copied, if the source has one
    latest_universal                                                the name of the folder

The vocabulary is stored without padding. `--load` opens native checkpoints on any layout: this format is for
exchange with other Megatron programs. Hugging Face models are imported in this format, without moments
(`huggingface.importer`).

A conversion copies bytes from the source files, a block at a time, in threads: reading, checksums and writing
release the GIL. Nothing here needs torch, which takes seconds to import and hundreds of MB.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial as partial_function
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.checkpoint.convert.merging import BLOCK_BYTES, ReplicaMismatch, Shard, merged_blocks
from megatron.checkpoint.convert.rules import MergePlan, rule_of, spec_record
from megatron.checkpoint.convert.source import Source, identity
from megatron.checkpoint.formats.deepspeed_files import VALUES, model_files
from megatron.checkpoint.formats.pickles import Stub
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.torch_archive import (
    StoredTensor,
    is_intact,
    read_file,
    write_plain,
    write_tensor,
)
from megatron.checkpoint.integrity.manifest import add_checksum
from megatron.checkpoint.integrity.names import shown
from megatron.checkpoint.record import RUN_FILE
from megatron.config.errors import ConfigError
from megatron.files import (
    open_regular,
    read_small,
    rename_synced,
    sync_file,
    sync_tree,
    write_atomically,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.mpu.parameters import ParameterSpec

OPTIMIZER_STATE_FILE = "optimizer_state.pt"
STEP_FILE = "step.pt"
VALUES_FILE = "fp32.pt"
# Moment, by the optimizer's name -> DeepSpeed's name of its file.
MOMENT_FILES = {name: f"{name}.pt" for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
# In optimizer_state.pt. DeepSpeed's loader expects an object of its own class under 'loss_scaler'.
LOSS_SCALE_KEY = "loss_scaler_state"
# In an unfinished conversion: parameters that are being written, and the identity of the source.
UNFINISHED_FOLDER = "unfinished"
SOURCE_FILE = "source.json"
# Holds an empty file per parameter whose replicas differed and were averaged.
AVERAGED_FOLDER = "averaged"
# Suffix of an unfinished conversion.
PARTIAL = ".partial"
# Not in optimizer_state.pt: these are in the parameters' files.
_PER_PARAMETER = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class Converted:
    """A parameter that was written. mismatch: largest difference between replicas of it or its moments, if
    they were averaged."""

    name: str
    mismatch: float = 0.0


def convert(
    source: Source, target: Path, workers: int = 1, allow_replica_mismatch: bool = False
) -> Iterator[Converted]:
    """Writes the universal checkpoint `target`; yields each parameter when it is written, large ones first.

    It resumes an interrupted conversion of the same source: parameters that are complete and match their
    checksums are kept. allow_replica_mismatch: average replicas of a parameter that differ.

    Raises ConfigError for a damaged source, too little disk space or memory, and replicas that differ.
    """
    if target.exists():
        if not _is_of(source, target):
            raise ConfigError(f"--output_folder {target} exists: delete it, or give another")
        _announce(target)
        return
    partial = target.with_name(target.name + PARTIAL)
    _begin(source, partial)
    todo = [plan for plan in source.plans.values() if not _is_finished(source, partial, plan)]
    todo.sort(key=lambda plan: plan.bytes_per_state, reverse=True)
    states = {plan.name: 1 + len(source.files.moments(plan.name)) for plan in todo}
    check_space(partial, sum(plan.bytes_per_state * states[plan.name] for plan in todo), "--output_folder")
    _check_memory(workers)
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(
            partial_function(_convert_parameter, source, partial, allow_replica_mismatch), todo
        )
    finally:
        pool.shutdown(cancel_futures=True)
    _write_rest(source, partial)
    move_into_place(partial, target)


def move_into_place(partial: Path, target: Path) -> None:
    """Renames a finished universal checkpoint, syncs it, and writes its name into `latest_universal`."""
    shutil.rmtree(partial / UNFINISHED_FOLDER, ignore_errors=True)
    sync_file(partial)
    rename_synced(partial, target)
    _announce(target)


def _announce(target: Path) -> None:
    """The last step. `SOURCE_FILE` is removed when it is done."""
    write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)
    shutil.rmtree(target / AVERAGED_FOLDER, ignore_errors=True)
    (target / SOURCE_FILE).unlink(missing_ok=True)
    sync_file(target)


def _is_of(source: Source, target: Path) -> bool:
    """Whether `target` is a complete conversion of this source for which `_announce` may be missing."""
    mark = target / SOURCE_FILE
    return mark.is_file() and _text_of(mark) == identity(source)


def _text_of(mark: Path) -> str:
    return read_small(mark).decode(errors="replace")


def check_space(folder: Path, needed: int, flag: str) -> None:
    """Raises ConfigError, which names the flag, if the folder's disk has fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{flag}: {folder.parent} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "free space, or pass another folder"
        )


def write_parameter(
    folder: Path, name: str, spec: ParameterSpec, state: tuple[Tensor, dict[str, Tensor], dict[str, Any]]
) -> None:
    """Writes the files of one global parameter, without padding, into an unfinished universal checkpoint.

    state: fp32 values on the CPU, moments by the optimizer's names, and the 'step' if there is one.
    """
    values, moments, others = state
    shape = spec.valid_shape
    plan = MergePlan(name, rule_of(name, spec_record(spec)), shape, shape[0])
    blocks = {key: [tensor.contiguous().numpy()] for key, tensor in {VALUES: values, **moments}.items()}
    step = others.get("step")
    _write_files(folder, plan, blocks, None if step is None else float(step))
    _finish(folder, name)


# --- one parameter ---


def _convert_parameter(
    source: Source, partial: Path, allow_replica_mismatch: bool, plan: MergePlan
) -> Converted:
    mismatch = ReplicaMismatch()
    with ExitStack() as stack:
        blocks = {}
        for key in (VALUES, *source.files.moments(plan.name)):
            pieces = [source.files.pieces(rank, plan.name, key) for rank in range(source.tensor_size)]
            shards = [stack.enter_context(Shard(plan.name, parts)) for parts in pieces]
            blocks[key] = merged_blocks(plan, shards, mismatch)
        _write_files(partial, plan, blocks, _number(source.files.others(plan.name).get("step")))
    if mismatch.largest and not allow_replica_mismatch:
        raise ConfigError(
            f"checkpoint {source.folder}: the replicas of {plan.name} on the TP ranks differ by up to "
            f"{mismatch.largest:.2e}: convert an older checkpoint, or use their mean with "
            "--allow-replica-mismatch"
        )
    if mismatch.largest:
        # Written before the parameter is finished: a resumed conversion does not compare its replicas again.
        (partial / AVERAGED_FOLDER).mkdir(exist_ok=True)
        (partial / AVERAGED_FOLDER / plan.name).touch()
        sync_tree(partial / AVERAGED_FOLDER)
        sync_file(partial)
    _finish(partial, plan.name)
    return Converted(plan.name, mismatch.largest)


def _write_files(
    folder: Path, plan: MergePlan, blocks: Mapping[str, Iterable[np.ndarray]], step: float | None
) -> None:
    """blocks: state -> the elements of the global tensor in order."""
    unfinished = folder / UNFINISHED_FOLDER / plan.name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    names = {VALUES: VALUES_FILE, **MOMENT_FILES}
    for key, parts in blocks.items():
        if key not in names:
            raise ConfigError(
                f"the optimizer's {key} of {plan.name} cannot be stored in a universal checkpoint, only "
                f"{', '.join(names)}"
            )
        write_tensor(unfinished / names[key], plan.shape, parts, plan.entry())
    if step is not None:
        write_tensor(unfinished / STEP_FILE, (), [np.float32(step)])


def _finish(folder: Path, name: str) -> None:
    """Syncs the parameter's folder and renames it, so that it is complete even after a power failure."""
    (folder / PARAMETER_FOLDER).mkdir(exist_ok=True)
    sync_tree(folder / UNFINISHED_FOLDER / name)
    rename_synced(folder / UNFINISHED_FOLDER / name, folder / PARAMETER_FOLDER / name)


def _is_finished(source: Source, partial: Path, plan: MergePlan) -> bool:
    """Whether an interrupted conversion has finished a parameter: all of its files exist, have the right
    shape and match their checksums. Otherwise the parameter's folder is removed."""
    folder = partial / PARAMETER_FOLDER / plan.name
    if not folder.exists():
        return False
    files = _files_of(source, plan)
    try:
        complete = {path.name for path in folder.iterdir()} == files.keys() and all(
            is_intact(folder / file, shape) for file, shape in files.items()
        )
    except (OSError, ConfigError):
        complete = False
    if not complete:
        shutil.rmtree(folder)
    return complete


def _files_of(source: Source, plan: MergePlan) -> dict[str, tuple[int, ...]]:
    """File name -> shape of the tensor, for the files that a conversion writes for a parameter."""
    names = {VALUES: VALUES_FILE, **MOMENT_FILES}
    files = {names[key]: plan.shape for key in (VALUES, *source.files.moments(plan.name)) if key in names}
    if _number(source.files.others(plan.name).get("step")) is not None:
        files[STEP_FILE] = ()
    return files


def _number(step: Any) -> float | None:
    """The optimizer's step, which is a number or a tensor."""
    return step.item() if isinstance(step, StoredTensor) else step


# --- before and after the parameters ---


def _begin(source: Source, partial: Path) -> None:
    """Creates the folder, or accepts that of an interrupted conversion of the same source."""
    partial.mkdir(parents=True, exist_ok=True)
    if links := [path for path in (partial, *partial.iterdir()) if path.is_symlink()]:
        raise ConfigError(f"{links[0]} is a link, which no conversion creates: delete it")
    mark = partial / SOURCE_FILE
    if not mark.is_file() and (partial / PARAMETER_FOLDER).exists():
        raise ConfigError(
            f"{partial} is not an interrupted conversion of a native checkpoint: it has no {SOURCE_FILE}: "
            "delete it, or give another --output_folder"
        )
    if mark.is_file() and _text_of(mark) != identity(source):
        raise ConfigError(
            f"{partial} is an interrupted conversion of another checkpoint ({shown(_text_of(mark))}): finish "
            "that, or delete the folder"
        )
    write_atomically(mark, identity(source))


def _check_memory(workers: int) -> None:
    """A worker holds a block of a parameter and as much of its shards, however large the parameter is."""
    needed, available = workers * 2 * BLOCK_BYTES, _available_memory()
    if available is not None and available < needed:
        raise ConfigError(
            f"{workers} workers need {needed / 1e6:,.0f} MB of memory and {available / 1e6:,.0f} MB are "
            "available: lower --num_extract_workers and --num_merge_workers"
        )


def _available_memory() -> int | None:
    """Available memory in bytes; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _write_rest(source: Source, partial: Path) -> None:
    """Writes what does not belong to a single parameter, as DeepSpeed's converter does, and `run.json`."""
    common = {key: value for key, value in source.files.common.items() if key not in _PER_PARAMETER}
    common["param_groups"] = source.files.common["base_optimizer_state"].get("param_groups")
    common[LOSS_SCALE_KEY] = common.pop("loss_scaler", None)
    write_plain(partial / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE, _plain_types(common))
    sync_file(partial / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE)
    sync_file(partial / PARAMETER_FOLDER)
    for path in model_files(source.folder):
        if source.files.stage == 0:  # then the optimizer's state is in there too
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
        content = {key: value for key, value in source.run.items() if key != "sha256"}
        folder = partial / AVERAGED_FOLDER
        averaged = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if averaged and "certificate" in content:
            content["certificate"] = _record_without(averaged, content["certificate"])
        run = add_checksum({**content, "files": sizes})
        write_json(partial / RUN_FILE, run)


def _record_without(averaged: set[str], record: dict[str, Any]) -> dict[str, Any]:
    """The part of an integrity record that is still valid if the replicas of these parameters were
    averaged."""
    digests = {
        kind: {name: digest for name, digest in of_kind.items() if name not in averaged}
        for kind, of_kind in record["digests"].items()
    }
    return {**record, "digests": digests, "probe": None}


def _plain_types(value: Any) -> Any:
    """The value in types that any program can read. Tensors and objects of other programs' classes become
    None; the arguments stay an `argparse.Namespace`, which Megatron programs expect."""
    if isinstance(value, dict):
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_types(entry) for entry in value)
    if isinstance(value, Stub) and value.origin == "argparse.Namespace":
        return Namespace(
            **{key: _plain_types(entry) for key, entry in vars(value).items() if key != "constructor_args"}
        )
    return None if isinstance(value, (Stub, StoredTensor)) else value
