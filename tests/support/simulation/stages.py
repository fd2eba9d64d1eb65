"""Simulates the ranks of a run in parallel."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.config import Config
from megatron.mpu.mesh import Mesh
from megatron.planner.simulation.processes import Worker
from tests.support.simulation.matching import Batch, calls_of_other, rank_calls
from tests.support.simulation.rank import simulate_rank
from tests.support.simulation.record import StepRecord


def run_in_processes(function: Callable[..., Any], arguments: Iterable[Sequence[Any]]) -> list[Any]:
    """Calls `function(*a)` for each tuple `a` of `arguments`. Each call has a new process, and one process
    runs per core at a time. Returns the results. function: a function of a module, since it is pickled."""

    def run_one(values: Sequence[Any]) -> Any:
        worker = Worker({})
        try:
            return worker.run(function, *values)
        finally:
            worker.end()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(run_one, arguments))


def simulate_stages(config: Config) -> list[StepRecord]:
    """Simulates the first device (TP rank 0, DP rank 0) of each pipeline rank. Returns their records."""
    parallel = config.parallel
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    return simulate_ranks(config, range(0, parallel.world_size, per_stage))


def simulate_ranks(config: Config, ranks: Iterable[int]) -> list[StepRecord]:
    """Simulates these ranks in parallel. Returns their records. See `rank.simulate_rank`."""
    return run_in_processes(simulate_rank, [(config, rank) for rank in ranks])


def all_calls(config: Config, records: Sequence[StepRecord]) -> dict[int, list[Batch]]:
    """Returns the collective calls in one step of every rank of the run. records: a record per pipeline
    rank."""
    calls: dict[int, list[Batch]] = {}
    for record in records:
        simulated = Mesh.from_config(config.parallel, record.rank)
        own, per_stage = rank_calls(record), simulated.ranks_per_stage
        for rank in range(record.stage * per_stage, (record.stage + 1) * per_stage):
            calls[rank] = calls_of_other(own, simulated, Mesh.from_config(config.parallel, rank))
    return calls


def syncs_per_micro_batch(record: StepRecord) -> Counter[tuple[str, str, str]]:
    """Returns the host synchronizations in every micro-batch: (instruction, cause, place) -> number."""
    return Counter(
        (str(instruction), sync.cause, sync.place)
        for instruction, count in record.rest.items()
        for sync in count.syncs
    )
