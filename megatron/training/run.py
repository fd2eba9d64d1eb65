"""A run from its configuration to its end: layout, model, data, training."""

import os
from contextlib import ExitStack
from functools import partial

from megatron.checkpoint import manager
from megatron.checkpoint.compatibility import resumed_schedule
from megatron.checkpoint.lineage import owner, start
from megatron.cluster import processes
from megatron.cluster.launch import node_name
from megatron.cluster.preflight import preflight
from megatron.cluster.rendezvous import announce_errors
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config
from megatron.config.batch import BatchSchedule
from megatron.engine.pipeline_engine import ENGINES
from megatron.model.gpt_model import GPT_MODELS
from megatron.mpu.layout import ParallelLayout
from megatron.planner.layer_times import find_layer_times, needs_profiling, read_layer_times
from megatron.planner.report import run_report
from megatron.planner.stages import plan_stages
from megatron.tokenizer.vocabulary import find_vocabulary
from megatron.training.data import open_data, run_fingerprint
from megatron.training.logging.output_folders import make_output_folders
from megatron.training.trainer import Trainer, make_metrics, run_length


def run(config: Config, notes: list[str], watchdog: Watchdog, on_exit: ExitStack) -> bool:
    """Runs a dry run, a training or an evaluation; returns whether the job should be requeued.

    notes: what the start of the log says about the flags. on_exit: closed by the caller when the run has
    ended, whether it failed or not.
    """
    # Mistakes in flags and files are found here, before the processes meet.
    vocab = find_vocabulary(config)
    times = read_layer_times(config, vocab.size)
    plan = None if needs_profiling(config) else plan_stages(config, vocab.size, times)
    batches = BatchSchedule.from_config(config.batch)
    length = run_length(config, batches)
    lr_schedule = resumed_schedule(None, config)
    if config.training.dry_run:
        if processes.is_main_process():
            print(run_report(config, plan, vocab.size, notes, lr_schedule.describe()))
        return False
    fingerprint = run_fingerprint(config, length, vocab)
    checkpoint = folder_owner = None
    if processes.is_main_process():
        with announce_errors():
            start.check_load_folder(config)
    make_output_folders(config)
    if processes.is_main_process():
        saved_to = None if config.training.no_train else config.checkpoint.save
        print_fn = partial(print, flush=True)
        with announce_errors():
            folder_owner = on_exit.enter_context(owner.hold_folder(saved_to, node_name(os.environ), print_fn))
            checkpoint = manager.find_checkpoint(config, vocab.size, fingerprint)

    rank = processes.init_distributed(config)
    watchdog.start(config.training.hang_timeout)
    notes = [*notes, *preflight(config, fingerprint, length), *processes.device_notes(config)]
    watchdog.pause()
    checkpoint = manager.select_valid_checkpoint(checkpoint, config, vocab.size, fingerprint)
    lr_schedule, metrics = resumed_schedule(checkpoint, config), make_metrics(config, vocab.size, rank)
    layout, schedule = ParallelLayout.from_config(config.parallel, rank), config.parallel.pipeline_schedule
    watchdog.report.note(stage=layout.pipeline_stage)
    tp_group = layout.make_tp_group()
    if plan is None:
        times = find_layer_times(config, layout, tp_group, vocab.size, vocab.eod)
        plan = plan_stages(config, vocab.size, times)
    metrics.print(run_report(config, plan, vocab.size, notes, lr_schedule.describe()))
    model = GPT_MODELS[schedule](config, layout, tp_group, vocab.size, vocab.eod, plan.bounds)
    engine = ENGINES[schedule](config, layout, tp_group, model)
    state = manager.restore_or_init(engine, checkpoint, fingerprint, metrics.print)
    if folder_owner is not None:
        folder_owner.set_run_id(engine.checkpoint_identity.run_id)
    data = open_data(config, layout, length, vocab)
    checkpoints = manager.CheckpointManager(engine, vocab.size, vocab.eod, fingerprint, folder_owner)
    trainer = Trainer(config, engine, data, length, batches, lr_schedule, metrics, watchdog, checkpoints)
    try:
        state = trainer.train(state)
        trainer.evaluate_at_end(state)
    finally:
        metrics.close()
    processes.destroy_distributed()
    watchdog.stop()
    return trainer.should_requeue
