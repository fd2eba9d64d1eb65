"""Making universal checkpoints: a file per parameter and moment, whole, in fp32, laid out as DeepSpeed's.

    global_step5_universal/
        zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": whole tensor, "cat_dim": ...}
        zero/<parameter name>/step.pt                               the optimizer's step
        zero/optimizer_state.pt                                     what the optimizer keeps for all of them
        mp_rank_XX_model_states.pt                                  of the checkpoint that it was made from
        run.json                                                    likewise, if this repo wrote that one
    latest_universal                                                the name of the folder

The vocabulary is stored without its padding. `--load` opens native checkpoints of any layout by itself: this
format is for exchange with other programs of the family. Hugging Face's models become such checkpoints too,
without moments (`huggingface_import`).

A conversion copies bytes from the places in the source where they lie, a block at a time, in threads:
reading, checksums and writing let Python's other threads run. Nothing here needs torch, which takes seconds
to import and hundreds of MB.
"""

from __future__ import annotations

import json
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
from megatron.checkpoint.convert.rules import MergePlan, rule_of
from megatron.checkpoint.convert.source import Source, identity
from megatron.checkpoint.discovery import PARAMETER_FOLDER, RUN_FILE
from megatron.checkpoint.formats.native import VALUES, model_files
from megatron.checkpoint.formats.pickles import Stub
from megatron.checkpoint.formats.torch_archive import (
    StoredTensor,
    is_intact,
    read_file,
    write_plain,
    write_tensor,
)
from megatron.checkpoint.integrity.files import open_regular, read_small, rename_synced, sync_file, sync_tree
from megatron.checkpoint.integrity.manifest import add_checksum, write_atomically
from megatron.checkpoint.integrity.names import shown
from megatron.checkpoint.reshard import spec_record
from megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.mpu.parameters import ParameterSpec

LATEST_UNIVERSAL_FILE = "latest_universal"
OPTIMIZER_STATE_FILE = "optimizer_state.pt"
STEP_FILE = "step.pt"
# DeepSpeed's name of the file per name that the optimizer uses; the fp32 values are called the same.
MOMENT_FILES = {name: f"{name}.pt" for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
# In optimizer_state.pt; DeepSpeed's own loader takes what is under 'loss_scaler' for an object of its class.
LOSS_SCALE_KEY = "loss_scaler_state"
# In a conversion that is not over: parameters being written, and which checkpoint it is a conversion of.
UNFINISHED_FOLDER = "unfinished"
SOURCE_FILE = "source.json"
# An empty file in it per parameter of whose copies the mean was taken.
AVERAGED_FOLDER = "averaged"
# A conversion that is not over is called this after its name.
PARTIAL = ".partial"
# What optimizer_state.pt leaves out, for it is in the parameters' files.
_PER_PARAMETER = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class Converted:
    """A parameter that is written. mismatch: largest difference between the tensor ranks' copies of it or of
    its moments, of which the mean was taken."""

    name: str
    mismatch: float = 0.0


def convert(
    source: Source, target: Path, workers: int = 1, allow_replica_mismatch: bool = False
) -> Iterator[Converted]:
    """Makes the universal checkpoint `target`; yields each parameter when it is written, large ones first.
    What an interrupted conversion of the same checkpoint has finished, and what is read and found to be as it
    was written, is not made again; of one that was interrupted at its very end, the end is done.

    allow_replica_mismatch: take the mean of a replicated parameter whose copies on the tensor ranks differ.

    Raises ConfigError for a damaged source, too little disk space or memory, and copies that differ.
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
    """Gives a finished universal checkpoint, which is on the disk then, its name, and lets `latest_universal`
    tell it."""
    shutil.rmtree(partial / UNFINISHED_FOLDER, ignore_errors=True)
    sync_file(partial)
    rename_synced(partial, target)
    _announce(target)


def _announce(target: Path) -> None:
    """The last that is done. While `SOURCE_FILE` is there it may not have been."""
    write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)
    shutil.rmtree(target / AVERAGED_FOLDER, ignore_errors=True)
    (target / SOURCE_FILE).unlink(missing_ok=True)
    sync_file(target)


def _is_of(source: Source, target: Path) -> bool:
    """Whether `target` is a finished conversion of this source that may not have been announced."""
    mark = target / SOURCE_FILE
    return mark.is_file() and _text_of(mark) == identity(source)


def _text_of(mark: Path) -> str:
    return read_small(mark).decode(errors="replace")


def check_space(folder: Path, needed: int, flag: str) -> None:
    """ConfigError, with the flag that names the place, if the folder's disk has fewer bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{flag}: {folder.parent} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "make space, or give another folder"
        )


