"""A run, from its configuration to its end: layout, model, data, training."""

import importlib.util
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.distributed import Store

from megatron.arguments.data_checks import check_index_memory, host_memory_bytes
from megatron.checkpoint import selection
from megatron.checkpoint.compatibility import resumed_schedule, start_of
from megatron.checkpoint.lineage import owner, start
from megatron.checkpoint.local.saves import LocalCheckpoints
from megatron.checkpoint.local.start import select_checkpoint
from megatron.checkpoint.object_store.checkpoints import ObjectCheckpoints, open_object_checkpoints
from megatron.checkpoint.ranks import errors_of_rank_0
from megatron.checkpoint.record import Checkpoint
from megatron.cluster import processes
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.launch import node_name
from megatron.cluster.preflight import check_attention, check_kernels, preflight
from megatron.cluster.processes import is_main_process
from megatron.cluster.rendezvous import Preparation, announce_errors
from megatron.cluster.watchdog import Phase, Watchdog
from megatron.config import Config, ConfigError
from megatron.data.index_stamp import IndexStamp
from megatron.data.splits import verify_token_files
from megatron.data.vocabulary import Vocabulary
from megatron.engine.device_progress import flight_record, waiting_facts
from megatron.errors import printable
from megatron.files import open_own, open_stream
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameters import initial_values
from megatron.mpu.world import broadcast_from_rank_0
from megatron.optimizer.batch_schedule import BatchSchedule, RunLength
from megatron.training.build import Setup, build_engine, build_trainer, find_stages, zeros
from megatron.training.data import data_report, index_notes, open_data, run_fingerprint
from megatron.training.free_space import check_free_space
from megatron.training.harness.live import load_tasks
from megatron.training.out_of_memory import explained_out_of_memory
from megatron.training.run_report import run_report, start_notes
from megatron.training.trainer import make_metrics


def run(
    config: Config, notes: list[str], watchdog: Watchdog, on_exit: ExitStack, preparation: Preparation
) -> ExitStatus:
    """Runs a training or an evaluation. Returns how it ended.

    notes: sentences about the flags, for the start of the log. on_exit: closed by the caller when the run has
    ended or failed. preparation: already begun; `run` ends it before the processes connect.
    """
    node = node_name(os.environ)
    objects = on_exit.enter_context(open_object_checkpoints(config.checkpoint, node))
    if objects is not None:
        config = replace(config, checkpoint=objects.options)
    setup = Setup.from_config(config)
    vocab, plan = setup.vocab, setup.plan
    found = _find_inputs(config, vocab, objects, on_exit)
    preparation.end()
    on_exit.enter_context(explained_out_of_memory())
    rank, store = _connect(config, watchdog)
    stamp = found.stamp or IndexStamp(config.data)  # the first process of the node has written it
    fingerprint_at = found.fingerprint_at or _fingerprints(config, vocab, stamp)
    with watchdog.phase(Phase.PREFLIGHT):
        fingerprint = fingerprint_at(broadcast_from_rank_0(start_of(found.checkpoint)))
        notes = [*notes, *check_kernels(config.training.require_kernels), *preflight(config, fingerprint)]
        notes += check_attention(config) + processes.device_notes(config)
    with watchdog.phase(Phase.LOAD):
        if objects is not None:
            objects.connect(node)
        local = None
        if config.checkpoint.save_local:
            local = LocalCheckpoints.connect(config.checkpoint, node, store)
            notes += local.notes()
        checkpoint = select_checkpoint(
            found.checkpoint, local, config, vocab.size, fingerprint_at, watchdog.heartbeat, objects
        )
        length = RunLength.from_config(config, start_of(checkpoint))
        with errors_of_rank_0():
            if rank == 0:
                found.plan_data(config, length)  # again, if it is an older or a local checkpoint
    notes += found.notes
    lr_schedule, metrics = resumed_schedule(checkpoint, config), make_metrics(config, vocab.size, rank)
    notes += start_notes(checkpoint, config, lr_schedule)
    mesh = Mesh.from_config(config.parallel, rank).connect()
    context = {"cp_rank": mesh.cp.rank} if mesh.cp_size > 1 else {}
    watchdog.report.note(stage=mesh.pp.rank, **context)
    plan = plan or find_stages(config, mesh, vocab)
    notes += check_free_space(config, plan.total_parameters, start_of(checkpoint), length.iterations, local)
    metrics.print(run_report(config, plan, vocab.size, notes, lr_schedule.describe()))
    metrics.print(f"\n{found.data_table}")
    on_exit.enter_context(explained_out_of_memory(config, mesh.pp.rank))
    values = initial_values if checkpoint is None else zeros
    engine = build_engine(config, mesh, vocab, plan.bounds, values)
    trainer = build_trainer(
        config,
        engine,
        vocab,
        length,
        BatchSchedule.from_config(config.batch),
        lr_schedule,
        metrics,
        watchdog,
        fingerprint=fingerprint_at(start_of(checkpoint)),
        owner=found.folder_owner,
        store=store,
        local=local,
        objects=objects,
        tasks=found.tasks,
        data=partial(open_data, stamp=stamp),
    )
    with watchdog.phase(Phase.LOAD):
        state = trainer.checkpoints.restore_or_init(checkpoint, metrics.print)
    try:
        state = trainer.train(state)
        trainer.evaluate_at_end(state)
        trainer.check_updates(state)
    finally:
        metrics.close()
    processes.destroy_distributed()
    watchdog.stop()
    return trainer.exit_status


