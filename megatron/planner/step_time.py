"""Predicts the time of a training step: stages, pipeline schedule, gradient reduction, optimizer.

    pass of a stage   a replay of its kernels and collectives (`simulation.passes`), which are recorded from
                      the run's own layers; `rates` predicts the time of a kernel, `network` of a collective
    step              a simulation of the pipeline schedule (`megatron.pipeline.schedule`) with these times,
                      then the gradient reduction, the optimizer and the all-gather of the weights

The rates are fitted to published runs of other programs. No prediction was compared with a run of this
program on a GPU.

The prediction leaves out --cpu-offload and --checkpoint-in-cpu (transfers to the host), --compile, data
loading, logging, evaluation, checkpoints, and jitter between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.cluster.devices import GPU, find_gpu
from megatron.config import Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.model.flops import iteration_flops, palm_flops, tflops_per_device
from megatron.mpu.mesh import Mesh
from megatron.optimizer.batch_schedule import BEGIN
from megatron.pipeline.schedule import Timeline, simulate_schedule
from megatron.planner.network import Network, find_network
from megatron.planner.rates import (
    EAGER_TRAFFIC,
    LAUNCH_S,
    RATES,
    best_published_mfu,
    is_attention,
    kernel_seconds,
)
from megatron.planner.simulation.costs import UpdateCosts, spec_bytes
from megatron.planner.simulation.passes import Action, Busy, Collective, Kernel, PassTime, Wait, pass_time
from megatron.planner.simulation.stage_costs import StageCosts, rank_update, stage_costs
from megatron.run import Run

_FULLY_SIMULATED = 2
"""A step with up to this many micro-batches per stage is simulated completely."""


@dataclass(frozen=True)
class Cluster:
    """The devices and the network of a prediction. kind: kind of GPU, such as 'a100'. launch_s: host time per
    kernel, in seconds."""

    kind: str
    gpu: GPU
    network: Network
    launch_s: float = LAUNCH_S

    @property
    def contention(self) -> float:
        """`megatron.planner.rates.Rates.contention` of the GPU."""
        return RATES[self.kind].contention

    def kernel_seconds(self, kernel: Kernel, dtype: str) -> float:
        """Returns the seconds of a recorded kernel. The recorded FLOPs of attention count all scores, but
        fused kernels without a bias compute only the causal half."""
        if not kernel.flops:
            kernel = replace(kernel, bytes=EAGER_TRAFFIC * kernel.bytes)
        elif is_attention(kernel) and "efficient" not in kernel.name:
            assert kernel.product is not None
            queries, keys, _ = kernel.product  # the queries are the last tokens of the keys
            kernel = replace(kernel, flops=kernel.flops * (1 - queries / (2 * keys)))
        return kernel_seconds(kernel, self.gpu, RATES[self.kind], dtype)


@dataclass(frozen=True)
class StageTime:
    """Seconds that the forward and the backward pass of one micro-batch take in a stage."""

    stage: int
    rank: int
    forward: float
    backward: float
    matmul: float
    """Seconds of both passes in matrix products and attention."""
    memory: float
    """Seconds of both passes in other kernels, and in waits for kernel launches."""
    communication: float
    """Seconds of both passes in waits for collectives."""
    weight: float = 0.0
    """Seconds of `backward` that --pipeline-schedule zero-bubble moves to a separate weight-gradient pass."""


@dataclass(frozen=True)
class StepTime:
    """The predicted times of a step, in seconds. `pipeline` to `gather` add up to `total`."""

    stages: tuple[StageTime, ...]
    transfers: tuple[float, ...]
    """Entry s: time of a message between stages s and s + 1."""
    micro_batches: int
    pipeline: float
    reduction: float
    """Exposed part of the gradient reduction: no backward pass hides it."""
    optimizer: float
    gather: float
    """Exposed part of the all-gather of weights after the update (ZeRO-1): no forward pass hides it."""
    bubble: float
    """Fraction of the pipeline's time in which a rank is idle, averaged over the ranks."""
    exposed_communication: float
    """Seconds per step in which the most affected rank only waits for communication."""
    tokens_per_second: float
    logged_tflops: float
    """TFLOP/s per GPU by the formula of a run's log."""
    mfu: float
    """Model FLOPs utilization: FLOPs of the model without recomputation, as a fraction of the peak rate."""
    palm_mfu: float
    """The utilization by PaLM's formula, see `megatron.model.flops.palm_flops`."""
    doubt: str
    """A sentence that says that no published run has reached this utilization; '' if one has."""
    days: float | None
    """Days that the remaining steps take, including the batch ramp-up; None if the length of the run is not
    known."""
    is_resumed: bool
    """Whether a part of the run is already done."""
    has_experts: bool
    """Whether the layers contain all-to-alls of experts."""

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction + self.optimizer + self.gather


