"""Saving through DeepSpeed's engine, and resuming on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: how far the
run had come, its configuration, vocabulary, layout and data. The file `latest` beside the folders names the
newest. Nothing else has to be remembered: dropout and initial weights are functions of the seed and of global
sample numbers, and the learning rate of progress, so there is no random state to save.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.certificate import Check, certify, check_certificate, table
from megatron.checkpoint.compatibility import (
    check_copies,
    check_data,
    check_foreign_schedule,
    check_model,
    check_schedule,
    data_line,
    schedule_line,
)
from megatron.checkpoint.digests import DigestsAsRead
from megatron.checkpoint.folders import (
    LATEST_FILE,
    RUN_FILE,
    SAVING,
    Checkpoint,
    TrainingState,
    describe_start,
    find_latest,
    is_universal,
    open_checkpoint,
)
from megatron.checkpoint.manifest import describe_files, first_damaged, seal, write_atomically
from megatron.checkpoint.reshape import SavedParameters, spec_record
from megatron.checkpoint.rules import INFO_KEY, client_state, derive_info
from megatron.checkpoint.universal import LATEST_UNIVERSAL_FILE
from megatron.checkpoint.universal_reading import UniversalParameters, check_foreign, find_universal
from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import rule_record

_LOG = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint cannot be written; those that were complete are still there."""


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints that a run writes to --save, and goes back to."""

    engine: GPTEngine
    vocab_size: int
    eod: int | None
    fingerprint: dict[str, Any]

    def save(self, state: TrainingState) -> Path:
        """Writes one; returns its folder. See `save_checkpoint`."""
        folder = self.engine.run_config.checkpoint.save
        return save_checkpoint(self.engine, folder, state, self.vocab_size, self.eod, self.fingerprint)

    def go_back(self) -> Checkpoint | None:
        """Loads the run's newest; None where it has none yet, and nothing is loaded. Collective."""
        checkpoint = newest_of_this_run(self.engine)
        if checkpoint is not None:
            load_checkpoint(self.engine, checkpoint, self.fingerprint)
        return checkpoint


def find_checkpoint(
    config: Config, vocab_size: int, fingerprint: dict[str, Any], damaged: Mapping[str, str] | None = None
) -> Checkpoint | None:
    """The checkpoint that --load resumes from; None for a fresh start, where there is none yet.

    Raises ConfigError for one that this run cannot go on from: another model, other data or another
    learning-rate schedule, unless flags say that the latter are meant.
    """
    checkpoint = None
    if config.checkpoint.universal_checkpoint:
        checkpoint = _find_universal_or_newer(config.checkpoint, damaged)
    elif config.checkpoint.load:
        checkpoint = _find_native(Path(config.checkpoint.load), damaged)
    if checkpoint is not None:
        check_copies(checkpoint, config)
    if checkpoint is not None and checkpoint.is_foreign:
        check_foreign(checkpoint, config, vocab_size)
        check_foreign_schedule(checkpoint, config)
    elif checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_data(checkpoint, config, fingerprint)
        check_schedule(checkpoint, config)
    return checkpoint