@dataclass
class _Inputs:
    """What a process has read before the processes connect. Rank 0 and the first process of each node verify
    the token files; rank 0 reads the other inputs."""

    stamp: IndexStamp | None = None
    """Of the token files, of a process that has verified them."""
    fingerprint_at: selection.FingerprintAt | None = None
    length: RunLength | None = None
    """Of the run, for which `data_table` and `notes` were made."""
    data_table: str = ""
    notes: list[str] = field(default_factory=list)
    folder_owner: owner.FolderOwner | None = None
    """Of --save."""
    checkpoint: Checkpoint | None = None
    tasks: Any = None
    """Of --eval-harness-tasks."""

    def plan_data(self, config: Config, length: RunLength) -> None:
        """Describes the data that a run of this length reads. Raises ConfigError if it cannot read them."""
        if self.length == length:
            return
        assert self.stamp is not None
        check_index_memory(config, length, host_memory_bytes())
        self.length = length
        self.data_table = data_report(config, length, self.stamp)
        self.notes = index_notes(config, length, self.stamp)


def _find_inputs(
    config: Config, vocab: Vocabulary, objects: ObjectCheckpoints | None, on_exit: ExitStack
) -> _Inputs:
    """Reads the inputs of this process, and makes the output folders. Rank 0 takes over --save until
    `on_exit` is closed."""
    found = _Inputs()
    if config.parallel.local_rank == 0 or is_main_process():  # a launcher may give rank 0 any local rank
        with announce_errors():
            found.stamp = verify_token_files(config.data)
            found.stamp.write()
    if is_main_process() and objects is None:
        with announce_errors():
            start.check_load_folder(config)
    make_output_folders(config)
    if not is_main_process():
        return found
    assert found.stamp is not None
    found.fingerprint_at = _fingerprints(config, vocab, found.stamp)
    owned = None if config.training.no_train else config.checkpoint.save
    with announce_errors():
        claims = owner.ClaimFolder(Path(owned)) if owned else None
        if objects is not None and owned:
            claims = objects.claims(owned)
        found.folder_owner = on_exit.enter_context(owner.hold_folder(claims, node_name(os.environ), _print))
        if objects is not None:
            objects.read()
            start.check_load_folder(config)
        found.checkpoint = selection.find_checkpoint(config, vocab.size, found.fingerprint_at)
        consumed = start_of(found.checkpoint)
        found.fingerprint_at(consumed)
        found.plan_data(config, RunLength.from_config(config, consumed))
        resumed_schedule(found.checkpoint, config)  # for its errors
        found.tasks = load_tasks(config)
    return found


def _fingerprints(config: Config, vocab: Vocabulary, stamp: IndexStamp) -> selection.FingerprintAt:
    return cache(partial(run_fingerprint, config, vocabulary=vocab, stamp=stamp))


def _print(line: str) -> None:
    print(printable(line), flush=True)


def _connect(config: Config, watchdog: Watchdog) -> tuple[int, Store]:
    """Connects the processes and creates their process group. Returns the global rank and the store. The
    watchdog starts as soon as all processes are connected: from then on, other ranks wait for a rank that
    dies."""
    store = processes.connect(config)
    watchdog.start(config.training.hang_timeout, config.training.compile)
    with watchdog.phase(Phase.PREFLIGHT):
        rank = processes.init_distributed(config, store)
    watchdog.set_device_facts(waiting_facts, flight_record)
    return rank, store


def make_output_folders(config: Config) -> None:
    """Creates --save and --save-local and, on rank 0, the folders of its logs. Raises ConfigError if a folder
    is not writable, or if --wandb-project is set without wandb."""
    if config.checkpoint.save:
        _make_writable("--save", config.checkpoint.save)
    if config.checkpoint.save_local:
        node = node_name(os.environ)
        _make_writable(f"node {node}: --save-local", config.checkpoint.local_folder(node))
    if not is_main_process():
        return
    logging, parallel = config.logging, config.parallel
    if logging.tensorboard_dir:
        _make_writable("--tensorboard-dir", logging.tensorboard_dir)
    for option, file in (
        ("--partition-profile", parallel.partition_profile),
        ("--network-figures", parallel.network_figures),
    ):
        if file:
            _make_writable(option, os.path.dirname(file) or ".")
            if os.path.isdir(file):
                raise ConfigError(f"{option} {file} is a folder: set a file")
    if logging.log_path:
        try:
            os.makedirs(os.path.dirname(logging.log_path) or ".", exist_ok=True)
            # Streams are opened only by the logger: closing a pipe would end its reader.
            if open_stream(Path(logging.log_path)) is None:
                os.close(open_own(logging.log_path, os.O_APPEND))
        except OSError as error:
            raise ConfigError(
                f"--log-path {logging.log_path} cannot be written ({error.strerror}): set another file"
            ) from error
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"--wandb-project {logging.wandb_project}: wandb is not installed: pip install wandb, or "
            "remove the flag"
        )


def _make_writable(option: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} cannot be created ({error.strerror}): set another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} is not writable for this user: set another folder")
