"""Saving through DeepSpeed's engine, and resuming on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: how far the
run had come, its configuration, vocabulary, layout and data. The file `latest` beside the folders names the
newest checkpoint. No random state is saved: dropout and initial weights are functions of the seed and of
global sample numbers, and the learning rate is a function of the iteration.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.compatibility import (
    check_data,
    check_external_schedule,
    check_model,
    check_replicas,
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
from megatron.checkpoint.formats.universal import UniversalParameters, check_external
from megatron.checkpoint.integrity.layout_files import missing_files
from megatron.checkpoint.integrity.manifest import (
    add_checksum,
    describe_files,
    first_damaged,
    write_atomically,
)
from megatron.checkpoint.lineage.identity import LineageEntry, RunIdentity, lineage_record
from megatron.checkpoint.lineage.owner import FolderOwner
from megatron.checkpoint.lineage.start import (
    check_save_folder,
    choose_checkpoint,
    may_replace,
    share_checkpoint,
    start_identity,
)
from megatron.checkpoint.publishing import (
    clean_leftovers,
    delete_old_checkpoints,
    is_same_checkpoint,
    publish,
    saving_name,
)
from megatron.checkpoint.reshard import SavedParameters, spec_record
from megatron.checkpoint.verification.digests import UnquantizedDigests
from megatron.checkpoint.verification.record import (
    Check,
    make_integrity_record,
    verification_table,
    verify_loaded_state,
)
from megatron.config import Config, ConfigError
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import rule_record

_LOG = logging.getLogger(__name__)


class FolderTakenError(Exception):
    """Another run or job owns --save, or the checkpoint of this name in it. Raised on every rank."""


class SaveError(OSError):
    """A checkpoint cannot be written. Earlier complete checkpoints are not affected."""


@dataclass(frozen=True)
class CheckpointManager:
    """Saves the checkpoints of a run to --save, and rolls the run back to them."""

    engine: GPTEngine
    vocab_size: int
    eod: int | None
    fingerprint: dict[str, Any]
    owner: FolderOwner | None = None
    """Owner of the --save folder; only on rank 0 of a run that saves."""

    def folder_loss(self) -> str | None:
        """Why this run must not write to --save any more, as far as is known without a look at the folder."""
        return self.owner.loss if self.owner is not None else None

    def save(self, state: TrainingState) -> Path:
        """Writes a checkpoint; returns its folder. See `save_checkpoint`."""
        folder, owner = self.engine.run_config.checkpoint.save, self.owner
        return save_checkpoint(self.engine, folder, state, self.vocab_size, self.eod, self.fingerprint, owner)

    def rollback(self) -> Checkpoint | None:
        """Loads the run's newest valid checkpoint and returns it. Returns None, and loads nothing, if the run
        has none yet. Collective."""
        options = self.engine.run_config.checkpoint
        checkpoint = newest_of_this_run(self.engine, Path(options.save or ""), options.allow_replica_mismatch)
        if checkpoint is not None:
            load_checkpoint(self.engine, checkpoint, self.fingerprint)
            if self.engine.checkpoint_identity is not None:
                self.engine.checkpoint_identity = self.engine.checkpoint_identity.rolled_back_to(
                    checkpoint.folder.name
                )
        return checkpoint


def find_checkpoint(
    config: Config, vocab_size: int, fingerprint: dict[str, Any], damaged: Mapping[str, str] | None = None
) -> Checkpoint | None:
    """The checkpoint that --load resumes from; None if the run initializes from scratch.

    Raises ConfigError for a checkpoint of another model, and for other data or another learning-rate schedule
    unless a flag allows them, and for a --save folder that belongs to another run. damaged: path of each
    checkpoint to skip -> the reason.
    """
    # An evaluation is of the checkpoint that is given, not of what was saved since.
    options = replace(config.checkpoint, save=None) if config.training.no_train else config.checkpoint
    checkpoint = choose_checkpoint(options, damaged)
    if checkpoint is None and config.checkpoint.load and config.training.no_train:
        raise ConfigError(
            f"--load {config.checkpoint.load} holds no checkpoint: --eval-only needs one to evaluate"
        )
    check_save_folder(checkpoint, config)
    if checkpoint is not None:
        check_replicas(checkpoint, config)
    if checkpoint is not None and checkpoint.is_external:
        check_external(checkpoint, config, vocab_size)
        check_external_schedule(checkpoint, config)
    elif checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_vocabulary(checkpoint, fingerprint)
        check_data(checkpoint, config, fingerprint)
        check_schedule(checkpoint, config)
    return checkpoint


def select_valid_checkpoint(
    checkpoint: Checkpoint | None, config: Config, vocab_size: int, fingerprint: dict[str, Any]
) -> Checkpoint | None:
    """Returns rank 0's checkpoint on all ranks. If its files are damaged, returns the newest valid one before
    it. Other ranks may pass None. The ranks share the work of reading all files once. Collective."""
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


def newest_of_this_run(engine: GPTEngine, folder: Path, allow_replica_mismatch: bool) -> Checkpoint | None:
    """The newest of this run's checkpoints in `folder` that a resume would accept; None if there is none.

    allow_replica_mismatch: as with --allow-replica-mismatch. The ranks share the work of reading the files.
    Collective.
    """
    names: list[list[str]] = [[]]
    with _shared_errors():
        if engine.checkpoint_identity is not None:
            lineage = engine.checkpoint_identity.lineage
            try:
                names = [[entry.name for entry in reversed(lineage) if is_same_checkpoint(folder, entry)]]
            except OSError as error:
                raise ConfigError(f"the checkpoints in {folder} cannot be read ({error})") from error
    dist.broadcast_object_list(names)  # rank 0 keeps the identity
    for name in names[0]:
        checkpoint = _opened(folder / name)
        good = checkpoint is not None and (allow_replica_mismatch or not unequal_copies(checkpoint))
        everywhere: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(everywhere, good)
        if checkpoint is not None and all(everywhere):
            if first_damaged(checkpoint.folder, checkpoint.run["files"]) is None:
                return checkpoint
    return None


def _opened(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if a file is missing or of the wrong size."""
    try:
        return open_checkpoint(folder)
    except (ConfigError, OSError):
        return None


