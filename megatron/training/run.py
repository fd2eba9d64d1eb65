"""Executes a run from its configuration to its end: layout, model, data, training."""

import importlib.util
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import Store

from megatron.arguments.data_checks import check_index_memory, host_memory_bytes
from megatron.checkpoint import selection
from megatron.checkpoint.compatibility import starting_from
from megatron.checkpoint.folders.of_run import Folders, open_folders
from megatron.checkpoint.lineage import owner, start
from megatron.checkpoint.local.saves import LocalCheckpoints
from megatron.checkpoint.local.start import select_checkpoint
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.ranks import errors_of_rank_0
from megatron.checkpoint.record import Checkpoint
from megatron.checkpoint.saving.run_record import check_sharding
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
from megatron.engine.device_progress import flight_record, waiting_status
from megatron.errors import printable
from megatron.files import open_own, open_stream
from megatron.mpu.parameters import initial_values
from megatron.mpu.world import broadcast_from_rank_0
from megatron.object_store.store import is_url
from megatron.optimizer.batch_schedule import RunLength
from megatron.run import PredictMemory, Run
from megatron.training.build import build_engine, build_trainer, find_stages, new_run, zeros
from megatron.training.data import data_report, index_notes
from megatron.training.free_space import check_free_space
from megatron.training.harness.live import load_tasks
from megatron.training.out_of_memory import explained_out_of_memory
from megatron.training.profiler import check_profile
from megatron.training.run_report import run_report, start_notes
from megatron.training.trainer import make_metrics


def run(
    config: Config,
    notes: list[str],
    watchdog: Watchdog,
    on_exit: ExitStack,
    preparation: Preparation,
    predict_memory: PredictMemory,
) -> ExitStatus:
    """Executes a training or an evaluation. Returns its exit status.

    notes: sentences about the flags, for the start of the log. on_exit: stack that the caller closes when the
    run has ended or failed. preparation: has begun already; `run` ends it before the processes connect.
    predict_memory: function for --partition-method memory.
    """
    node = node_name(os.environ)
    folders = on_exit.enter_context(open_folders(config.checkpoint, node))
    found = _find_inputs(new_run(config, predict_memory), folders, on_exit)
    preparation.end()
    on_exit.enter_context(explained_out_of_memory())
    rank, store = _connect(config, watchdog)
    run = found.with_stamp()  # the stamp was written by the first process of the node
    with watchdog.phase(Phase.PREFLIGHT):
        fingerprint = run.fingerprint_at(broadcast_from_rank_0(run.start))
        fp8 = config.precision.fp8_recipe is not None
        notes = [*notes, *check_kernels(config.training.require_kernels, fp8)]
        notes += preflight(config, fingerprint)
        notes += check_attention(config) + processes.device_notes(config)
    with watchdog.phase(Phase.LOAD):
        folders.connect(node)
        local = None
        if config.checkpoint.save_local:
            local = LocalCheckpoints.connect(config.checkpoint, node, store)
            notes += local.notes()
        checkpoint = select_checkpoint(found.checkpoint, local, run, watchdog.heartbeat, folders)
        run = starting_from(checkpoint, run)
        check_profile(run)
        with errors_of_rank_0():
            if rank == 0:
                found.plan_data(run)  # again, for an older or a local checkpoint
        run.fingerprint  # noqa: B018 - all ranks compute it now, before a collective needs it
    notes += found.notes
    run = run.connected(rank)
    metrics = make_metrics(run)
    notes += start_notes(checkpoint, run)
    context = {"cp_rank": run.mesh.cp.rank} if run.mesh.cp_size > 1 else {}
    watchdog.report.note(stage=run.mesh.pp.rank, **context)
    run = find_stages(run, predict_memory)
    notes += check_free_space(run, local)
    metrics.print(run_report(run, notes, run.lr_schedule.describe()))
    metrics.print(f"\n{found.data_table}")
    on_exit.enter_context(explained_out_of_memory(config, run.mesh.pp.rank))
    engine = build_engine(run, initial_values if checkpoint is None else zeros)
    checkpoints = CheckpointManager(
        engine, config.checkpoint.save or "", found.folder_owner, watchdog.heartbeat, store, local, folders
    )
    trainer = build_trainer(engine, checkpoints, metrics, watchdog, found.tasks)
    with watchdog.phase(Phase.LOAD):
        check_sharding(engine)
        state = checkpoints.restore_or_init(checkpoint, metrics.print)
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
    """The inputs that a process has read before the processes connect. Rank 0 and the first process of each
    node verify the token files. Only rank 0 reads all other inputs."""

    run: Run
    """The run. On rank 0 it starts from `checkpoint`. It has the stamp of the token files if this process has
    verified them."""
    length: RunLength | None = None
    """The length of the run for which `data_table` and `notes` were made."""
    data_table: str = ""
    notes: list[str] = field(default_factory=list)
    folder_owner: owner.FolderOwner | None = None
    """The owner of the folder --save."""
    checkpoint: Checkpoint | None = None
    tasks: Any = None
    """The tasks of --eval-harness-tasks."""

    def with_stamp(self) -> Run:
        """Returns the run with the stamp that the first process of the node has written."""
        return self.run if self.run.stamp else self.run.with_stamp(IndexStamp(self.run.config.data))

    def plan_data(self, run: Run) -> None:
        """Sets `data_table` and `notes` to a description of the data that the run reads. Raises ConfigError
        if it cannot read them."""
        if self.length == run.length:
            return
        check_index_memory(run.config, run.length, host_memory_bytes())
        self.length, self.data_table, self.notes = run.length, data_report(run), index_notes(run)


