"""Saves checkpoints through DeepSpeed's engine, and resumes from them on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: progress,
configuration, vocabulary, layout and data of the run. The file `latest` beside the folders names the
newest checkpoint. No random state is saved: dropout and initial weights are functions of the seed and of
global sample numbers, and the learning rate is a function of the iteration.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.compatibility import (
    check_data,
    check_external_schedule,
    check_first_sample,
    check_model,
    check_replicas,
    check_schedule,
    check_vocabulary,
    data_line,
    mismatched_replicas,
    schedule_line,
)
from megatron.checkpoint.digests import UnquantizedDigests
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import MAY_BE_INTACT, add_checksum
from megatron.checkpoint.formats.deepspeed_files import missing_files
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state, derive_info, spec_record
from megatron.checkpoint.integrity import (
    Check,
    make_integrity_record,
    verification_table,
    verify_loaded_state,
)
from megatron.checkpoint.lineage.identity import LineageEntry, RunIdentity
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
from megatron.checkpoint.ranks import (
    FolderTakenError,
    describe_files,
    errors_of_rank_0,
    first_problem,
    first_problem_of_ranks,
    no_heartbeat,
)
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState, describe_start
from megatron.config import Config
from megatron.config.batch import check_remaining_batches
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError, stop_at_access_error
from megatron.files import write_json
from megatron.mpu.parameters import ParameterSpec, spec_of
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks
from megatron.optimizer.eight_bit import rule_record

_LOG = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint cannot be written. Earlier complete checkpoints are not affected."""


@stop_at_access_error(MAY_BE_INTACT)
def find_checkpoint(
    config: Config, vocab_size: int, fingerprint: dict[str, Any], damaged: Mapping[str, str] | None = None
) -> Checkpoint | None:
    """Returns the checkpoint that --load resumes from; None if the run initializes from scratch.

    Raises UserError if the checkpoint is of a different model, if its data or learning-rate schedule differ
    from this run's and no flag allows it, if --save belongs to another run, or if a file cannot be read now.
    damaged: path of each checkpoint to skip -> the reason.
    """
    # An evaluation uses the checkpoint in --load, not a newer one in --save.
    options = replace(config.checkpoint, save=None) if config.training.no_train else config.checkpoint
    checkpoint = choose_checkpoint(options, damaged)
    if checkpoint is None and config.checkpoint.load and config.training.no_train:
        raise UserError(
            f"--load {config.checkpoint.load} holds no checkpoint: --eval-only needs one to evaluate"
        )
    if checkpoint is None and config.checkpoint.finetune:
        raise UserError(
            f"--load {config.checkpoint.load} holds no checkpoint: --finetune needs one to start from"
        )
    check_save_folder(checkpoint, config)
    if not config.training.no_train:
        check_first_sample(checkpoint, config)
        check_remaining_batches(config, 0 if checkpoint is None else checkpoint.start_state.consumed_samples)
    if checkpoint is not None:
        check_replicas(checkpoint, config)
    if checkpoint is not None and checkpoint.is_external:
        open_reader(checkpoint).check_external(config, vocab_size)
        check_external_schedule(checkpoint, config)
    elif checkpoint is not None:
        check_model(checkpoint, config, vocab_size)
        check_vocabulary(checkpoint, fingerprint)
        check_data(checkpoint, config, fingerprint)
        check_schedule(checkpoint, config)
    return checkpoint


def select_valid_checkpoint(
    checkpoint: Checkpoint | None,
    config: Config,
    vocab_size: int,
    fingerprint: dict[str, Any],
    heartbeat: Callable[[], None] = no_heartbeat,
) -> Checkpoint | None:
    """Returns rank 0's checkpoint on all ranks. If its files are damaged, returns the newest valid checkpoint
    before it. Other ranks may pass None. The ranks share the work of reading all files once. heartbeat:
    called after each file. Collective."""
    damaged: dict[str, str] = {}
    while True:
        checkpoint = share_checkpoint(checkpoint, leads_node=config.parallel.local_rank == 0)
        problem = None if checkpoint is None else _find_damage(checkpoint, heartbeat)
        if checkpoint is None or problem is None:
            return checkpoint
        damaged[str(checkpoint.folder)] = problem
        with errors_of_rank_0(f"--load {config.checkpoint.load}"):
            if dist.get_rank() == 0:
                checkpoint = find_checkpoint(config, vocab_size, fingerprint, damaged)