def layout_record(config: Config) -> dict[str, Any]:
    """The layout as `run.json` records it, for users and tools."""
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
    """The precision of the moments in memory. The files always hold them in fp32."""
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
    """Writes `global_step<iteration>` in `folder`, then updates `latest`. Collective.

    The checkpoint is written under a temporary name and renamed when it is complete; an existing checkpoint
    of the same step is replaced only then. owner: the owner of the folder, on rank 0; None if no other job
    can write there. Raises SaveError on the rank that cannot write, or on all ranks if rank 0
    cannot read the folder before the save, and FolderTakenError on all ranks if the
    folder, or the checkpoint of this name in it, belongs to another run.
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
        integrity_record = make_integrity_record(engine, vocab_size)
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
            "certificate": integrity_record,
            INFO_KEY: info,
            "files": files,
        }
        if lacking := missing_files(files, run):
            raise OSError(f"{lacking[0]} is missing after all ranks have written, {len(lacking)} in all")
        # If another job has taken over the folder during the save, this job must not rename.
        with _shared_errors():
            _check_owner(owner)
        if identity is not None:
            record = {
                "run_id": identity.run_id,
                "origin": identity.origin,
                "lineage": lineage_record(identity.lineage),
            }
            run = add_checksum({**run, **record})
            write_atomically(saving / RUN_FILE, json.dumps(run, indent=2) + "\n")
            entry = LineageEntry(name, state.iteration, identity.run_id, run["sha256"])
            engine.checkpoint_identity = publish(saving, entry, identity)
    except (OSError, RuntimeError) as error:
        if not _is_of_writing(error):
            raise  # a failed collective: another rank may have died
        raise SaveError(
            f"checkpoint {folder / name} cannot be written ({error}; {_space(folder)})"
        ) from error
    _delete_old(engine, folder, name, integrity_record["unequal_copies"])
    dist.barrier()
    return folder / name


def _begin_save(engine: GPTEngine, folder: Path, name: str, owner: FolderOwner | None) -> str:
    """Checks that this run may write to the folder and removes leftovers of killed saves. Returns the
    temporary name of the new checkpoint. Collective."""
    saving: list[str] = [""]
    identity: RunIdentity | None = engine.checkpoint_identity
    with _shared_errors():
        if identity is not None:
            _check_owner(owner)
            options = engine.run_config.checkpoint
            if not (options.overwrite_checkpoints or may_replace(folder, name, identity)):
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
    """Deletes old checkpoints as --keep-last says, once the checkpoint `name` is complete. Collective.

    unequal: replicas that differ in `name`. A resume refuses such a checkpoint, so the newest checkpoint that
    a resume accepts is kept as well.
    """
    options = engine.run_config.checkpoint
    protected: Checkpoint | None = None
    if unequal:
        if engine.global_rank == 0:
            _LOG.warning("%s: replicas on several ranks are not equal: %s", folder / name, "; ".join(unequal))
        if options.keep_last is not None:
            protected = newest_of_this_run(engine, folder, allow_replica_mismatch=False)
    if engine.checkpoint_identity is not None:
        kept = protected.folder.name if protected is not None else None
        try:
            delete_old_checkpoints(folder, engine.checkpoint_identity, options, kept)
        except OSError as error:  # the other ranks wait for this rank
            _LOG.warning("%s: old checkpoints cannot be read: %s", folder, error)


def _parameter_records(engine: GPTEngine) -> dict[str, Any]:
    """The spec of every parameter of the model, by name: readers of the checkpoint need no model.
    Collective."""
    own = {name: spec_record(spec_of(p)) for name, p in engine.module.named_parameters()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {name: record for records in everywhere for name, record in records.items()}


def _is_of_writing(error: OSError | RuntimeError) -> bool:
    """torch.save reports a failed write as a RuntimeError that names the C++ source of its file format."""
    return isinstance(error, OSError) or "inline_container" in str(error) or "PytorchStream" in str(error)


def _space(folder: Path) -> str:
    """Free space of the folder's disk, for an error text: PyTorch's errors do not say that a disk is full."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"


