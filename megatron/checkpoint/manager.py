"""Saving through DeepSpeed's engine, and resuming on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: how far the
run had come, its configuration, vocabulary, layout and data. The file `latest` beside the folders names the
newest. Nothing else has to be remembered: dropout and initial weights are functions of the seed and of global
sample numbers, and the learning rate of progress, so there is no random state to save.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.compatibility import (
    check_copies,
    check_data,
    check_foreign_schedule,
    check_model,
    check_schedule,
    check_vocabulary,
    data_line,
    schedule_line,
    unequal_copies,
)
from megatron.checkpoint.convert.rules import INFO_KEY, client_state, derive_info
from megatron.checkpoint.discovery import (
    RUN_FILE,
    Checkpoint,
    TrainingState,
    describe_start,
    is_universal,
    open_checkpoint,
)
from megatron.checkpoint.formats.universal import UniversalParameters, check_foreign
from megatron.checkpoint.integrity.layout_files import missing_files
from megatron.checkpoint.integrity.manifest import describe_files, first_damaged, seal, write_atomically
from megatron.checkpoint.lineage.identity import LineageEntry, RunIdentity, lineage_record
from megatron.checkpoint.lineage.owner import FolderOwner
from megatron.checkpoint.lineage.start import (
    check_save,
    choose_checkpoint,
    identity_of_start,
    owns_place,
    share_checkpoint,
)
from megatron.checkpoint.publishing import clean_leftovers, is_in_place, publish, remove_old, saving_name
from megatron.checkpoint.reshard import SavedParameters, spec_record
from megatron.checkpoint.verification.digests import DigestsAsRead
from megatron.checkpoint.verification.record import Check, certify, check_certificate, table
from megatron.config import Config, ConfigError
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import rule_record

_LOG = logging.getLogger(__name__)


class FolderTakenError(Exception):
    """This run must not write to --save, or not under that name. Raised on every rank."""


class SaveError(OSError):
    """A checkpoint cannot be written; those that were complete are still there."""


@dataclass(frozen=True)
class CheckpointManager:
    """The checkpoints that a run writes to --save, and goes back to."""

    engine: GPTEngine
    vocab_size: int
    eod: int | None
    fingerprint: dict[str, Any]
    owner: FolderOwner | None = None
    """Of --save, on rank 0 of a run that saves there."""

    def folder_loss(self) -> str | None:
        """Why this run must not write to --save any more, as far as is known without a look at the folder."""
        return self.owner.loss if self.owner is not None else None

    def save(self, state: TrainingState) -> Path:
        """Writes one; returns its folder. See `save_checkpoint`."""
        folder, owner = self.engine.run_config.checkpoint.save, self.owner
        return save_checkpoint(self.engine, folder, state, self.vocab_size, self.eod, self.fingerprint, owner)

    def rollback(self) -> Checkpoint | None:
        """Loads the run's newest; None where it has none yet, and nothing is loaded. Collective."""
        options = self.engine.run_config.checkpoint
        checkpoint = newest_of_this_run(self.engine, Path(options.save or ""), options.allow_replica_mismatch)
        if checkpoint is not None:
            load_checkpoint(self.engine, checkpoint, self.fingerprint)
            if self.engine.checkpoint_identity is not None:
                self.engine.checkpoint_identity = self.engine.checkpoint_identity.back_at(
                    checkpoint.folder.name
                )
        return checkpoint


def find_checkpoint(
    config: Config, vocab_size: int, fingerprint: dict[str, Any], damaged: Mapping[str, str] | None = None
) -> Checkpoint | None:
    """The checkpoint that --load resumes from; None for a fresh start, where there is none yet.

    Raises ConfigError for one that this run cannot go on from: another model, other data or another
    learning-rate schedule, unless flags say that the latter are meant, and for a --save folder that belongs
    to another run. damaged: paths of checkpoints to pass over, and why.
    """
    checkpoint = choose_checkpoint(config.checkpoint, damaged)
    if checkpoint is None and config.checkpoint.load and config.training.no_train:
        raise ConfigError(
            f"--load {config.checkpoint.load} holds no checkpoint: --eval-only needs one to evaluate"
        )
    check_save(checkpoint, config)
    if checkpoint is not None:
        check_copies(checkpoint, config)
    if checkpoint is not None and checkpoint.is_foreign:
        check_foreign(checkpoint, config, vocab_size)
        check_foreign_schedule(checkpoint, config)
    elif checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_vocabulary(checkpoint, fingerprint)
        check_data(checkpoint, config, fingerprint)
        check_schedule(checkpoint, config)
    return checkpoint