def write_parameter(
    folder: Path, name: str, spec: ParameterSpec, state: tuple[Tensor, dict[str, Tensor], dict[str, Any]]
) -> None:
    """Writes the files of one whole parameter, without padding, into a universal checkpoint in the making.

    state: on the CPU, fp32 values, moments by the optimizer's names, and the 'step' if there is one.
    """
    values, moments, others = state
    shape = (
        tuple(spec.global_shape)
        if spec.num_valid_rows is None
        else (spec.num_valid_rows, *spec.global_shape[1:])
    )
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
            f"checkpoint {source.folder}: the copies of {plan.name} on the tensor ranks differ by up to "
            f"{mismatch.largest:.2e}: convert an older checkpoint, or take their mean with "
            "--allow-replica-mismatch"
        )
    if mismatch.largest:
        # Before it is finished: whoever goes on after an interruption does not see the copies again.
        (partial / AVERAGED_FOLDER).mkdir(exist_ok=True)
        (partial / AVERAGED_FOLDER / plan.name).touch()
        sync_tree(partial / AVERAGED_FOLDER)
        sync_file(partial)
    _finish(partial, plan.name)
    return Converted(plan.name, mismatch.largest)


def _write_files(
    folder: Path, plan: MergePlan, blocks: Mapping[str, Iterable[np.ndarray]], step: float | None
) -> None:
    """blocks: by state, the whole's elements in order."""
    unfinished = folder / UNFINISHED_FOLDER / plan.name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    names = {VALUES: "fp32.pt", **MOMENT_FILES}
    for key, parts in blocks.items():
        if key not in names:
            raise ConfigError(
                f"the optimizer's {key} of {plan.name} has no place in a universal checkpoint, which keeps "
                f"{', '.join(names)}"
            )
        write_tensor(unfinished / names[key], plan.shape, parts, plan.entry())
    if step is not None:
        write_tensor(unfinished / STEP_FILE, (), [np.float32(step)])


def _finish(folder: Path, name: str) -> None:
    """Gives the parameter's folder its place once all that is in it is on the disk: whatever is found there
    after a power failure is whole."""
    (folder / PARAMETER_FOLDER).mkdir(exist_ok=True)
    sync_tree(folder / UNFINISHED_FOLDER / name)
    rename_synced(folder / UNFINISHED_FOLDER / name, folder / PARAMETER_FOLDER / name)


def _is_finished(source: Source, partial: Path, plan: MergePlan) -> bool:
    """Whether an interrupted conversion has finished a parameter: all of its files are there, of the right
    shape, and every byte agrees with the checksum that was written behind it. Else it is removed."""
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
    """By name, the shapes of the tensors in the files that a conversion writes of a parameter."""
    names = {VALUES: "fp32.pt", **MOMENT_FILES}
    files = {names[key]: plan.shape for key in (VALUES, *source.files.moments(plan.name)) if key in names}
    if _number(source.files.others(plan.name).get("step")) is not None:
        files[STEP_FILE] = ()
    return files


def _number(step: Any) -> float | None:
    """The optimizer's step, which some keep as a number and some as a tensor."""
    return step.item() if isinstance(step, StoredTensor) else step


# --- around them ---


def _begin(source: Source, partial: Path) -> None:
    """Makes the folder, or finds it as an interrupted conversion has left it."""
    partial.mkdir(parents=True, exist_ok=True)
    if links := [path for path in (partial, *partial.iterdir()) if path.is_symlink()]:
        raise ConfigError(f"{links[0]} is a link, which no conversion leaves: delete it")
    mark = partial / SOURCE_FILE
    if not mark.is_file() and (partial / PARAMETER_FOLDER).exists():
        raise ConfigError(
            f"{partial} is no interrupted conversion of a native checkpoint, for it has no {SOURCE_FILE}: "
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
    """Bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _write_rest(source: Source, partial: Path) -> None:
    """What is not of a single parameter: as DeepSpeed's converter leaves it, and `run.json`."""
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
        write_atomically(partial / RUN_FILE, json.dumps(run, indent=2) + "\n")


def _record_without(averaged: set[str], record: dict[str, Any]) -> dict[str, Any]:
    """What of a record still holds if the mean was taken of the copies of these parameters."""
    digests = {
        kind: {name: digest for name, digest in of_kind.items() if name not in averaged}
        for kind, of_kind in record["digests"].items()
    }
    return {**record, "digests": digests, "probe": None}


def _plain_types(value: Any) -> Any:
    """In types that any program can read: None in place of tensors and of objects of other programs' classes,
    but for the arguments, which all of them expect as a Namespace."""
    if isinstance(value, dict):
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_types(entry) for entry in value)
    if isinstance(value, Stub) and value.origin == "argparse.Namespace":
        return Namespace(
            **{key: _plain_types(entry) for key, entry in vars(value).items() if key != "constructor_args"}
        )
    return None if isinstance(value, (Stub, StoredTensor)) else value