@stop_at_access_error(MAY_BE_INTACT)
def _find_damage(checkpoint: Checkpoint, heartbeat: Callable[[], None]) -> str | None:
    """Reads the files that must be intact before loading. Returns the first problem. Collective."""
    reader = open_reader(checkpoint)
    names: list[str] = []
    with errors_of_rank_0():
        if dist.get_rank() == 0:
            names = reader.files_to_verify()
    return first_problem(names, reader.file_problem, heartbeat)


def _open_on_all_ranks(folder: Path) -> Checkpoint | None:
    """Returns the checkpoint in a folder; None if a file is missing or of the wrong size. Raises UserError on
    every rank if one rank cannot read it now. Collective."""
    checkpoint = problem = None
    try:
        checkpoint = open_checkpoint(folder)
    except UserError:
        pass
    except OSError as error:
        problem = str(error)
    if (found := first_problem_of_ranks(problem)) is not None:
        raise UserError(f"rank {found[0]} cannot read checkpoint {folder} now ({found[1]})")
    return checkpoint


class CheckpointManager:
    """Starts a run from a checkpoint, saves its checkpoints to --save, and rolls it back to them.

    folder: --save, or any folder if the run does not save. vocab_size: without padding. eod: id of the
    end-of-document token, if known. fingerprint: identifies the data. owner: the ownership of the folder, on
    rank 0; None if no other job can write there. heartbeat: called after each file that is read or synced.
    """

    def __init__(
        self,
        engine: GPTEngine,
        folder: str | Path,
        vocab_size: int,
        eod: int | None,
        fingerprint: dict[str, Any],
        owner: FolderOwner | None = None,
        heartbeat: Callable[[], None] = no_heartbeat,
    ) -> None:
        self.engine = engine
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.eod = eod
        self.fingerprint = fingerprint
        self.owner = owner
        self.heartbeat = heartbeat
        # The run that the next checkpoint belongs to; on rank 0 only, once the run has started or saved.
        self.identity: RunIdentity | None = None

    def ownership_lost_reason(self) -> str | None:
        """Returns why this run lost --save, as found by the last heartbeat; None while it owns the folder."""
        return self.owner.lost_reason if self.owner is not None else None

    def restore_or_init(
        self, checkpoint: Checkpoint | None, print_fn: Callable[[str], object]
    ) -> TrainingState:
        """Loads the checkpoint, or keeps the initial weights. Returns the training state. Collective."""
        options = self.engine.run_config.checkpoint
        print_fn(describe_start(checkpoint, options.load))
        with errors_of_rank_0(f"--save {options.save}"):
            if self.engine.global_rank == 0:
                self.identity = start_identity(checkpoint, options)
        if self.owner is not None and self.identity is not None:
            self.owner.set_run_id(self.identity.run_id)
        if checkpoint is None:
            return TrainingState()
        print_fn(verification_table(load_checkpoint(self.engine, checkpoint, self.fingerprint)))
        return checkpoint.start_state

    def rollback(self) -> Checkpoint | None:
        """Loads and returns the run's newest valid checkpoint; None if there is none yet. Collective."""
        checkpoint = self.newest_valid(self.engine.run_config.checkpoint.allow_replica_mismatch)
        if checkpoint is not None:
            load_checkpoint(self.engine, checkpoint, self.fingerprint)
            if self.identity is not None:
                self.identity = self.identity.rolled_back_to(checkpoint.folder.name)
        return checkpoint

    def save(self, state: TrainingState) -> Path:
        """Writes `global_step<iteration>` in --save, then updates `latest`. Returns its folder. Collective.

        The checkpoint is written under a temporary name and renamed when it is complete. Only then does it
        replace an existing checkpoint of the same step. Raises SaveError on the rank that cannot write, or on
        all ranks if rank 0 cannot read the folder before the save. Raises FolderTakenError on all ranks if
        the folder, or the checkpoint of this name in it, belongs to another run.
        """
        engine, folder, name = self.engine, self.folder, f"global_step{state.iteration}"
        if engine.global_rank == 0 and self.identity is None:
            self.identity = RunIdentity()
        specs = _all_specs(engine)
        info = derive_info(specs, self.vocab_size)
        try:
            saving = folder / self._begin_save(name)
            # `publish` writes `latest`: DeepSpeed would write it before the other ranks have finished their
            # files.
            extra = client_state(info, engine.run_config, asdict(state))
            engine.save_checkpoint(str(folder), tag=saving.name, client_state=extra, save_latest=False)
            dist.barrier()
            files = describe_files(saving, self.heartbeat)
            integrity_record = make_integrity_record(engine, self.vocab_size)
            run = {
                "state": asdict(state),
                "config": engine.run_config.to_dict(),
                "layout": layout_record(engine.run_config),
                "optimizer_state": _optimizer_state_record(engine.run_config),
                "stages": engine.module.stages_record(),
                "versions": {name: version(name) for name in ("torch", "deepspeed")},
                "vocab_size": self.vocab_size,
                "eod": self.eod,
                "data": self.fingerprint,
                "parameters": {name: spec_record(spec) for name, spec in specs.items()},
                "certificate": integrity_record,
                INFO_KEY: info,
                "files": files,
            }
            if lacking := missing_files(files, run):
                raise OSError(f"{lacking[0]} is missing after all ranks have written, {len(lacking)} in all")
            # If another job has taken over the folder during the save, this job must not rename.
            with errors_of_rank_0():
                self._check_owner()
            if self.identity is not None:
                run = add_checksum({**run, **self.identity.record()})
                write_json(saving / RUN_FILE, run)
                entry = LineageEntry(name, state.iteration, self.identity.run_id, run["sha256"])
                self.identity = publish(saving, entry, self.identity)
        except (OSError, RuntimeError) as error:
            if not _is_write_error(error):
                raise  # a failed collective: another rank may have died
            raise SaveError(
                f"checkpoint {folder / name} cannot be written ({error}; {_free_space_text(folder)})"
            ) from error
        self._delete_old(name, integrity_record["unequal_copies"])
        dist.barrier()
        return folder / name

    def newest_valid(self, allow_replica_mismatch: bool) -> Checkpoint | None:
        """Returns the newest checkpoint of this run that a resume would accept; None if there is none.

        allow_replica_mismatch: the value of the flag. Collective: the ranks share the reading of files.
        """
        names: list[str] = []
        with errors_of_rank_0():
            if self.identity is not None:
                try:
                    for entry in reversed(self.identity.lineage):
                        names += [entry.name] if is_same_checkpoint(self.folder, entry) else []
                except OSError as error:  # do not go back beyond an unreadable checkpoint
                    if not names:
                        raise UserError(f"checkpoint {entry.name} cannot be read now ({error})") from error
        for name in broadcast_from_rank_0(names):  # rank 0 keeps the identity
            checkpoint = _open_on_all_ranks(self.folder / name)
            good = checkpoint is not None and (allow_replica_mismatch or not mismatched_replicas(checkpoint))
            if all(gather_from_all_ranks(good)) and checkpoint is not None:
                if _find_damage(checkpoint, self.heartbeat) is None:
                    return checkpoint
        return None

    def _begin_save(self, name: str) -> str:
        """Checks that this run may write to the folder and removes leftovers of killed saves. Returns the
        temporary name of the new checkpoint. Collective."""
        saving = ""
        with errors_of_rank_0():
            if self.identity is not None:
                self._check_owner()
                options = self.engine.run_config.checkpoint
                if not (options.overwrite_checkpoints or may_replace(self.folder, name, self.identity)):
                    raise FolderTakenError(
                        f"{self.folder / name} belongs to another run, or cannot be read: it is not "
                        "overwritten without --overwrite-checkpoints. Move it away, or give another --save"
                    )
                if self.folder.is_dir():
                    clean_leftovers(self.folder)
                saving = saving_name(name, self.identity)
        return broadcast_from_rank_0(saving)

    def _check_owner(self) -> None:
        """Raises FolderTakenError if another job has taken over the folder."""
        problem = self.owner.problem() if self.owner is not None else None
        if problem is not None:
            raise FolderTakenError(problem)

    def _delete_old(self, name: str, mismatched: list[str]) -> None:
        """Deletes old checkpoints as --keep-last says, once the checkpoint `name` is complete. Collective.

        mismatched: replicas that differ in `name`. A resume rejects such a checkpoint, so the newest
        checkpoint that a resume accepts is kept as well. If there is none, nothing is deleted.
        """
        folder, options = self.folder, self.engine.run_config.checkpoint
        protected: Checkpoint | None = None
        if mismatched:
            if self.engine.global_rank == 0:
                _LOG.warning(
                    "%s: replicas on several ranks are not equal: %s", folder / name, "; ".join(mismatched)
                )
            if options.keep_last is not None:
                protected = self.newest_valid(allow_replica_mismatch=False)
                if protected is None:
                    return
        if self.identity is not None:
            kept = protected.folder.name if protected is not None else None
            try:
                delete_old_checkpoints(folder, self.identity, options, kept)
            except OSError as error:  # the other ranks wait for this rank
                _LOG.warning("%s: old checkpoints cannot be read: %s", folder, error)