def _find_universal_or_newer(config: CheckpointConfig, damaged: Mapping[str, str] | None) -> Checkpoint:
    """The universal checkpoint, or what this run has saved since it began there: the same command, given
    again, goes on."""
    universal = find_universal(config.load)
    if config.save is None or is_universal(Path(config.save)):
        return universal
    try:
        own = find_latest(config.save, damaged)
    except ConfigError as error:  # none of them is complete: the universal one is
        return replace(universal, passed_over=str(error))
    if own is None or own.run.get("origin") != _identity(universal):
        return universal
    reason = f"this run has saved it since it started from {universal.folder}"
    return replace(own, passed_over="; ".join(filter(None, (reason, own.passed_over))))


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tells a universal checkpoint from others, wherever it lies."""
    return {
        "folder": checkpoint.folder.name,
        "iteration": checkpoint.state.iteration,
        "sha256": checkpoint.run.get("sha256"),
    }


def _find_native(load: Path, damaged: Mapping[str, str] | None) -> Checkpoint | None:
    checkpoint = None if is_universal(load) else find_latest(load, damaged)
    if checkpoint is None and (is_universal(load) or (load / LATEST_UNIVERSAL_FILE).is_file()):
        raise ConfigError(
            f"--load {load} holds a universal checkpoint and no native one: add --universal_checkpoint"
        )
    return checkpoint


def settle_on_checkpoint(
    checkpoint: Checkpoint | None, config: Config, vocab_size: int, fingerprint: dict[str, Any]
) -> Checkpoint | None:
    """The checkpoint that all ranks have found, or if its files are not what was written the newest one
    before it. Reads all files once, shared over the ranks. Collective."""
    damaged: dict[str, str] = {}
    while True:
        _check_agreement(checkpoint)
        if checkpoint is None or is_universal(checkpoint.folder):
            return checkpoint
        damage = first_damaged(checkpoint.folder, checkpoint.run["files"])
        if damage is None:
            return checkpoint
        damaged[checkpoint.folder.name] = damage
        checkpoint = find_checkpoint(config, vocab_size, fingerprint, damaged)


def _check_agreement(checkpoint: Checkpoint | None) -> None:
    """Raises ConfigError on every rank unless all of them have found the same checkpoint. Collective."""
    # The same name might be of another run, on a disk of the node's own.
    found = f"{checkpoint.folder.name} {checkpoint.run.get('sha256', '')}" if checkpoint else "none"
    everywhere: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if len(set(everywhere)) > 1:
        differing = next(rank for rank, other in enumerate(everywhere) if other != everywhere[0])
        raise ConfigError(
            f"rank 0 would resume from {everywhere[0]} and rank {differing} from {everywhere[differing]}: "
            f"--load must be a folder that all nodes share"
        )


def newest_of_this_run(engine: GPTEngine) -> Checkpoint | None:
    """The newest of the native checkpoints in --save that this run has come by and that is as it was written;
    None if there is none. Reads its files, shared over the ranks. Collective."""
    names = [engine.checkpoint_lineage]
    dist.broadcast_object_list(names)  # rank 0 keeps the list
    for name in reversed(names[0]):
        checkpoint = _opened(Path(engine.run_config.checkpoint.save or "") / name)
        opened: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(opened, checkpoint is not None)
        if checkpoint is not None and all(opened):
            if first_damaged(checkpoint.folder, checkpoint.run["files"]) is None:
                return checkpoint
    return None


def _opened(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder if all its files are there."""
    try:
        return open_checkpoint(folder)
    except ConfigError:
        return None


def layout_record(config: Config) -> dict[str, Any]:
    """The layout in words for people and tools."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "zero_stage": parallel.zero_stage,
        "cpu_offload": parallel.cpu_offload,
        "precision": config.precision.name,
        "optimizer": config.optimizer.optimizer,
    }


def _optimizer_state_record(config: Config) -> dict[str, Any]:
    """How the run kept the moments; in the files they are fp32 always."""
    return rule_record() if config.optimizer.use_bnb_optimizer else {"bits": 32}


def save_checkpoint(
    engine: GPTEngine,
    folder: str | Path,
    state: TrainingState,
    vocab_size: int,
    eod: int | None,
    fingerprint: dict[str, Any],
) -> Path:
    """Writes `global_step<iteration>` in `folder`, then lets `latest` name it. Collective.

    Until it is complete the folder has another name; one of the same step that is there already stays until
    then. Raises SaveError on the rank that cannot write.
    """
    folder, tag = Path(folder), f"global_step{state.iteration}"
    saving = folder / f"{SAVING}{tag}"
    parameters = _parameter_records(engine)
    info = derive_info(parameters, vocab_size)
    try:
        if engine.global_rank == 0 and saving.exists():
            shutil.rmtree(saving)  # what is left in there would be taken for a part of this checkpoint
        dist.barrier()
        # `latest` is written below: DeepSpeed writes it before the other ranks have finished their files.
        extra = client_state(info, engine.run_config, asdict(state))
        engine.save_checkpoint(str(folder), tag=saving.name, client_state=extra, save_latest=False)
        dist.barrier()
        files = describe_files(saving)
        certificate = certify(engine, vocab_size)
        if engine.global_rank == 0:
            run = {
                "state": asdict(state),
                "config": engine.run_config.to_dict(),
                "layout": layout_record(engine.run_config),
                "optimizer_state": _optimizer_state_record(engine.run_config),
                "stages": engine.module.stages_record(),
                "versions": {name: version(name) for name in ("torch", "deepspeed")},
                "vocab_size": vocab_size,
                "eod": eod,
                "data": fingerprint,
                "parameters": parameters,
                "certificate": certificate,
                INFO_KEY: info,
                "origin": engine.checkpoint_origin,
                "lineage": engine.checkpoint_lineage,
                "files": files,
            }
            write_atomically(saving / RUN_FILE, json.dumps(seal(run), indent=2) + "\n")
            _put_in_place(saving, folder / tag)
            write_atomically(folder / LATEST_FILE, tag)
    except (OSError, RuntimeError) as error:
        if not _is_of_writing(error):
            raise  # of a message to another rank, which may have died
        raise SaveError(f"checkpoint {folder / tag} cannot be written ({error}; {_space(folder)})") from error
    if engine.global_rank == 0:
        before = [name for name in engine.checkpoint_lineage if name != tag and (folder / name).exists()]
        _remove_old(folder, before, engine.run_config.checkpoint.keep_last)
        engine.checkpoint_lineage = [*(name for name in before if (folder / name).exists()), tag]
        if unequal := certificate["unequal_copies"]:
            _LOG.warning("%s: copies on several ranks are not equal: %s", folder / tag, "; ".join(unequal))
    dist.barrier()
    return folder / tag


def _parameter_records(engine: GPTEngine) -> dict[str, Any]:
    """By name, what every parameter of the model is, for those who read without the model. Collective."""
    own = {name: spec_record(spec_of(p)) for name, p in engine.module.named_parameters()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: record for records in everywhere for name, record in records.items()}


def _is_of_writing(error: OSError | RuntimeError) -> bool:
    """torch.save tells of a failed write by a RuntimeError that names its file format's source."""
    return isinstance(error, OSError) or "inline_container" in str(error) or "PytorchStream" in str(error)


