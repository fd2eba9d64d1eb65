"""The predicted time of a training step: stages, pipeline schedule, reduction of the gradients, optimizer.

    pass of a stage   FLOPs / (matmul x peak) + bytes / (memory x bandwidth), at least launches x 8 us,
                      plus the collectives that no matrix product hides
    step              the pipeline schedule's simulation (`megatron.pipeline.schedule`) with these times,
                      then the reduction of the gradients, the optimizer and the all-gather of the weights

`matmul` and `memory` are the parts of a GPU's peak rates that the passes reach: two constants per kind of
GPU, `FITTED`, which `benchmarks/planner_accuracy.py` fits on the ten published rows named there and compares
with all others. No GPU was at hand: for the H100, H200 and B200 the A100's constants are taken, unmeasured.

Not modelled: --cpu-offload and --checkpoint-in-cpu (transfers to the host), --compile, data loading, logging,
evaluation and checkpoints, jitter between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from megatron.config import BatchSchedule, Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.vocab import padded_vocab_size
from megatron.mpu.layout import ParallelLayout
from megatron.pipeline.schedule import Timeline, simulate_schedule
from megatron.planner.stages import StagePlan, micro_batches_per_step
from megatron.planner.timing.communication import (
    ALL_REDUCE,
    BUCKET_GRADIENTS,
    BUCKET_WEIGHTS,
    CHUNKS,
    DATA,
    INPUT_GRADIENT,
    REDUCE_SCATTER,
    SEND,
    STAGES,
    TENSOR,
    UNIT_GRADIENTS,
    UNIT_WEIGHTS,
    WEIGHTS,
    Exchange,
    RankCommunication,
    overlap_chunks,
    rank_communication,
)
from megatron.planner.timing.flops import model_iteration_flops, recomputes_scores, tflops_per_device
from megatron.planner.timing.hardware import GPU, find_gpu
from megatron.planner.timing.network import Network, find_network
from megatron.planner.timing.overlap import (
    Collective,
    reduction_after_backward,
    wait_for_units,
    wait_for_weights,
)
from megatron.planner.timing.work import Program, Work, program_of, stage_work

LAUNCH_S = 8e-6
"""Host time of one operation in eager PyTorch, an assumption."""
MISALIGNED = 1 / 16
"""Rate of matrix products without tensor cores, relative to those with them: 19.5 to 312 TFLOP/s on an A100,
about the same on a V100 (`megatron.planner.timing.hardware`)."""
_FULLY_SIMULATED = 2
"""Micro-batches per stage up to which a step is simulated in full."""


@dataclass(frozen=True)
class Achieved:
    """The parts of the peak rates of matrix products and of memory that a pass reaches."""

    matmul: float
    memory: float


FITTED = {"a100": Achieved(1.0, 0.38), "v100": Achieved(0.98, 0.60)}
_SAME_AS = {"h100": "a100", "h200": "a100", "b200": "a100"}


@dataclass(frozen=True)
class Cluster:
    """The devices and the network of a prediction."""

    gpu: GPU
    achieved: Achieved
    network: Network


@dataclass(frozen=True)
class StageTime:
    """Seconds of a pass of one micro-batch through a stage."""

    stage: int
    rank: int
    forward: float
    backward: float
    matmul: float
    """Of both passes, in matrix products."""
    memory: float
    """Of both passes, in other kernels, and in waits for launches."""
    communication: float
    """Of both passes, in collectives that nothing hides."""
    weight: float = 0.0
    """The part of `backward` that --pipeline-schedule zero-bubble runs as a pass of its own."""


@dataclass(frozen=True)
class StepTime:
    """The predicted step, in seconds. `pipeline` to `gather` add up to `total`."""

    stages: tuple[StageTime, ...]
    transfers: tuple[float, ...]
    """Of a message between stages s and s + 1."""
    micro_batches: int
    pipeline: float
    reduction: float
    """Of the gradients over all groups, as far as no backward pass hides it."""
    optimizer: float
    gather: float
    """Of the weights, after the update (ZeRO-1), as far as no forward pass hides it."""
    bubble: float
    """Fraction of the pipeline's time in which the ranks are idle, their mean."""
    exposed_communication: float
    """Seconds per step in which the busiest rank communicates and computes nothing."""
    tokens_per_second: float
    logged_tflops: float
    """Per GPU, by the formula that a run logs."""
    mfu: float
    """Model FLOPs utilisation: without recomputation, of the peak rate."""
    days: float | None
    """Of the whole run, ramp-up of the batch included; None if its length is not known."""

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction + self.optimizer + self.gather