def layout_record(config: Config) -> dict[str, Any]:
    """Returns the layout as `run.json` records it, for users and tools."""
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
    """Returns the precision of the moments in memory. The files always hold them in fp32."""
    return rule_record() if config.optimizer.use_bnb_optimizer else {"bits": 32}


def _all_specs(engine: GPTEngine) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter of the model, by name. Collective."""
    own = {name: spec_of(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: spec for specs in gather_from_all_ranks(own) for name, spec in specs.items()}


def _is_write_error(error: OSError | RuntimeError) -> bool:
    """Returns whether a write failed. torch.save then raises a RuntimeError that names its C++ source."""
    return isinstance(error, OSError) or "inline_container" in str(error) or "PytorchStream" in str(error)


def _free_space_text(folder: Path) -> str:
    """Describes the free space on a folder's disk: PyTorch's errors do not say that a disk is full."""
    try:
        free = shutil.disk_usage(folder).free
        return f"{free / 1e6:,.1f} MB are free there" if free else "the disk is full"
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"


@stop_at_access_error(MAY_BE_INTACT)
def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[Check]:
    """Restores weights, master weights, moments, step and loss scale from a checkpoint of any layout,
    precision and partition. Moments start fresh with --finetune, with --no-load-optim, and with a different
    kind of optimizer. Returns the lines of the checkpoint verification. Collective.

    Raises UserError on every rank if a restored tensor differs from the saved one.
    """
    now = engine.run_config
    reader = open_reader(checkpoint)
    same_precision = not checkpoint.is_external and checkpoint.config.precision.name == now.precision.name
    with_moments = not checkpoint.no_optimizer and reader.moments_kind == now.optimizer.moments_kind
    unquantized = UnquantizedDigests()
    engine.optimizer.load_by_name(
        reader.read_parameter,
        reader.loss_scaler if same_precision and not checkpoint.no_optimizer else None,
        with_moments,
        unquantized.add,
    )
    return [
        *verify_loaded_state(engine, checkpoint, with_moments, unquantized),
        Check("data", data_line(checkpoint, fingerprint)),
        Check("learning rate", schedule_line(checkpoint, now)),
        Check("random state", "computed from seed, iteration and global coordinates: nothing to restore"),
    ]