def find_cluster(config: Config) -> Cluster | None:
    """Returns the cluster that --gpu and the flags of the network describe; None without --gpu."""
    gpu, network = find_gpu(config), find_network(config)
    if gpu is None or network is None or config.training.gpu is None:
        return None
    kind, host_us = config.training.gpu.partition("-")[0], config.parallel.host_us_per_kernel
    return Cluster(kind, gpu, network, LAUNCH_S if host_us is None else 1e-6 * host_us)


def planned_step(run: Run) -> StepTime | None:
    """Returns the predicted step on the cluster of `find_cluster`; None without --gpu."""
    cluster = find_cluster(run.config)
    return None if cluster is None else predict_step(run, cluster)


def predict_step(run: Run, cluster: Cluster) -> StepTime:
    """Returns the predicted step on a cluster."""
    config, plan, vocab_size = run.config, run.stages, run.vocab.size
    ranks = config.parallel.pipeline_model_parallel_size
    costs = [stage_costs(run, stage) for stage in range(config.parallel.num_stages)]
    updates = [rank_update(run, rank) for rank in range(ranks)]
    stages = stage_times(run, costs, cluster)
    transfers = _transfers(run, costs, cluster)
    micro_batches = config.micro_batches_per_step
    pipeline = PipelineTime(config.parallel, stages, transfers, micro_batches)
    after = [
        _after_pipeline(Rank(config, cluster, rank), update, stages, pipeline.timeline)
        for rank, update in enumerate(updates)
    ]
    reduction, optimizer, gather = (max(0.0, *parts) for parts in zip(*after, strict=True))
    outside = reduction + gather + optimizer
    step = pipeline.seconds(micro_batches) + outside
    peak_flops = step * config.parallel.world_size * cluster.gpu.peak_flops[config.precision.name]
    mfu = iteration_flops(config, vocab_size, with_recomputation=False) / peak_flops
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
            iteration_flops(config, vocab_size), step, config.parallel.world_size
        ),
        mfu=mfu,
        palm_mfu=palm_flops(config, vocab_size, plan.active_parameters) / peak_flops,
        doubt=_doubt(cluster.kind, plan.total_parameters, mfu),
        days=_days(run, pipeline, outside),
        is_resumed=run.start != BEGIN,
        has_experts=config.model.num_experts is not None,
    )


@dataclass(frozen=True)
class Rank:
    """The first device (TP rank 0, DP rank 0) of a pipeline rank, on a cluster."""

    config: Config
    cluster: Cluster
    pipeline_rank: int

    @cached_property
    def mesh(self) -> Mesh:
        """The layout as this rank sees it."""
        parallel = self.config.parallel
        per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
        return Mesh.from_config(parallel, self.pipeline_rank * per_stage)

    def time(self, actions: Iterable[Action], dtype: str | None = None, is_pass: bool = False) -> PassTime:
        """Returns the predicted time of a list of actions. dtype: the dtype of matrix products; None: the
        run's. is_pass: whether the actions are a forward or backward pass; a CUDA graph launches such a pass
        with one call."""
        cluster, dtype = self.cluster, dtype or self.config.precision.name
        return pass_time(
            actions,
            lambda kernel: cluster.kernel_seconds(kernel, dtype),
            lambda call: cluster.network.seconds(call, self.mesh),
            0.0 if is_pass and self.config.training.uses_cuda_graph else cluster.launch_s,
            cluster.contention,
            self.config.parallel.needs_one_queue,
        )


