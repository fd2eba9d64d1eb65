"""A run, from its configuration to its end: layout, model, data, training."""

import os
from contextlib import ExitStack

from deepspeed.accelerator import get_accelerator

from megatron.checkpoint import manager
from megatron.checkpoint.compatibility import resumed_schedule
from megatron.checkpoint.lineage import owner, start
from megatron.cluster import processes
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.hang_detector import Phase
from megatron.cluster.launch import node_name
from megatron.cluster.preflight import check_kernels, preflight
from megatron.cluster.preparation import Preparation
from megatron.cluster.rendezvous import announce_errors
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config
from megatron.config.batch import BatchSchedule, RunLength
from megatron.config.errors import printable
from megatron.data.splits import verify_token_files
from megatron.engine.device_progress import DeviceProgress, flight_record
from megatron.mpu.layout import ParallelLayout
from megatron.optimizer.schedule import schedule_of
from megatron.planner.memory.fit import fit_summary
from megatron.planner.memory.stage_memory import plan_memory
from megatron.planner.report import run_report
from megatron.planner.stages import StagePlan, plan_stages
from megatron.planner.timing.layer_times import find_layer_times, needs_profiling, read_layer_times
from megatron.planner.timing.step_time import planned_step
from megatron.tokenizer.vocabulary import Vocabulary, find_vocabulary
from megatron.training.build import build_engine
from megatron.training.data import data_report, open_data, planned_data_report, run_fingerprint
from megatron.training.harness.live import load_tasks
from megatron.training.logging.output_folders import make_output_folders
from megatron.training.out_of_memory import early_out_of_memory, explained_out_of_memory
from megatron.training.ramp_up import ramp_up_notes
from megatron.training.start_notes import planned_start, start_notes
from megatron.training.trainer import Trainer, make_metrics, run_length


def run(
    config: Config, notes: list[str], watchdog: Watchdog, on_exit: ExitStack, preparation: Preparation
) -> ExitStatus:
    """Runs a dry run, a training or an evaluation; returns how it ended.

    notes: sentences about the flags, for the start of the log. on_exit: the caller closes it when the run has
    ended or failed. preparation: has begun; it ends before the processes connect.
    """
    # Errors in flags and files are found here, before the processes connect.
    start.check_save_place(config)
    vocab = find_vocabulary(config)
    times = read_layer_times(config, vocab.size)
    plan = None if needs_profiling(config) else plan_stages(config, vocab.size, times)
    batches = BatchSchedule.from_config(config.batch)
    length = run_length(config, batches)
    schedule_of(config)  # for its errors: the checkpoint's may replace it
    if config.training.dry_run:
        return _dry_run(config, notes, vocab, plan, length, batches)
    checkpoint = folder_owner = fingerprint = data_table = tasks = None
    if config.parallel.local_rank == 0:
        with announce_errors():
            verify_token_files(config.data)
    if processes.is_main_process():
        with announce_errors():
            start.check_load_folder(config)
    make_output_folders(config)
    if processes.is_main_process():
        owned = None if config.training.no_train else config.checkpoint.save
        with announce_errors():
            fingerprint, data_table = run_fingerprint(config, length, vocab), data_report(config, length)
            folder_owner = on_exit.enter_context(owner.hold_folder(owned, node_name(os.environ), _print))
            checkpoint = manager.find_checkpoint(config, vocab.size, fingerprint)
            tasks = load_tasks(config)

    preparation.end()
    on_exit.enter_context(early_out_of_memory())
    rank = _connect(config, watchdog)
    if fingerprint is None:
        fingerprint = run_fingerprint(config, length, vocab)
    with watchdog.phase(Phase.PREFLIGHT):
        notes = [*notes, *check_kernels(config.training.require_kernels)]
        notes += [*preflight(config, fingerprint, length), *processes.device_notes(config)]
    with watchdog.phase(Phase.LOAD):
        checkpoint = manager.select_valid_checkpoint(
            checkpoint, config, vocab.size, fingerprint, watchdog.heartbeat
        )
    lr_schedule, metrics = resumed_schedule(checkpoint, config), make_metrics(config, vocab.size, rank)
    notes += start_notes(checkpoint, config, length, batches, lr_schedule)
    layout = ParallelLayout.from_config(config.parallel, rank)
    watchdog.report.note(stage=layout.pipeline_stage)
    tp_group = layout.make_tp_group()
    if plan is None:
        times = find_layer_times(config, layout, tp_group, vocab.size, vocab.eod)
        plan = plan_stages(config, vocab.size, times)
    memory = plan_memory(config, vocab.size, plan)
    metrics.print(run_report(config, plan, vocab.size, notes, lr_schedule.describe(), memory))
    metrics.print(f"\n{data_table}")
    on_exit.enter_context(explained_out_of_memory(config, vocab.size, plan, layout.pipeline_stage))
    engine = build_engine(config, layout, tp_group, vocab, plan)
    watchdog.set_device_facts(engine.device_progress.facts, flight_record)
    saved_to = config.checkpoint.save or ""
    checkpoints = manager.CheckpointManager(
        engine, saved_to, vocab.size, vocab.eod, fingerprint, folder_owner, watchdog.heartbeat
    )
    with watchdog.phase(Phase.LOAD):
        state = checkpoints.restore_or_init(checkpoint, metrics.print)
    data = open_data(config, layout, length, vocab)
    planned = [part.total for part in memory]
    trainer = Trainer(
        config, engine, data, length, batches, lr_schedule, metrics, watchdog, checkpoints, planned, tasks
    )
    try:
        state = trainer.train(state)
        trainer.evaluate_at_end(state)
        trainer.check_updates(state)
    finally:
        metrics.close()
    processes.destroy_distributed()
    watchdog.stop()
    return trainer.exit_status


def _print(line: str) -> None:
    print(printable(line), flush=True)


def _connect(config: Config, watchdog: Watchdog) -> int:
    """Connects the processes and creates their process group; returns the global rank. The watchdog watches
    from the moment that all have connected: then a rank that dies leaves the others waiting for it."""
    store = processes.connect(config)
    watchdog.start(config.training.hang_timeout, config.training.compile)
    with watchdog.phase(Phase.PREFLIGHT):
        rank = processes.init_distributed(config, store)
    watchdog.set_device_facts(DeviceProgress(get_accelerator()).facts, flight_record)
    return rank


def _dry_run(
    config: Config,
    notes: list[str],
    vocab: Vocabulary,
    plan: StagePlan,
    length: RunLength,
    batches: BatchSchedule,
) -> ExitStatus:
    """Prints the plan; returns FINISHED, or CONFIG_ERROR if it does not fit the device."""
    memory = plan_memory(config, vocab.size, plan)
    fits, sentence = fit_summary(config, vocab.size, memory)
    if processes.is_main_process():
        notes = [*notes, *ramp_up_notes(config)]
        planned_data = planned_data_report(config, length)
        checkpoint, found = planned_start(config, length, vocab)
        lr_schedule = resumed_schedule(checkpoint, config)
        notes += found + start_notes(checkpoint, config, length, batches, lr_schedule)
        step = planned_step(config, plan, vocab.size)
        plan_text = run_report(config, plan, vocab.size, notes, lr_schedule.describe(), memory, step)
        print(printable(f"{plan_text}\n\n{planned_data}"))
        if sentence:
            print(f"\nmemory     {sentence}")
    return ExitStatus.FINISHED if fits else ExitStatus.CONFIG_ERROR