def select_valid_checkpoint(
    checkpoint: Checkpoint | None, config: Config, vocab_size: int, fingerprint: dict[str, Any]
) -> Checkpoint | None:
    """The checkpoint that rank 0 has found, on all ranks, or if its files are not what was written the newest
    one before it. Other ranks may pass None. Reads all files once, shared over the ranks. Collective."""
    damaged: dict[str, str] = {}
    while True:
        checkpoint = share_checkpoint(checkpoint)
        if checkpoint is None or is_universal(checkpoint.folder):
            return checkpoint
        damage = first_damaged(checkpoint.folder, checkpoint.run["files"])
        if damage is None:
            return checkpoint
        damaged[str(checkpoint.folder)] = damage
        with _shared_errors():
            if dist.get_rank() == 0:
                try:
                    checkpoint = find_checkpoint(config, vocab_size, fingerprint, damaged)
                except OSError as error:
                    raise ConfigError(f"--load {config.checkpoint.load} cannot be read ({error})") from error


@contextmanager
def _shared_errors() -> Iterator[None]:
    """What rank 0 raises in the block because of files, which it alone looks at, is raised on all ranks: else
    they would wait for it. The block is no collective, and its end is."""
    error: list[Exception | None] = [None]
    try:
        yield
    except (ConfigError, FolderTakenError, OSError) as found:
        error = [found]
    dist.broadcast_object_list(error)
    if error[0] is not None:
        raise error[0]


def newest_of_this_run(engine: GPTEngine, folder: Path, with_unequal_copies: bool) -> Checkpoint | None:
    """The newest of this run's checkpoints in `folder` that a resume would accept; None if there is none.

    with_unequal_copies: as with --allow-replica-mismatch. Reads the files, shared over the ranks. Collective.
    """
    names: list[list[str]] = [[]]
    with _shared_errors():
        if engine.checkpoint_identity is not None:
            lineage = engine.checkpoint_identity.lineage
            try:
                names = [[entry.name for entry in reversed(lineage) if is_in_place(folder, entry)]]
            except OSError as error:
                raise ConfigError(f"the checkpoints in {folder} cannot be read ({error})") from error
    dist.broadcast_object_list(names)  # rank 0 keeps the identity
    for name in names[0]:
        checkpoint = _opened(folder / name)
        good = checkpoint is not None and (with_unequal_copies or not unequal_copies(checkpoint))
        everywhere: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(everywhere, good)
        if checkpoint is not None and all(everywhere):
            if first_damaged(checkpoint.folder, checkpoint.run["files"]) is None:
                return checkpoint
    return None


