#!/usr/bin/env python3
"""Train a GPT. The story of a run: flags -> layout -> model -> data -> training.

python pretrain_gpt.py --help
python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
"""

import sys
import time
from functools import partial

from megatron.config import exit_on_config_error, read_command_line
from megatron.engine.deepspeed_config import read_deepspeed_config


def main() -> None:
    started_at = time.monotonic()
    with exit_on_config_error():
        command_line = read_command_line()
        settings = read_deepspeed_config(command_line.config)
        config = settings.config

        # Imported only now: a wrong flag is answered before torch is loaded.
        from megatron.training.processes import join_world, leave_world, quiet_library_logs

        quiet_library_logs(config)

        from megatron.checkpoint.native import (
            TrainingState,
            find_checkpoint,
            load_checkpoint,
            save_checkpoint,
        )
        from megatron.config.batch import BatchSchedule
        from megatron.engine.pipeline_engine import GPTEngine
        from megatron.model.gpt_model import GPTModelPipe
        from megatron.mpu.layout import ParallelLayout
        from megatron.optimizer.mixed_precision import NonFiniteError
        from megatron.optimizer.schedule import LearningRateSchedule
        from megatron.planner.report import run_report
        from megatron.planner.stages import plan_stages
        from megatron.training.data import fingerprint_of, open_data
        from megatron.training.signals import ExitConditions
        from megatron.training.train import Trainer, make_metrics, run_length
        from megatron.training.vocabulary import find_vocabulary

        # Everything that flags and files can get wrong is found out here, before the processes meet.
        vocabulary = find_vocabulary(config)
        plan = plan_stages(config, vocabulary.size)
        batches = BatchSchedule.from_config(config.batch)
        length = run_length(config, batches)
        rates = LearningRateSchedule.from_config(config.schedule, config.training, config.model.seq_length)
        report = run_report(config, plan, vocabulary.size, [*command_line.notes, *settings.notes])
        if config.training.dry_run:
            print(report)
            return
        fingerprint = fingerprint_of(config, length)
        checkpoint = find_checkpoint(config, plan.bounds, vocabulary.size, fingerprint)

    rank = join_world(config)
    metrics = make_metrics(config, vocabulary.size, rank)
    metrics.print(f"{report}\n{rates.describe()}")

    parallel = config.parallel
    layout = ParallelLayout.create(
        parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, rank
    )
    tensor = layout.make_tensor_group()
    model = GPTModelPipe(config, layout, tensor, vocabulary.size, vocabulary.eod, plan.bounds)
    engine = GPTEngine(config, layout, tensor, model)

    state = load_checkpoint(engine, checkpoint) if checkpoint else TrainingState()
    metrics.print(
        f"starting from {checkpoint.folder if checkpoint else 'new weights'}, iteration {state.iteration}"
    )
    data = open_data(config, layout, length, vocabulary)
    save = partial(
        save_checkpoint,
        engine,
        config.checkpoint.save,
        bounds=plan.bounds,
        vocab_size=vocabulary.size,
        eod=vocabulary.eod,
        fingerprint=fingerprint,
    )
    exits = ExitConditions.from_config(config.training, started_at)
    trainer = Trainer(config, engine, data, length, batches, rates, metrics, exits, save)

    try:
        if not config.training.no_train:
            state = trainer.train(state)
        trainer.evaluate(
            state, "validation", f"the end of training for val data, iteration {state.iteration}"
        )
        trainer.evaluate(state, "test", f"the end of training for test data, iteration {state.iteration}")
    except NonFiniteError as error:
        metrics.close()
        metrics.print(f"error: iteration {engine.global_steps + 1}: {error}")
        sys.exit(1)
    finally:
        metrics.close()
    leave_world()


if __name__ == "__main__":
    main()