def stage_times(run: Run, costs: Sequence[StageCosts], cluster: Cluster) -> list[StageTime]:
    """Returns the times of the passes of each stage, in order."""
    times = []
    for stage, cost in enumerate(costs):
        rank = Rank(run.config, cluster, run.stages.rank_of(stage))
        forward, backward, weight = (rank.time(part, is_pass=True) for part in cost.passes.values())
        whole = forward + backward + weight
        times.append(
            StageTime(
                stage,
                rank.pipeline_rank,
                forward.total,
                backward.total + weight.total,
                whole.products,
                whole.others,
                whole.waits,
                weight.total,
            )
        )
    return times


def _transfers(run: Run, costs: Sequence[StageCosts], cluster: Cluster) -> list[float]:
    """Returns the seconds of a message between stages s and s + 1, for each s; 0 within one rank."""
    parallel, plan, times = run.config.parallel, run.stages, []
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    for stage, cost in enumerate(costs[:-1]):
        source, destination = (plan.rank_of(s) * per_stage for s in (stage, stage + 1))
        mesh = Mesh.from_config(parallel, source)
        size = spec_bytes(cost.outputs) / cost.sends
        is_sent = source != destination
        times.append(cluster.network.message_seconds(size, source, destination, mesh) if is_sent else 0.0)
    return times


def _after_pipeline(
    rank: Rank, update: UpdateCosts, stages: Sequence[StageTime], pipeline: Timeline
) -> tuple[float, float, float]:
    """Returns the seconds that a step takes on the rank in addition to the pipeline: (gradient reduction,
    optimizer and norms, all-gather of the weights).

    Work that overlaps with the last backward pass, or with the first forward pass of the next step, counts as
    0. A rank that ends its last pass before the other ranks, or starts later, has more time for such an
    overlap.
    """
    own = [time for time in stages if time.rank == rank.pipeline_rank]
    spans = pipeline.spans[rank.pipeline_rank]
    # Gradients are complete only after the last micro-batch's pass, so their reduction starts in that pass.
    last = min(time.weight or time.backward for time in own)
    share = 1 / (len(update.reductions) + 1)
    during = [action for part in update.reductions for action in (Busy(last * share), *part)]
    waits = map(Wait, range(sum(isinstance(action, Collective) for action in during)))
    in_last_pass = [*during, Busy(last * share), *waits]
    reduce = rank.time([*in_last_pass, *update.reduce])
    later = max(spans[-1].end + reduce.total - pipeline.makespan, 0.0)
    norms = min(reduce.products + reduce.others - rank.time(in_last_pass).others, later)
    # Muon is the only optimizer with matrix products in its step.
    dtype = rank.config.optimizer.muon_matmul_dtype
    gathers = update.gathers_and(Busy(min(time.forward for time in own) / max(len(update.gathers), 1)))
    in_step, both = rank.time(update.step, dtype).waits, rank.time([*update.step, *gathers], dtype)
    # The all-gathers run while the rank waits for its first message.
    gather = in_step + max(both.waits - in_step - spans[0].start, 0.0)
    return later - norms, norms + both.products + both.others, gather


def timeline(
    parallel: ParallelConfig, stages: Sequence[StageTime], transfers: Sequence[float], micro_batches: int
) -> Timeline:
    """Returns the simulated pipeline of a step. micro_batches: number of micro-batches in the step."""
    return simulate_schedule(
        parallel.pipeline_schedule,
        [time.forward for time in stages],
        [time.backward for time in stages],
        transfers,
        micro_batches,
        parallel.stages_per_rank,
        [time.weight for time in stages],
    )


