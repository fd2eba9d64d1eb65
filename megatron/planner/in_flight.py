"""Counts the micro-batches in flight of each pipeline stage: the micro-batches whose activations it keeps."""

from dataclasses import dataclass
from itertools import chain

from megatron.config import Config
from megatron.pipeline.schedule import actions_of


@dataclass(frozen=True)
class InFlight:
    """Numbers of micro-batches of a stage at one time. waiting: between forward and backward pass. deferred:
    between backward and weight-gradient pass, if the schedule has weight-gradient passes."""

    waiting: int
    deferred: int = 0


def in_flight_micro_batches(config: Config) -> list[int]:
    """Returns for each stage the largest number of micro-batches between their forward and their last
    pass."""
    return [
        max(number.waiting + number.deferred for number in numbers) for numbers in in_flight_by_stage(config)
    ]


def in_flight_on_rank(config: Config, rank: int) -> list[dict[int, InFlight]]:
    """Returns the states in which a pipeline rank has the most micro-batches in flight. A state maps every
    stage of the rank to its `InFlight`."""
    parallel = config.parallel
    stages = [stage for stage, holder in enumerate(parallel.rank_of_stage) if holder == rank]
    waiting, deferred = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    splits = parallel.schedule.splits_backward
    moments: list[dict[int, InFlight]] = []
    most = 0
    actions = actions_of(
        parallel.pipeline_schedule,
        parallel.pipeline_model_parallel_size,
        filling_micro_batches(config),
        parallel.stages_per_rank,
    )
    for action in chain.from_iterable(step.actions for step in actions.steps[rank]):
        stage = action.chunk
        waiting[stage] += {"forward": 1, "backward": -1}.get(action.kind, 0)
        deferred[stage] += {"backward": splits, "weight": -1}.get(action.kind, 0)
        total = sum(waiting.values()) + sum(deferred.values())
        moment = {stage: InFlight(waiting[stage], deferred[stage]) for stage in stages}
        if total > most:
            moments, most = [], total
        if total == most and moment not in moments:
            moments.append(moment)
    return moments


def filling_micro_batches(config: Config) -> int:
    """Returns a number of micro-batches that fills the pipeline more than once, but at most the run's
    number."""
    parallel = config.parallel
    multiple = parallel.micro_batch_multiple
    enough = max(-(-(2 * parallel.num_stages + 2) // multiple) * multiple, parallel.min_micro_batches)
    return min(config.micro_batches_per_step, enough)


def in_flight_by_stage(config: Config) -> list[list[InFlight]]:
    """Returns for each stage its micro-batches in flight in each state of `in_flight_on_rank`."""
    parallel = config.parallel
    by_rank = [in_flight_on_rank(config, rank) for rank in range(parallel.pipeline_model_parallel_size)]
    return [[moment[stage] for moment in by_rank[rank]] for stage, rank in enumerate(parallel.rank_of_stage)]