def find_cluster(config: Config) -> Cluster | None:
    """The cluster of --gpu and the network's flags; None without --gpu."""
    gpu, network = find_gpu(config), find_network(config)
    if gpu is None or network is None or config.training.gpu is None:
        return None
    kind = config.training.gpu.partition("-")[0]
    return Cluster(gpu, FITTED[_SAME_AS.get(kind, kind)], network)


def planned_step(config: Config, plan: StagePlan, vocab_size: int) -> StepTime | None:
    """The predicted step on the cluster of --gpu and the network's flags; None without --gpu."""
    cluster = find_cluster(config)
    return None if cluster is None else predict_step(config, plan, vocab_size, cluster)


def predict_step(
    config: Config,
    plan: StagePlan,
    vocab_size: int,
    cluster: Cluster,
    program: Program | None = None,
    computing: Mapping[int, Sequence[float]] | None = None,
) -> StepTime:
    """Predicts a step at the full batch size. program: other kernels than this program's. computing: by
    stage, the seconds in which its forward, its backward and its weight pass compute, if they are known."""
    program = program or program_of(config)
    ranks = config.parallel.pipeline_model_parallel_size
    exchanges = [rank_communication(config, plan, vocab_size, rank) for rank in range(ranks)]
    if program.all_reduces_gradients:
        exchanges = [_with_all_reduces(communication) for communication in exchanges]
    stages = stage_times(config, plan, vocab_size, cluster, program, exchanges, computing)
    transfers = _transfers(config, plan, cluster, exchanges)
    micro_batches = micro_batches_per_step(config)
    pipeline = PipelineTime.measure(config.parallel, stages, transfers, micro_batches)
    reduction, gather = _collectives_of_step(config, cluster, exchanges, stages, pipeline)
    optimizer = max(_optimizer_seconds(config, plan, program, rank, cluster) for rank in range(ranks))
    outside = reduction + gather + optimizer
    step = pipeline.seconds(micro_batches) + outside
    busy = [0.0] * ranks
    waits = [0.0] * ranks
    for time in stages:
        busy[time.rank] += micro_batches * (time.forward + time.backward)
        waits[time.rank] += micro_batches * time.communication
    return StepTime(
        stages=tuple(stages),
        transfers=tuple(transfers),
        micro_batches=micro_batches,
        pipeline=pipeline.seconds(micro_batches),
        reduction=reduction,
        optimizer=optimizer,
        gather=gather,
        bubble=1 - sum(busy) / ranks / pipeline.seconds(micro_batches),
        exposed_communication=max(waits) + reduction + gather,
        tokens_per_second=config.batch.global_batch_size * config.model.seq_length / step,
        logged_tflops=tflops_per_device(
            _iteration_flops(config, vocab_size, config.training.recomputes_layers),
            step,
            config.parallel.world_size,
        ),
        mfu=_iteration_flops(config, vocab_size, False)
        / (step * config.parallel.world_size * cluster.gpu.peak_flops[_dtype(config)]),
        days=_days(config, pipeline, outside),
    )