def _space(folder: Path) -> str:
    """PyTorch's errors do not say that a disk is full."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"


def _put_in_place(saving: Path, final: Path) -> None:
    """Renames; what is complete is found at every instant, under one name or another."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        _remove(replaced)
        os.rename(final, replaced)
    os.rename(saving, final)
    _remove(replaced)


def _remove_old(folder: Path, before: list[str], keep_last: int | None) -> None:
    """Deletes unfinished checkpoints, and of those that this run has come by, oldest first, all but
    keep_last - 1. Those of other runs, and what was found damaged, it leaves alone."""
    too_old = before[: max(len(before) - keep_last + 1, 0)] if keep_last is not None else []
    for path in [*folder.glob(f"{SAVING}global_step*"), *(folder / name for name in too_old)]:
        try:
            _remove(path)
        except OSError as error:
            _LOG.warning("the old checkpoint %s cannot be deleted: %s", path, error)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # what it points to is somebody's elsewhere
    elif folder.exists():
        # First what makes it look complete: the rest takes time, in which the job may be killed.
        (folder / RUN_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def start_from(
    engine: GPTEngine,
    checkpoint: Checkpoint | None,
    fingerprint: dict[str, Any],
    tell: Callable[[str], object],
) -> TrainingState:
    """Where the run begins: at the checkpoint, which is loaded, or with the new weights that are there.
    Collective."""
    tell(describe_start(checkpoint, engine.run_config.checkpoint.load))
    if checkpoint is None:
        return TrainingState()
    tell(table(load_checkpoint(engine, checkpoint, fingerprint)))
    if is_universal(checkpoint.folder):
        engine.checkpoint_origin = _identity(checkpoint)
        return checkpoint.state
    engine.checkpoint_origin = checkpoint.run.get("origin")
    save = engine.run_config.checkpoint.save
    if save is not None and Path(save).resolve() == checkpoint.folder.parent.resolve():
        engine.checkpoint_lineage = [*checkpoint.run.get("lineage", []), checkpoint.folder.name]
    return checkpoint.state


def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[Check]:
    """Restores weights, master weights, moments, step and loss scale, whatever layout, precision and stages
    saved them. Another kind of optimizer starts with fresh moments. Returns what was compared with what was
    saved. Collective; ConfigError, on every rank, names what is not as it was saved."""
    now = engine.run_config
    parameters: SavedParameters | UniversalParameters
    if is_universal(checkpoint.folder):
        parameters = UniversalParameters(checkpoint)
    else:
        parameters = SavedParameters(checkpoint)
    same_precision = not checkpoint.is_foreign and checkpoint.config.precision.name == now.precision.name
    with_moments = parameters.kept_by == now.optimizer.moments_kind
    as_read = DigestsAsRead()
    engine.optimizer.load_by_name(
        parameters.read, parameters.loss_scaler if same_precision else None, with_moments, as_read.add
    )
    return [
        *check_certificate(engine, checkpoint, with_moments, as_read),
        Check("data", data_line(checkpoint, fingerprint)),
        Check("learning rate", schedule_line(checkpoint, now)),
        Check("random streams", "made from seed, iteration and global coordinates: nothing to restore"),
    ]
