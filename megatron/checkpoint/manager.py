"""Saves checkpoints, and resumes from them on any layout.

A checkpoint is a folder `global_step<N>` with DeepSpeed's files and, written last, `run.json`: progress,
configuration, vocabulary, layout and data of the run. The file `latest` beside the folders names the newest
checkpoint. No random state is saved: dropout and initial weights are functions of the seed and of global
sample numbers, and the learning rate is a function of the iteration.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.compatibility import data_line, mismatched_replicas, schedule_line
from megatron.checkpoint.digests import PartDigests, combined, piece_digests
from megatron.checkpoint.files import (
    MAY_BE_INTACT,
    Files,
    add_checksum,
    write_problem,
)
from megatron.checkpoint.folders.of_run import FILE_SYSTEM, Folders
from megatron.checkpoint.formats.native_writer import NativeWriter
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.writing import CheckpointWriter
from megatron.checkpoint.integrity import (
    Check,
    integrity_record,
    make_integrity_record,
    verification_table,
    verify_loaded_state,
    why_new_moments,
)
from megatron.checkpoint.lineage.identity import LineageEntry, RunIdentity
from megatron.checkpoint.lineage.owner import FolderOwner
from megatron.checkpoint.lineage.start import may_replace, start_identity
from megatron.checkpoint.local.saves import LocalCheckpoints
from megatron.checkpoint.local.start import fetch_files
from megatron.checkpoint.names import INTEGRITY_KEY
from megatron.checkpoint.ranks import FolderTakenError, errors_of_all_ranks, errors_of_rank_0
from megatron.checkpoint.record import RUN_FILE, Checkpoint, TrainingState, describe_start
from megatron.checkpoint.saving.background import (
    BackgroundSave,
    BackgroundSaves,
    DirectFiles,
    RankResult,
    SaveOutcome,
    problem_in,
)
from megatron.checkpoint.saving.publishing import (
    is_same_checkpoint,
    saving_name,
    with_final_names,
)
from megatron.checkpoint.saving.run_record import all_specs, run_record
from megatron.checkpoint.selection import find_damage, open_on_all_ranks
from megatron.checkpoint.upcycling import Upcycling, source_config
from megatron.config import Config
from megatron.config.registries import SAVE_FORMATS
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError, one_line, stop_at_access_error
from megatron.files import write_json
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks

_LOG = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint cannot be written. Earlier complete checkpoints are not affected."""


