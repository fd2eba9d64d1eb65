#!/usr/bin/env python3
"""Train a GPT. The story of a run: flags -> layout -> model -> data -> training.

python pretrain_gpt.py --help
python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
srun --ntasks 4 python pretrain_gpt.py --tensor-model-parallel-size 2 ...
"""

import os
import sys
from contextlib import ExitStack
from functools import partial

from megatron.cluster.exit_codes import exit_code, exit_on_error
from megatron.cluster.launch import init_from_slurm_env, node_name
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config, read_command_line
from megatron.engine.deepspeed_config import read_deepspeed_config


def main() -> None:
    report = RankReport.from_environment()
    watchdog = Watchdog(report)
    with exit_on_error(report, same_everywhere=True):
        init_from_slurm_env()
        command_line = read_command_line()
    with exit_on_error(report), ExitStack() as at_end:
        settings = read_deepspeed_config(command_line.config)
        notes = [*command_line.notes, *settings.notes]
        should_requeue = run(settings.config, notes, watchdog, at_end)
    sys.exit(exit_code(report, should_requeue))


def run(config: Config, notes: list[str], watchdog: Watchdog, at_end: ExitStack) -> bool:
    """The whole run; returns whether it is to be continued. notes: what to say of the flags. at_end: what is
    to be done when the run is over, however it ends."""
    # Imported only now: a wrong flag is answered before torch is loaded.
    from megatron.cluster import processes

    processes.configure_logging(config.logging)

    from megatron.checkpoint import native, owner, start
    from megatron.checkpoint.compatibility import resumed_schedule
    from megatron.cluster.preflight import preflight
    from megatron.config.batch import BatchSchedule
    from megatron.engine.pipeline_engine import ENGINES
    from megatron.model.gpt_model import GPT_MODELS
    from megatron.mpu.layout import ParallelLayout
    from megatron.planner.layer_times import find_layer_times, is_measured, read_layer_times
    from megatron.planner.report import run_report
    from megatron.planner.stages import plan_stages
    from megatron.tokenizer.vocabulary import find_vocabulary
    from megatron.training.data import fingerprint_of, open_data
    from megatron.training.logging.output_folders import make_output_folders
    from megatron.training.trainer import Trainer, make_metrics, run_length

    # Everything that flags and files can get wrong is found out here, before the processes meet.
    vocab = find_vocabulary(config)
    times = read_layer_times(config, vocab.size)
    plan = None if is_measured(config) else plan_stages(config, vocab.size, times)
    batches = BatchSchedule.from_config(config.batch)
    length = run_length(config, batches)
    lr_schedule = resumed_schedule(None, config)
    if config.training.dry_run:
        if processes.is_main_process():
            print(run_report(config, plan, vocab.size, notes, lr_schedule.describe()))
        return False
    fingerprint = fingerprint_of(config, length, vocab)
    checkpoint = folder_owner = None
    if processes.is_main_process():
        start.check_load(config)
    make_output_folders(config)
    if processes.is_main_process():
        saved_to = None if config.training.no_train else config.checkpoint.save
        say = partial(print, flush=True)
        folder_owner = at_end.enter_context(owner.hold(saved_to, node_name(os.environ), say))
        checkpoint = native.find_checkpoint(config, vocab.size, fingerprint)

    rank = processes.init_distributed(config)
    watchdog.start(config.training.hang_timeout)
    notes = [*notes, *preflight(config, fingerprint, length), *processes.device_notes(config)]
    watchdog.pause()
    checkpoint = native.select_valid_checkpoint(checkpoint, config, vocab.size, fingerprint)
    lr_schedule, metrics = resumed_schedule(checkpoint, config), make_metrics(config, vocab.size, rank)
    layout, schedule = ParallelLayout.from_config(config.parallel, rank), config.parallel.pipeline_schedule
    watchdog.report.note(stage=layout.pipeline_stage)
    tensor = layout.make_tp_group()
    if plan is None:
        times = find_layer_times(config, layout, tensor, vocab.size, vocab.eod)
        plan = plan_stages(config, vocab.size, times)
    metrics.print(run_report(config, plan, vocab.size, notes, lr_schedule.describe()))
    model = GPT_MODELS[schedule](config, layout, tensor, vocab.size, vocab.eod, plan.bounds)
    engine = ENGINES[schedule](config, layout, tensor, model)
    state = native.restore_or_init(engine, checkpoint, fingerprint, metrics.print)
    if folder_owner is not None:
        folder_owner.note_run(engine.checkpoint_identity.run_id)
    data = open_data(config, layout, length, vocab)
    checkpoints = native.CheckpointManager(engine, vocab.size, vocab.eod, fingerprint, folder_owner)
    trainer = Trainer(config, engine, data, length, batches, lr_schedule, metrics, watchdog, checkpoints)
    try:
        state = trainer.train(state)
        trainer.evaluate_at_end(state)
    finally:
        metrics.close()
    processes.destroy_distributed()
    watchdog.stop()
    return trainer.should_requeue


if __name__ == "__main__":
    main()