def stage_times(
    config: Config,
    plan: StagePlan,
    vocab_size: int,
    cluster: Cluster,
    program: Program,
    exchanges: Sequence[RankCommunication],
    computing: Mapping[int, Sequence[float]] | None = None,
) -> list[StageTime]:
    """The times of the passes, in the order of the stages. computing: as for `predict_step`."""
    times = []
    overlapped = set() if config.parallel.no_overlap_grad_reduce else {UNIT_GRADIENTS}
    overlapped |= set() if config.parallel.no_overlap_param_gather else {UNIT_WEIGHTS}
    for rank, communication in enumerate(exchanges):
        layout = _layout(config, rank)
        for stage in communication.stages:
            others = {call.purpose for call in (*stage.forward, *stage.backward, *stage.weight)}
            others -= {INPUT_GRADIENT, CHUNKS, *overlapped}
            work = stage_work(config, plan, vocab_size, stage.stage, program)
            hidden_by = work.overlap_flops if program.overlaps_input_gradient else 0.0
            hidden_by /= _rate(config, cluster)
            # The products that would hide the backward pass's collectives are in the weight pass.
            in_backward = 0.0 if config.parallel.schedule.splits_backward else hidden_by
            products = work.product_flops / _rate(config, cluster)
            chunked = _seconds_of(cluster, layout, stage.forward, {CHUNKS})
            seconds = []
            passes = (
                (work.forward, stage.forward, hidden_by),
                (work.backward + work.weight.times(-1), stage.backward, in_backward),
                (work.weight, stage.weight, 0.0),
            )
            for index, (part, calls, hidden) in enumerate(passes):
                during_products = _seconds_of(cluster, layout, calls, {INPUT_GRADIENT})
                exposed = max(during_products - hidden, 0.0)
                exposed += _seconds_of(cluster, layout, calls, others)
                of_chunks = _seconds_of(cluster, layout, calls, {CHUNKS})
                if of_chunks:  # the backward pass has fewer such products, or with recomputation more
                    beside = products * of_chunks / chunked
                    exposed += wait_for_units(beside, of_chunks, overlap_chunks(config))
                matmul, other = _work_seconds(config, cluster, part)
                if computing is not None:
                    other = computing[stage.stage][index] - matmul
                of_units = _seconds_of(cluster, layout, calls, overlapped)
                exposed += wait_for_units(matmul + other + exposed, of_units, config.model.num_layers)
                seconds.append((matmul, other, exposed))
            forward, backward, weight = map(sum, seconds)
            by_cause = map(sum, zip(*seconds, strict=True))
            times.append(StageTime(stage.stage, rank, forward, backward + weight, *by_cause, weight))
    return sorted(times, key=lambda time: time.stage)


def _rate(config: Config, cluster: Cluster) -> float:
    return cluster.achieved.matmul * cluster.gpu.peak_flops[_dtype(config)]


def _dtype(config: Config) -> str:
    return config.precision.name


def _work_seconds(config: Config, cluster: Cluster, work: Work) -> tuple[float, float]:
    """(in matrix products, in the rest) of a pass."""
    rate = _rate(config, cluster)
    matmul = work.flops / rate + work.misaligned_flops / (rate * MISALIGNED)
    memory = work.bytes / (cluster.achieved.memory * cluster.gpu.bandwidth)
    return matmul, max(memory, work.launches * LAUNCH_S - matmul)


def _seconds_of(
    cluster: Cluster, layout: ParallelLayout, calls: Sequence[Exchange], purposes: Set[str]
) -> float:
    """Of the collectives of a pass that have one of these purposes."""
    return sum(
        call.calls * cluster.network.seconds(call, layout)
        for call in calls
        if call.group in (TENSOR, DATA) and call.purpose in purposes
    )


def _layout(config: Config, rank: int) -> ParallelLayout:
    """Of the first tensor and data rank of a pipeline rank."""
    parallel = config.parallel
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    return ParallelLayout.from_config(parallel, rank * per_stage)


def _transfers(
    config: Config, plan: StagePlan, cluster: Cluster, exchanges: Sequence[RankCommunication]
) -> list[float]:
    """Seconds of a message between stages s and s + 1."""
    times = [0.0] * (config.parallel.num_stages - 1)
    for rank, communication in enumerate(exchanges):
        layout = _layout(config, rank)
        for stage in communication.stages:
            sent = [call for call in stage.forward if call.group == STAGES and call.operation == SEND]
            if sent:
                times[stage.stage] = sum(cluster.network.seconds(call, layout) for call in sent)
    return times