class PipelineTime:
    """The time of the pipeline for any number of micro-batches. Up to `simulated` micro-batches it is
    simulated, beyond that extrapolated. Once the pipeline is full, every further micro-batch takes as long as
    the previous one."""

    def __init__(
        self,
        parallel: ParallelConfig,
        stages: Sequence[StageTime],
        transfers: Sequence[float],
        micro_batches: int,
    ) -> None:
        """Simulates the schedule with at most `micro_batches` micro-batches."""
        self._pipeline = parallel, stages, transfers
        self.simulated = most = min(micro_batches, _FULLY_SIMULATED * len(stages))
        self.timeline = timeline(*self._pipeline, most)
        self._per_micro_batch = 0.0
        if micro_batches > most:
            # A schedule may work on groups of micro-batches. Then the time of a group is constant, so whole
            # groups are compared.
            step = parallel.micro_batch_multiple
            fewer = max(most - max(len(stages) // 2 // step * step, step), step)
            more = self.timeline.makespan - timeline(*self._pipeline, fewer).makespan
            self._per_micro_batch = more / (most - fewer)

    def seconds(self, micro_batches: int) -> float:
        """Returns the seconds of the pipeline in a step. micro_batches: number of micro-batches in the
        step."""
        if micro_batches >= self.simulated:
            return self.timeline.makespan + (micro_batches - self.simulated) * self._per_micro_batch
        return timeline(*self._pipeline, micro_batches).makespan


def _doubt(kind: str, parameters: int, mfu: float) -> str:
    best = best_published_mfu(kind, parameters)
    if best is None or 100 * mfu <= best[0]:
        return ""
    return (
        f"no published run has reached an MFU of {100 * mfu:.1f} %: the best one on this kind of GPU, with a "
        f"model of about this size, has {best[0]:.1f} % ({best[1]})"
    )


def _days(run: Run, pipeline: PipelineTime, outside: float) -> float | None:
    """Returns the days of the training that remains when the run starts; None if the length of the run is not
    known. The smaller batches of a ramp-up have fewer micro-batches."""
    config, training, start = run.config, run.config.training, run.start
    if training.train_samples is None and training.train_iters is None:
        return None
    left = max(0, run.length.iterations - start.iteration)
    unit, seconds = config.batch.micro_batch_size * config.parallel.data_parallel_size, 0.0
    for size, steps in [
        *run.batches.ramp_up_steps(start.consumed_samples),
        (config.batch.global_batch_size, left),
    ]:
        # The schedule may not support the smallest batches of the ramp-up. A run that resumes after them can
        # use it.
        multiple = config.parallel.micro_batch_multiple
        micro_batches = max(-(-size // unit // multiple) * multiple, config.parallel.min_micro_batches)
        seconds += min(steps, left) * (pipeline.seconds(micro_batches) + outside)
        left -= min(steps, left)
    return seconds / 86400


def time_lines(step: StepTime) -> str:
    """Returns the report's lines on the predicted step: its total time, its rates, and the shares of its
    time."""
    part = "rest of the" if step.is_resumed else "whole"
    days = f", {step.days:.1f} days for the {part} run" if step.days is not None else ""
    return (
        f"step       {step.total:.2f} s predicted: {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.logged_tflops:.1f} TFLOP/s per GPU as logged, MFU {100 * step.mfu:.1f} % "
        f"({100 * step.palm_mfu:.1f} % by PaLM's formula){days}\n"
        f"time       {time_shares(step)}{step.doubt and chr(10) + 'note       ' + step.doubt}"
    )


def time_shares(step: StepTime) -> str:
    """Returns a text on how the busiest rank spends its time, in percent of the step."""
    by_rank: dict[int, list[float]] = {}
    for stage in step.stages:
        parts = by_rank.setdefault(stage.rank, [0.0, 0.0, 0.0])
        for index, seconds in enumerate((stage.matmul, stage.memory, stage.communication)):
            parts[index] += step.micro_batches * seconds
    busiest = max(by_rank.values(), key=sum)
    collectives = f"collectives of TP, CP{', EP' * step.has_experts} and ZeRO"
    names = ("matrix products", "other kernels", collectives)
    shares = dict(zip(names, busiest, strict=True))
    shares["waits in the pipeline"] = max(step.pipeline - sum(busiest), 0.0)
    shares["gradient reduction"] = step.reduction
    shares["optimizer"] = step.optimizer
    shares["weight gather"] = step.gather
    return ", ".join(f"{name} {100 * part / step.total:.0f} %" for name, part in shares.items())
