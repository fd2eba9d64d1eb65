#!/usr/bin/env python3
"""Train a GPT: reads the flags, then `megatron.training.run`.

python pretrain_gpt.py --help
python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
srun --ntasks 4 python pretrain_gpt.py --tensor-model-parallel-size 2 ...
"""

import sys
from contextlib import ExitStack

from megatron.cluster.exit_codes import exit_code, exit_on_error
from megatron.cluster.launch import init_from_slurm_env
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.config import read_command_line
from megatron.engine.deepspeed_config import read_deepspeed_config


def main() -> None:
    report = RankReport.from_environment()
    watchdog = Watchdog(report)
    with exit_on_error(report, same_everywhere=True):
        init_from_slurm_env()
        command_line = read_command_line()
    with exit_on_error(report), ExitStack() as on_exit:
        settings = read_deepspeed_config(command_line.config)
        notes = [*command_line.notes, *settings.notes]
        # Imported only now: a wrong flag is answered before torch is loaded, and DeepSpeed logs on import.
        from megatron.cluster.processes import configure_logging

        configure_logging(settings.config.logging)
        from megatron.training.run import run

        should_requeue = run(settings.config, notes, watchdog, on_exit)
    sys.exit(exit_code(report, should_requeue))


if __name__ == "__main__":
    main()