def _with_all_reduces(communication: RankCommunication) -> RankCommunication:
    """The same with gradients that are all-reduced at the end of a step."""
    step = tuple(
        replace(call, operation=ALL_REDUCE) if call.operation == REDUCE_SCATTER else call
        for call in communication.step
    )
    return replace(communication, step=step)


def _collectives_of_step(
    config: Config,
    cluster: Cluster,
    exchanges: Sequence[RankCommunication],
    stages: Sequence[StageTime],
    pipeline: PipelineTime,
) -> tuple[float, float]:
    """(reductions, all-gathers) that a step waits for, of the slowest rank: after the end of the pipeline,
    and in the first forward passes of the next step. A rank that starts later or ends earlier waits less."""
    timeline = pipeline.timeline(pipeline.simulated)
    reductions, waits = [], []
    for rank, communication in enumerate(exchanges):
        layout, own = _layout(config, rank), [time for time in stages if time.rank == rank]
        by_purpose: dict[str, list[Collective]] = {BUCKET_GRADIENTS: [], BUCKET_WEIGHTS: []}
        others = {True: 0.0, False: 0.0}
        for call in communication.step:
            seconds = call.calls * cluster.network.seconds(call, layout)
            if call.purpose in by_purpose:
                by_purpose[call.purpose].append((call.bytes, seconds))
            else:
                others[call.purpose == WEIGHTS] += seconds
        spans, parallel = timeline.spans[rank], config.parallel
        # The gradients are final in the last pass.
        last = min(time.weight or time.backward for time in own)
        backward = 0.0 if parallel.no_overlap_grad_reduce else last
        after = reduction_after_backward(backward, by_purpose[BUCKET_GRADIENTS], others[False])
        reductions.append(spans[-1].end + after - timeline.makespan)
        forward = 0.0 if parallel.no_overlap_param_gather else min(time.forward for time in own)
        start = 0.0 if parallel.no_overlap_param_gather else spans[0].start
        waits.append(wait_for_weights(forward, by_purpose[BUCKET_WEIGHTS], others[True], start))
    return max(reductions), max(waits)


def _optimizer_seconds(
    config: Config, plan: StagePlan, program: Program, rank: int, cluster: Cluster
) -> float:
    """Norms and zeroing of the gradients (all read and written, with ZeRO the rank's partition read again),
    the update: master weights and two moments read and written, the gradient read, the weights written."""
    parallel = config.parallel
    stages = [stage for stage in range(parallel.num_stages) if plan.rank_of(stage) == rank]
    parameters = sum(plan.stage_parameters(stage) for stage in stages)
    size = 4 if config.precision.name == "fp32" else 2
    gradients = program.gradient_bytes
    moved = parameters * 2 * gradients + parameters / parallel.optimizer_partitions * (
        gradients + 6 * 4 + 4 + size
    )
    return moved / (cluster.achieved.memory * cluster.gpu.bandwidth)


