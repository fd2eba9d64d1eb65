#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Trains a GPT model: parses the flags, then calls `megatron.training.run` or `megatron.planner.dry_run`.

python pretrain_gpt.py --help
python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
srun --ntasks 4 python pretrain_gpt.py --tensor-model-parallel-size 2 ...
"""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from megatron.arguments import complete_command_line, read_command_line, require_flags
from megatron.cluster.devices import (
    check_fp32_variables,
    set_deterministic_variables,
    set_library_defaults,
    set_max_connections,
)
from megatron.cluster.exit_codes import exit_code, exit_on_error
from megatron.cluster.launch import check_limits, init_from_slurm_env
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config

if TYPE_CHECKING:
    from megatron.pipeline.methods import MemoryCosts


def predict_memory(config: Config, vocab_size: int) -> "MemoryCosts":
    """Returns the memory of the layers. Only a run with --partition-method memory imports the planner."""
    from megatron.planner.layer_memory import memory_costs

    return memory_costs(config, vocab_size)


def main() -> None:
    complete_command_line()
    report = RankReport.from_environment()
    watchdog = Watchdog(report)
    with exit_on_error(report):
        init_from_slurm_env()
        check_limits()
    set_library_defaults()
    with exit_on_error(report, same_on_all_ranks=True):
        require_flags(sys.argv[1:])
        command_line = read_command_line()
    with exit_on_error(report), ExitStack() as on_exit:
        config, notes = command_line.config, list(command_line.notes)
        set_max_connections(config.parallel)
        if config.training.deterministic_mode:
            set_deterministic_variables()
        if config.precision.name == "fp32":
            check_fp32_variables()
        # Imported late, because a wrong flag must be reported before torch is loaded, and DeepSpeed logs on
        # import.
        from megatron.cluster.processes import configure_logging
        from megatron.cluster.rendezvous import Preparation

        configure_logging(config.logging)
        preparation = on_exit.enter_context(Preparation(config))
        if config.training.dry_run:
            from megatron.planner.dry_run import dry_run

            status = dry_run(config, notes)
        else:
            from megatron.training.run import run

            status = run(config, notes, watchdog, on_exit, preparation, predict_memory)
    sys.exit(exit_code(report, status))


if __name__ == "__main__":
    main()