class CheckpointManager:
    """Starts a run from a checkpoint, saves its checkpoints to --save, and rolls it back to them.

    folder: --save, or any folder if the run does not save. owner: the ownership of the folder, on rank 0;
    None if no other job can write to the folder. heartbeat: called after each file that is read or synced.
    store: the ranks' key-value store, for saves in the background; None for a single process. local: the
    local checkpoints; None without --save-local. folders: the folders of the run, on disk or in an object
    store.
    """

    def __init__(
        self,
        engine: GPTEngine,
        folder: str | Path,
        owner: FolderOwner | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        store: dist.Store | None = None,
        local: LocalCheckpoints | None = None,
        folders: Folders = FILE_SYSTEM,
    ) -> None:
        self.engine = engine
        self.folders = folders
        self.save_folder = folders.folder(str(folder))
        self.folder = self.save_folder.path
        self.owner = owner
        self.heartbeat = heartbeat
        # The run of the next checkpoint. Only rank 0 has it, once the run has started or saved.
        self.identity: RunIdentity | None = None
        store = dist.HashStore() if store is None else dist.PrefixStore("checkpoints", store)
        self.background = BackgroundSaves(engine, store, heartbeat)
        self.local = local
        # True if the run started from a local checkpoint that is newer than every checkpoint in --save.
        self.started_from_local = False
        self._deletion: threading.Thread | None = None
        self._writer: type[CheckpointWriter] = SAVE_FORMATS.load(engine.run.config.checkpoint.save_format)

    def ownership_lost_reason(self) -> str | None:
        """Returns why this run no longer owns --save, as the last heartbeat found; None while it does."""
        return self.owner.lost_reason if self.owner is not None else None

    def restore_or_init(
        self, checkpoint: Checkpoint | None, print_fn: Callable[[str], object]
    ) -> TrainingState:
        """Loads the checkpoint, or keeps the initial weights. Returns the training state. Collective."""
        options = self.engine.run.config.checkpoint
        if checkpoint is not None and checkpoint.is_local and self.local is not None:
            self.started_from_local = True
            copied = fetch_files(checkpoint, self.local, self.engine, self.heartbeat)
            checkpoint = replace(checkpoint, unverified_note=copied)
        print_fn(describe_start(checkpoint, options.load))
        with errors_of_rank_0(f"--save {options.save}"):
            if self.engine.global_rank == 0:
                self.identity = start_identity(checkpoint, options, self.folders.at)
        if self.owner is not None and self.identity is not None:
            self.owner.set_run_id(self.identity.run_id)
        if (options.async_save or self.local is not None) and not self.engine.run.config.training.no_train:
            # The writer's memory is allocated now, because the first save reports a failure only in the log.
            self.background.start_writer()
        if checkpoint is None:
            return TrainingState()
        print_fn(verification_table(self._load(checkpoint)))
        return checkpoint.start_state

    def _load(self, checkpoint: Checkpoint) -> list[Check]:
        with self.folders.fetched(checkpoint, self.engine, self.heartbeat) as fetched:
            return load_checkpoint(self.engine, fetched, self.engine.run.fingerprint)

    def rollback(self) -> Checkpoint | None:
        """Loads and returns the run's newest valid checkpoint; None if there is none yet. Collective."""
        self.finish_save()
        checkpoint = self.newest_valid(self.engine.run.config.checkpoint.allow_replica_mismatch)
        if checkpoint is not None:
            with errors_of_rank_0():
                if self.local is not None and self.engine.global_rank == 0:
                    self.check_owner()
                    self.local.set_entries(())  # local checkpoints of the iterations that are given up
            self._load(checkpoint)
            if self.identity is not None:
                self.identity = self.identity.rolled_back_to(checkpoint.folder.name)
        return checkpoint

    def save(self, state: TrainingState, in_background: bool = False) -> Path | None:
        """Writes `global_step<iteration>` in --save and updates `latest`. Returns the folder. Collective.

        The checkpoint is written under a temporary name and renamed when it is complete. Only then does it
        replace an existing checkpoint of the same step. Raises SaveError on the rank that cannot write, or on
        all ranks if rank 0 cannot read the folder before the save. Raises FolderTakenError on all ranks if
        the folder, or the checkpoint of this name in it, belongs to another run.

        in_background: return None once the state is copied. The outcome, which may be a failure, is then one
        of `background.take_outcomes`. A save first waits for the save in flight. After a failed save, the
        next one is not in the background.
        """
        self.finish_save()  # also waits until old checkpoints are deleted
        in_background = in_background and not self.background.last_has_failed
        self.background.last_has_failed = False
        engine, folder, name = self.engine, self.folder, f"global_step{state.iteration}"
        started = time.monotonic()
        if engine.global_rank == 0 and self.identity is None:
            self.identity = RunIdentity()
        run = run_record(self.engine, self._specs, state)
        try:
            writer = self._writer(self.save_folder.staging(self._begin_save(name)))
            if in_background:
                self.background.start(
                    BackgroundSave(
                        state,
                        run,
                        started,
                        writer,
                        folder / name,
                        self._complete,
                        before_report=self._upload,
                    )
                )
                return None
            files = DirectFiles(self.heartbeat)
            table = writer.write(engine, run, files)
            self.save_folder.upload(writer.folder, files.files, lambda count: self.heartbeat())
            of_ranks = gather_from_all_ranks((files.files, table))
            run[INTEGRITY_KEY] = make_integrity_record(engine)
            # If another job has taken over the folder during the save, this job must not rename.
            with errors_of_rank_0():
                self.check_owner()
            self._publish(writer, state, run, of_ranks)
        except (OSError, RuntimeError) as error:
            # torch.save raises a RuntimeError that names its C++ source.
            is_write = any(name in str(error) for name in ("inline_container", "PytorchStream"))
            if not (is_write or isinstance(error, OSError)):
                raise  # a failed collective: another rank may have died
            why = with_final_names(write_problem(error))
            why += self.save_folder.note_on_space(why)
            raise SaveError(f"checkpoint {folder / name} cannot be written ({why})") from error
        self._delete_old(name, run[INTEGRITY_KEY]["unequal_copies"])
        dist.barrier()
        return folder / name

    @cached_property
    def _specs(self) -> dict[str, ParameterSpec]:
        """The spec of every parameter of the model, by name. Collective at the first use."""
        return all_specs(self.engine)

    def _publish(
        self,
        writer: CheckpointWriter,
        state: TrainingState,
        run: dict[str, Any],
        of_ranks: Sequence[tuple[Files, Any]],
    ) -> Files:
        """Writes `run.json` and gives the checkpoint its name, on rank 0. Returns all files. of_ranks: each
        rank's files and table (see `CheckpointWriter`). Raises OSError on every rank if a file is missing."""
        saving = writer.folder
        run, files = self._with_files(writer, run, of_ranks)
        if self.identity is not None:
            of_rank_0 = files.keys() - {name for own, _ in of_ranks for name in own}
            self.save_folder.upload(saving, of_rank_0, lambda count: None)
            if problem := self.save_folder.size_mismatch(saving, files):
                raise OSError(f"{problem}, after all ranks have written")
            write_json(saving / RUN_FILE, run)
            name = f"global_step{state.iteration}"
            entry = LineageEntry(name, state.iteration, self.identity.run_id, run["sha256"])
            self.identity = self.save_folder.publish(saving, entry, self.identity, self.check_owner)
        return files

    def _upload(self, save: BackgroundSave, files: Files, problem: str) -> str:
        """Uploads the files that this rank has written. Returns the first problem; "" if there is none. Runs
        in a thread."""
        try:
            if not problem:
                self.save_folder.upload(save.saving, files, save.count_bytes)
        except OSError as error:
            problem = str(error)
        return problem

    def _with_files(
        self, writer: CheckpointWriter, run: dict[str, Any], of_ranks: Sequence[tuple[Files, Any]]
    ) -> tuple[dict[str, Any], Files]:
        """Returns the complete content of `run.json` (on rank 0) and the files of all ranks. Raises OSError
        if a file is missing."""
        files = {name: record for own, _ in of_ranks for name, record in sorted(own.items())}
        tables = [table for _, table in of_ranks]
        if lacking := writer.missing(run, files, tables):
            raise OSError(f"{lacking[0]} is missing after all ranks have written, {len(lacking)} in all")
        if self.identity is not None:
            run = writer.finish({**run, "files": files, **self.identity.record()}, tables)
            run, files = add_checksum(run), run["files"]
        return run, files

    # --- saves in the background ---

    def finish_save(self, waits_for_deletion: bool = True) -> SaveOutcome | None:
        """Waits for the save in flight and for the deletion of old checkpoints. Returns how the save ended,
        on all ranks; None if no save was in flight. Collective."""
        outcome = self.background.finish()
        if outcome is not None and outcome.mismatched:
            self._delete_old(outcome.folder.name, list(outcome.mismatched))
        while waits_for_deletion and self._deletion is not None and self._deletion.is_alive():
            self._deletion.join(1.0)
            self.heartbeat()
        return outcome

    def _complete(self, save: BackgroundSave, results: list[RankResult]) -> SaveOutcome:
        """Completes the checkpoint on rank 0. Returns a failure as an outcome, because the other ranks
        train."""
        if problem := problem_in(results):
            return save.ended(problem)
        record = _record_of(save, results, self.engine.run.config)
        try:
            self.check_owner()
            run = {**save.run, INTEGRITY_KEY: record}
            of_ranks = [(result.files, result.table) for result in results]
            files = self._publish(save.writer, save.state, run, of_ranks)
        except (OSError, UserError, FolderTakenError) as error:
            return save.ended(str(error))
        mismatched = tuple(record["unequal_copies"])
        if not mismatched:  # otherwise `finish_save` and all ranks find the checkpoint that must be kept
            self._delete_in_background(None)
        return save.ended("", files, mismatched)

    def save_local(self, state: TrainingState) -> bool:
        """Begins to save to --save-local, always in the background. Returns False if it skips this save
        because the previous one is still in flight. Collective.

        A failure is one of `background.take_outcomes`. It does not affect the saves to --save.
        """
        assert self.local is not None
        if self.background.in_flight is not None:
            if not broadcast_from_rank_0(self.background.in_flight.has_ended.is_set()):
                self.local.num_left_out += 1
                return False
            self.finish_save(waits_for_deletion=False)
        name = f"global_step{state.iteration}"
        started, saving = time.monotonic(), ""
        if self.engine.global_rank == 0:
            self.identity = self.identity or RunIdentity()
            saving = saving_name(name)
        run = run_record(self.engine, self._specs, state)
        save = BackgroundSave(
            state,
            run,
            started,
            NativeWriter(self.local.begin(saving)),
            self.local.folder / name,
            self._complete_local,
            is_local=True,
            before_report=self.local.mirror,
            after_report=self.local.follow,
        )
        self.background.start(save)
        return True

    def _complete_local(self, save: BackgroundSave, results: list[RankResult]) -> SaveOutcome:
        """Completes a local checkpoint on all nodes, or abandons it on all nodes. Runs on rank 0."""
        assert self.local is not None
        problem = problem_in(results)
        run: dict[str, Any] | None = None
        files: Files = {}
        try:
            if not problem:
                self.check_owner()
                run, files = self._with_files(
                    save.writer,
                    {**save.run, INTEGRITY_KEY: _record_of(save, results, self.engine.run.config)},
                    [(result.files, result.table) for result in results],
                )
                if unequal := run[INTEGRITY_KEY]["unequal_copies"]:
                    run, problem = None, f"replicas on several ranks are not equal: {'; '.join(unequal)}"
        except Exception as error:  # of any kind: the other nodes wait for the decision
            run, problem = None, one_line(error)
        try:
            failed = self.local.commit(save.saving, run)
        except OSError as error:
            failed = str(error)
        return save.ended(problem or failed, files)

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
                except OSError as error:  # an older checkpoint than the unreadable one must not be used
                    if not names:
                        raise UserError(f"checkpoint {entry.name} cannot be read now ({error})") from error
        for name in broadcast_from_rank_0(names):  # only rank 0 has the identity
            checkpoint = open_on_all_ranks(self.folder / name, self.folders)
            if checkpoint is None or (mismatched_replicas(checkpoint) and not allow_replica_mismatch):
                continue
            if find_damage(checkpoint, self.heartbeat, self.folders) is None:
                return checkpoint
        return None

    def _begin_save(self, name: str) -> str:
        """Checks that this run may write to the folder, and removes what killed saves left behind. Returns
        the temporary name of the new checkpoint. Collective."""
        saving = ""
        with errors_of_rank_0():
            if self.identity is not None:
                self.check_owner()
                options = self.engine.run.config.checkpoint
                if not (options.overwrite_checkpoints or may_replace(self.folder, name, self.identity)):
                    raise FolderTakenError(
                        f"{self.folder / name} belongs to another run, or cannot be read: it is not "
                        "overwritten without --overwrite-checkpoints. Move it away, or give another --save"
                    )
                saving = saving_name(name)
                self.save_folder.begin(saving)
        return broadcast_from_rank_0(saving)

    def check_owner(self) -> None:
        """Raises FolderTakenError if another job has taken over the folder."""
        problem = self.owner.problem() if self.owner is not None else None
        if problem is not None:
            raise FolderTakenError(problem)

    def _delete_old(self, name: str, mismatched: list[str]) -> None:
        """Deletes old checkpoints as --keep-last says, once the checkpoint `name` is complete. Collective.

        mismatched: the replicas that differ in the checkpoint `name`. A resume rejects such a checkpoint, so
        the newest checkpoint that a resume accepts is kept as well. If none is accepted, nothing is deleted.
        """
        protected: Checkpoint | None = None
        if mismatched:
            if self.engine.global_rank == 0:
                _LOG.warning(
                    "%s: replicas on several ranks are not equal: %s",
                    self.folder / name,
                    "; ".join(mismatched),
                )
            if self.engine.run.config.checkpoint.keep_last is not None:
                protected = self.newest_valid(allow_replica_mismatch=False)
                if protected is None:
                    return
        self._delete_in_background(protected.folder.name if protected is not None else None)

    def _delete_in_background(self, protected: str | None) -> None:
        """Starts to delete old checkpoints, on rank 0, in a thread: terabytes take minutes. protected: the
        name of a checkpoint to keep; None if there is none."""
        if self.identity is not None and self.engine.run.config.checkpoint.keep_last is not None:
            self._deletion = threading.Thread(
                target=self.save_folder.delete_old,
                args=(self.identity, self.engine.run.config.checkpoint, protected),
                name="deletion of checkpoints",
            )
            self._deletion.start()