@dataclass(frozen=True)
class PipelineTime:
    """The time of the pipeline for any number of micro-batches: simulated, beyond `simulated` extrapolated.

    Once the pipeline is full, every further micro-batch takes as long as the one before.
    """

    schedule: str
    stages_per_rank: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfers: tuple[float, ...]
    simulated: int
    at_simulated: float
    per_micro_batch: float

    @classmethod
    def measure(
        cls,
        parallel: ParallelConfig,
        stages: Sequence[StageTime],
        transfers: Sequence[float],
        micro_batches: int,
    ) -> PipelineTime:
        """Simulates the schedule with up to `micro_batches`."""
        forward = tuple(time.forward for time in stages)
        backward = tuple(time.backward for time in stages)
        weight = tuple(time.weight for time in stages)
        name, per_rank = parallel.pipeline_schedule, parallel.stages_per_rank
        most = min(micro_batches, _FULLY_SIMULATED * len(stages))
        # With groups of micro-batches the time of a group is constant, not that of one.
        step = parallel.micro_batch_multiple
        fewer = max(most - max(len(stages) // 2 // step * step, step), step)
        times = [
            simulate_schedule(name, forward, backward, transfers, count, per_rank, weight).makespan
            for count in ((most, fewer) if micro_batches > most else (most,))
        ]
        slope = (times[0] - times[1]) / (most - fewer) if len(times) == 2 else 0.0
        return cls(name, per_rank, forward, backward, weight, tuple(transfers), most, times[0], slope)

    def seconds(self, micro_batches: int) -> float:
        """Of a step of this many micro-batches."""
        if micro_batches >= self.simulated:
            return self.at_simulated + (micro_batches - self.simulated) * self.per_micro_batch
        return self.timeline(micro_batches).makespan

    def timeline(self, micro_batches: int) -> Timeline:
        """The simulation of a step."""
        return simulate_schedule(
            self.schedule,
            self.forward,
            self.backward,
            self.transfers,
            micro_batches,
            self.stages_per_rank,
            self.weight,
        )


def _iteration_flops(config: Config, vocab_size: int, recompute: bool) -> float:
    model = config.model
    return model_iteration_flops(
        model,
        seq_length=model.seq_length,
        padded_vocab_size=padded_vocab_size(vocab_size, model, config.parallel.tensor_model_parallel_size),
        batch_size=config.batch.global_batch_size,
        recompute=recompute,
        recompute_attention=recompute and recomputes_scores(config),
    )


def _days(config: Config, pipeline: PipelineTime, outside: float) -> float | None:
    """Days of training; a smaller batch of the ramp-up has fewer micro-batches."""
    training, schedule = config.training, BatchSchedule.from_config(config.batch)
    if training.train_samples is None and training.train_iters is None:
        return None
    total = schedule.total_iterations(training, config.model.seq_length, config.curriculum)
    unit = config.batch.micro_batch_size * config.parallel.data_parallel_size
    seconds, done = 0.0, 0
    for size in schedule.sizes():
        last = size == config.batch.global_batch_size
        following = size + (config.batch.rampup_batch_size or (0, 0))[1]
        until = total if last else min(schedule.iterations_until(schedule.consumed_at_size(following)), total)
        # A run that resumes may be past the batches of the ramp-up that the schedule does not support.
        multiple = config.parallel.micro_batch_multiple
        micro_batches = max(-(-size // unit // multiple) * multiple, config.parallel.min_micro_batches)
        seconds += (until - done) * (pipeline.seconds(micro_batches) + outside)
        done = until
    return seconds / 86400


def time_lines(step: StepTime) -> str:
    """The predicted step: its total, rates, and where the time goes."""
    days = f", {step.days:.1f} days for the whole run" if step.days is not None else ""
    return (
        f"step       {step.total:.2f} s predicted: {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.logged_tflops:.1f} TFLOP/s per GPU as logged, MFU {100 * step.mfu:.1f} %{days}\n"
        f"time       {time_shares(step)}"
    )


def time_shares(step: StepTime) -> str:
    """Where the time of the busiest rank goes, in percent of the step."""
    by_rank: dict[int, list[float]] = {}
    for stage in step.stages:
        parts = by_rank.setdefault(stage.rank, [0.0, 0.0, 0.0])
        for index, seconds in enumerate((stage.matmul, stage.memory, stage.communication)):
            parts[index] += step.micro_batches * seconds
    busiest = max(by_rank.values(), key=sum)
    names = ("matrix products", "other kernels", "tensor-parallel and ZeRO collectives")
    shares = dict(zip(names, busiest, strict=True))
    shares["waits in the pipeline"] = max(step.pipeline - sum(busiest), 0.0)
    shares["gradient reduction"] = step.reduction
    shares["optimizer"] = step.optimizer
    shares["weight gather"] = step.gather
    return ", ".join(f"{name} {100 * part / step.total:.0f} %" for name, part in shares.items())