def _opened(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder if all its files are there."""
    try:
        return open_checkpoint(folder)
    except (ConfigError, OSError):
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
    owner: FolderOwner | None = None,
) -> Path:
    """Writes `global_step<iteration>` in `folder`, then lets `latest` name it. Collective.

    Until it is complete the folder has another name; one of the same step that is there already stays until
    then. owner: rank 0's ownership of the folder; None: the caller knows that nobody else writes there.
    Raises SaveError on the rank that cannot write, or on all ranks if rank 0 cannot look at the folder before
    the save, and FolderTakenError on all ranks if the folder, or the
    checkpoint of this name in it, belongs to another run.
    """
    folder, name = Path(folder), f"global_step{state.iteration}"
    if engine.global_rank == 0 and engine.checkpoint_identity is None:
        engine.checkpoint_identity = RunIdentity()
    identity: RunIdentity | None = engine.checkpoint_identity
    parameters = _parameter_records(engine)
    info = derive_info(parameters, vocab_size)
    try:
        saving = folder / _begin_save(engine, folder, name, owner)
        # `latest` is written below: DeepSpeed writes it before the other ranks have finished their files.
        extra = client_state(info, engine.run_config, asdict(state))
        engine.save_checkpoint(str(folder), tag=saving.name, client_state=extra, save_latest=False)
        dist.barrier()
        files = describe_files(saving)
        certificate = certify(engine, vocab_size)
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
            "files": files,
        }
        if lacking := missing_files(files, run):
            raise OSError(f"{lacking[0]} is missing after all ranks have written, {len(lacking)} in all")
        # A job that was taken over while it wrote must not rename.
        with _shared_errors():
            _check_owner(owner)
        if identity is not None:
            record = {
                "run_id": identity.run_id,
                "origin": identity.origin,
                "lineage": lineage_record(identity.lineage),
            }
            run = seal({**run, **record})
            write_atomically(saving / RUN_FILE, json.dumps(run, indent=2) + "\n")
            entry = LineageEntry(name, state.iteration, identity.run_id, run["sha256"])
            engine.checkpoint_identity = publish(saving, entry, identity)
    except (OSError, RuntimeError) as error:
        if not _is_of_writing(error):
            raise  # of a message to another rank, which may have died
        raise SaveError(
            f"checkpoint {folder / name} cannot be written ({error}; {_space(folder)})"
        ) from error
    _delete_old(engine, folder, name, certificate["unequal_copies"])
    dist.barrier()
    return folder / name


def _begin_save(engine: GPTEngine, folder: Path, name: str, owner: FolderOwner | None) -> str:
    """Checks that this run may write there and makes room; returns the name of the unfinished checkpoint.
    Collective."""
    saving: list[str] = [""]
    identity: RunIdentity | None = engine.checkpoint_identity
    with _shared_errors():
        if identity is not None:
            _check_owner(owner)
            options = engine.run_config.checkpoint
            if not (options.overwrite_checkpoints or owns_place(folder, name, identity)):
                raise FolderTakenError(
                    f"{folder / name} belongs to another run: it is not overwritten without "
                    "--overwrite-checkpoints; move it away, or give another --save"
                )
            if folder.is_dir():
                clean_leftovers(folder)
            saving = [saving_name(name, identity)]
    dist.broadcast_object_list(saving)
    return saving[0]


def _check_owner(owner: FolderOwner | None) -> None:
    """Raises FolderTakenError if the folder has another owner by now."""
    problem = owner.problem() if owner is not None else None
    if problem is not None:
        raise FolderTakenError(problem)


def _delete_old(engine: GPTEngine, folder: Path, name: str, unequal: list[str]) -> None:
    """What --keep-last asks for, once the checkpoint `name` is complete. Collective.

    unequal: copies that differ in it. Then no resume accepts it, and the newest that one does accept stays.
    """
    options = engine.run_config.checkpoint
    protected: Checkpoint | None = None
    if unequal:
        if engine.global_rank == 0:
            _LOG.warning("%s: copies on several ranks are not equal: %s", folder / name, "; ".join(unequal))
        if options.keep_last is not None:
            protected = newest_of_this_run(engine, folder, with_unequal_copies=False)
    if engine.checkpoint_identity is not None:
        kept = protected.folder.name if protected is not None else None
        try:
            remove_old(folder, engine.checkpoint_identity.lineage, options, kept)
        except OSError as error:  # the others wait for this rank
            _LOG.warning("%s: old checkpoints cannot be looked at: %s", folder, error)


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


def restore_or_init(
    engine: GPTEngine,
    checkpoint: Checkpoint | None,
    fingerprint: dict[str, Any],
    tell: Callable[[str], object],
) -> TrainingState:
    """Where the run begins: at the checkpoint, which is loaded, or with the new weights that are there.
    Collective."""
    tell(describe_start(checkpoint, engine.run_config.checkpoint.load))
    with _shared_errors():
        if engine.global_rank == 0:
            options = engine.run_config.checkpoint
            try:
                engine.checkpoint_identity = identity_of_start(checkpoint, options)
            except OSError as error:
                raise ConfigError(f"--save {options.save} cannot be read ({error})") from error
    if checkpoint is None:
        return TrainingState()
    tell(table(load_checkpoint(engine, checkpoint, fingerprint)))
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