def restore_or_init(
    engine: GPTEngine,
    checkpoint: Checkpoint | None,
    fingerprint: dict[str, Any],
    print_fn: Callable[[str], object],
) -> TrainingState:
    """Loads the checkpoint, or keeps the initial weights if there is none. Returns the state to train from.
    Collective."""
    print_fn(describe_start(checkpoint, engine.run_config.checkpoint.load))
    with _shared_errors():
        if engine.global_rank == 0:
            options = engine.run_config.checkpoint
            try:
                engine.checkpoint_identity = start_identity(checkpoint, options)
            except OSError as error:
                raise ConfigError(f"--save {options.save} cannot be read ({error})") from error
    if checkpoint is None:
        return TrainingState()
    print_fn(verification_table(load_checkpoint(engine, checkpoint, fingerprint)))
    return checkpoint.state


def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[Check]:
    """Restores weights, master weights, moments, step and loss scale from a checkpoint of any layout,
    precision and partition. Another kind of optimizer starts with fresh moments. Returns the lines of the
    checkpoint verification. Collective. Raises ConfigError, on every rank, if a restored tensor differs from
    the saved one."""
    now = engine.run_config
    parameters: SavedParameters | UniversalParameters
    if is_universal(checkpoint.folder):
        parameters = UniversalParameters(checkpoint)
    else:
        parameters = SavedParameters(checkpoint)
    same_precision = not checkpoint.is_external and checkpoint.config.precision.name == now.precision.name
    with_moments = parameters.moments_kind == now.optimizer.moments_kind
    unquantized = UnquantizedDigests()
    engine.optimizer.load_by_name(
        parameters.read, parameters.loss_scaler if same_precision else None, with_moments, unquantized.add
    )
    return [
        *verify_loaded_state(engine, checkpoint, with_moments, unquantized),
        Check("data", data_line(checkpoint, fingerprint)),
        Check("learning rate", schedule_line(checkpoint, now)),
        Check("random state", "computed from seed, iteration and global coordinates: nothing to restore"),
    ]