def _find_inputs(run: Run, folders: Folders, on_exit: ExitStack) -> _Inputs:
    """Reads the inputs of this process, and creates the output folders. Rank 0 owns --save until `on_exit` is
    closed."""
    config = run.config
    if config.parallel.local_rank == 0 or is_main_process():  # rank 0 may have any local rank
        with announce_errors():
            stamp = verify_token_files(config.data)
            stamp.write()
            run = run.with_stamp(stamp)
    is_remote = any(is_url(folder or "") for folder in (config.checkpoint.load, config.checkpoint.save))
    if is_main_process() and not is_remote:
        with announce_errors():
            start.check_load_folder(config)
    make_output_folders(config)
    found = _Inputs(run)
    if not is_main_process():
        return found
    owned = None if config.training.no_train else config.checkpoint.save
    with announce_errors():
        claims = folders.folder(owned).claims() if owned else None
        found.folder_owner = on_exit.enter_context(owner.hold_folder(claims, node_name(os.environ), _print))
        folders.read()
        if is_remote:
            start.check_load_folder(config, folders.at)
        found.checkpoint = selection.find_checkpoint(run, path_of=folders.at)
        found.run = run = starting_from(found.checkpoint, run)
        run.fingerprint  # noqa: B018 - for its errors
        found.plan_data(run)
        run.lr_schedule  # noqa: B018 - for its errors
        found.tasks = load_tasks(config)
    return found


def _print(line: str) -> None:
    print(printable(line), flush=True)


def _connect(config: Config, watchdog: Watchdog) -> tuple[int, Store]:
    """Connects the processes and creates their process group. Returns the global rank and the store. The
    watchdog starts as soon as all processes are connected, because from then on all ranks would wait for a
    rank that dies."""
    store = processes.connect(config)
    watchdog.start(config.training.hang_timeout, config.training.compile)
    with watchdog.phase(Phase.PREFLIGHT):
        rank = processes.init_distributed(config, store)
    watchdog.set_device_entries(waiting_status, flight_record)
    return rank, store


def make_output_folders(config: Config) -> None:
    """Creates --save and --save-local and, on rank 0, the folders of its logs. Raises ConfigError if a folder
    is not writable, or if --wandb-project is set without wandb."""
    if config.checkpoint.save and not is_url(config.checkpoint.save):
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
            # Only the logger opens devices and pipes, because closing a pipe would end its reader.
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
