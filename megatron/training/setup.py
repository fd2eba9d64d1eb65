"""What flags and files determine of a run. The stages may depend on what its processes measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.lineage.start import check_save_place
from megatron.cluster.exit_codes import SharedUserError
from megatron.config import BatchSchedule, Config
from megatron.config.batch import RunLength
from megatron.errors import UserError
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.optimizer.schedule import schedule_of
from megatron.pipeline.layer_times import find_layer_times, needs_profiling, read_layer_times
from megatron.pipeline.methods import MemoryCosts
from megatron.pipeline.stages import StagePlan, find_memory_costs, needs_memory_costs, plan_stages
from megatron.tokenizer.vocabulary import Vocabulary, find_vocabulary
from megatron.training.trainer import run_length


@dataclass(frozen=True)
class Setup:
    """What is known before the processes connect."""

    vocab: Vocabulary
    plan: StagePlan | None
    """None if `find_stages` must be called when the processes have connected; never in a dry run."""
    batches: BatchSchedule
    length: RunLength

    @classmethod
    def from_config(cls, config: Config) -> Setup:
        """Raises ConfigError for flags and files with which no run can start: a dry run finds the errors of a
        run in their order."""
        check_save_place(config)
        vocab = find_vocabulary(config)
        times = read_layer_times(config, vocab.size)
        needs_processes = needs_profiling(config) or needs_memory_costs(config)
        plan = None
        if config.training.dry_run or not needs_processes:
            plan = plan_stages(config, vocab.size, times)
        batches = BatchSchedule.from_config(config.batch)
        length = run_length(config, batches)
        schedule_of(config)  # for its errors: the checkpoint's may replace it
        return cls(vocab, plan, batches, length)


def find_stages(config: Config, layout: ParallelLayout, tp_group: TPGroup, vocab: Vocabulary) -> StagePlan:
    """Partitions the layers by their measured times or by their memory. Collective: all ranks get one result.

    Raises SharedUserError on every rank if the partition is not possible.
    """
    times = memory = None
    if needs_profiling(config):
        times = find_layer_times(config, layout, tp_group, vocab.size, vocab.eod)
    if needs_memory_costs(config):
        memory = _memory_costs_of_rank_0(config, layout, vocab.size)
    try:
        return plan_stages(config, vocab.size, times, memory)
    except UserError as error:
        raise SharedUserError(str(error)) from error


def _memory_costs_of_rank_0(config: Config, layout: ParallelLayout, vocab_size: int) -> MemoryCosts:
    found: list[Any] = [None, None]
    if layout.rank == 0:
        try:
            found[0] = find_memory_costs(config, vocab_size)
        except UserError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    costs, problem = found
    if problem is not None:
        raise SharedUserError(problem)
    return costs