def _record_of(save: BackgroundSave, results: Sequence[RankResult], config: Config) -> dict[str, Any]:
    """Returns the integrity record of a save in the background."""
    digests = combined([result.digests for result in results])
    return integrity_record(digests, save.canary_loss, config)


@stop_at_access_error(MAY_BE_INTACT)
def load_checkpoint(engine: GPTEngine, checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> list[Check]:
    """Restores weights, master weights, moments, step and loss scale from a checkpoint of any layout,
    precision and pipeline partition. The moments start at 0 with --finetune, with --no-load-optim, and with a
    different kind of optimizer. Returns the lines of the checkpoint verification. Collective.

    Raises UserError on every rank if a restored tensor differs from the saved one.
    """
    now = engine.run.config
    reader = open_reader(checkpoint)
    same_precision = not checkpoint.is_external and checkpoint.config.precision.name == now.precision.name
    new_moments = why_new_moments(reader, now.optimizer)
    unquantized: PartDigests = {}

    def add_unquantized(piece: Piece) -> None:
        unquantized.setdefault(piece.name, {}).update(piece_digests(piece))

    with errors_of_all_ranks():
        keeps_scale = same_precision and not checkpoint.no_optimizer and now.precision.fp16
        scale = reader.loss_scaler if keeps_scale else None
        read = reader.read_parameter
        if source_config(reader, now) is not now:
            read = Upcycling(reader, engine.run).read_parameter
        engine.optimizer.read_by_name(read, scale, not new_moments, add_unquantized)
    with errors_of_all_ranks():
        engine.optimizer.exchange_loaded()
    return [
        *verify_loaded_state(engine, checkpoint, new_moments, unquantized),
        Check("data", data_line(checkpoint, fingerprint)),
        Check("learning rate", schedule_line(checkpoint, now)),
        Check("random state", "computed from seed, iteration and global coordinates: nothing to restore"),
    ]
