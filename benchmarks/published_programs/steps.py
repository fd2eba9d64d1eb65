"""The predicted step of a published program: passes, pipeline, reduction of the gradients, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from benchmarks.published_programs.layer_passes import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SHARDS,
    TENSOR,
    embedding,
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
)
from benchmarks.published_programs.shapes import BYTES, Layout, Model, Program, Shape
from megatron.cluster.devices import GPU
from megatron.pipeline.schedule import simulate_schedule
from megatron.planner.network import LATENCY_S, Network
from megatron.planner.rates import Rates, is_attention, kernel_seconds
from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait, pass_time

_BUCKETS = 8
"""Parts in which gradients are reduced and weights gathered: nothing hides one of them. An assumption."""
_SIMULATED = 3
"""Micro-batches per pipeline rank up to which a step is simulated."""


@dataclass(frozen=True)
class Machine:
    """The devices and the network of a run. is_hopper: Hopper or later."""

    gpu: GPU
    rates: Rates
    network: Network
    is_hopper: bool


@dataclass(frozen=True)
class StepSeconds:
    """The times of the parts of a step. host: the time that `HostTime` adds at the end of a step."""

    pipeline: float
    reduction: float = 0.0
    optimizer: float = 0.0
    gather: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.pipeline + self.reduction + self.optimizer + self.gather + self.host


@dataclass(frozen=True)
class Run:
    """A program with a model and a layout on a machine.

    dtype: of activations and weights. stage_layers: layers of each chunk of the pipeline, if they are known.
    """

    program: Program
    model: Model
    layout: Layout
    machine: Machine
    dtype: str
    given_layers: tuple[int, ...] | None = None

    @cached_property
    def shape(self) -> Shape:
        """What a rank computes."""
        kernels = self.program.attention
        attention = None if kernels is None else kernels[self.machine.is_hopper]
        return Shape(self.model, self.layout, self.program, attention)

    @cached_property
    def stage_layers(self) -> Sequence[int]:
        """Returns the layers of each chunk of the pipeline."""
        return self.given_layers or divide_layers(self.program, self.model, self.layout)

    @cached_property
    def rank_parameters(self) -> list[float]:
        layout, model = self.layout, self.model
        outer = model.embedding_parameters / layout.tensor
        layers = [sum(self.stage_layers[rank :: layout.pipeline]) for rank in range(layout.pipeline)]
        sizes = [count * model.layer_parameters / layout.tensor for count in layers]
        sizes[0] += outer
        if layout.pipeline > 1 or not model.tied:
            sizes[-1] += outer
        return sizes

    def seconds(self, actions: Sequence[Action]) -> float:
        launch, contention = self.program.launch_s, self.machine.rates.contention
        return pass_time(actions, self.kernel_seconds, self.collective_seconds, launch, contention).total

    def kernel_seconds(self, kernel: Kernel) -> float:
        machine, program = self.machine, self.program
        seconds = kernel_seconds(kernel, machine.gpu, machine.rates, self.dtype)
        if not is_attention(kernel):
            return seconds
        twice = program.deterministic and "backward" in kernel.name
        return seconds / program.attention_rate[machine.is_hopper] * (2 if twice else 1)

    def collective_seconds(self, collective: Collective) -> float:
        """Returns the time of a collective. Tensor-parallel ranks are neighbours; then come those that reduce
        gradients."""
        layout, network = self.layout, self.machine.network
        is_tensor = collective.group == TENSOR
        ranks, stride = (layout.tensor, 1) if is_tensor else (layout.replicas, layout.tensor)
        in_node = min(max(network.node_size // stride, 1), ranks)
        seconds = network.collective_seconds(
            collective.operation == ALL_REDUCE, collective.bytes, ranks, in_node, layout.gpus
        )
        program = self.program
        return seconds + program.tensor_latency_s if is_tensor else seconds / program.data_rate


def divide_layers(program: Program, model: Model, layout: Layout) -> tuple[int, ...]:
    """Returns the layers of each chunk of the pipeline.

    nanotron adds layers to a stage until its cost passes the stage's part of all costs, among them the LM
    head's. The others divide the layers evenly; if they cannot, the first and the last chunk have one less,
    or else the first chunks have one more.
    """
    chunks = layout.pipeline * layout.chunks
    if program.name == "nanotron" and chunks > 1:
        return _by_cost(model, chunks)
    if model.layers % chunks and (model.layers + 2) % chunks == 0:
        each = (model.layers + 2) // chunks
        return (each - 1, *[each] * (chunks - 2), each - 1)
    return tuple(model.layers // chunks + (chunk < model.layers % chunks) for chunk in range(chunks))


def _by_cost(model: Model, stages: int) -> tuple[int, ...]:
    layer = model.hidden * (4 * model.queries + 3 * model.ffn)
    total = model.layers * layer + model.embedding_parameters
    counts, stage = [0] * stages, 0
    for index in range(model.layers):
        counts[stage] += 1
        if (index + 1) * layer * stages > total * (stage + 1) and stage + 1 < stages:
            stage += 1
    return tuple(counts)


def predict_step(run: Run) -> StepSeconds:
    return _step_of_shards(run) if run.program.shards_weights else _step_of_pipeline(run)


def _step_of_shards(run: Run) -> StepSeconds:
    """Predicts a step with weights that are gathered for each pass of a layer while the layer before it
    computes."""
    shape, layout, model = run.shape, run.layout, run.model
    layer = model.layer_parameters / layout.tensor
    outer = run.rank_parameters[0] - model.layers * layer
    forward: list[Action] = [Collective(SHARDS, ALL_GATHER, BYTES * outer), Wait(0), *embedding(shape)]
    forward += _with_shards(run, layer_forward(shape), layer, gathers=True, reduces=False)
    forward += head_forward(shape)
    backward = head_backward(shape)
    backward += _with_shards(run, layer_backward(shape), layer, gathers=layout.zero == 3, reduces=True)
    backward += [Collective(SHARDS, REDUCE_SCATTER, run.program.reduced * outer), Wait(0)]
    both = run.seconds(forward) + run.seconds(backward)
    return StepSeconds(
        layout.micro_batches * both, optimizer=_optimizer_seconds(run, model.layers * layer + outer)
    )


def _with_shards(
    run: Run, layer: Sequence[Action], weights: float, gathers: bool, reduces: bool
) -> list[Action]:
    """Returns a pass through all layers. The gathering of a layer's weights starts before the layer before
    it."""
    gather = Collective(SHARDS, ALL_GATHER, BYTES * weights)
    per_layer = sum(isinstance(action, Collective) for action in layer) + reduces
    actions: list[Action] = [gather] if gathers else []
    for index in range(run.model.layers):
        if gathers:
            has_next = index + 1 < run.model.layers
            if has_next:
                actions.append(gather)
            # The layer's gathering started before the collectives of the layer before.
            actions.append(Wait(has_next + (per_layer if index else 0)))
        actions += layer
        if reduces:
            actions.append(Collective(SHARDS, REDUCE_SCATTER, run.program.reduced * weights))
    return actions


def _step_of_pipeline(run: Run) -> StepSeconds:
    """Predicts a step with complete weights on each rank, and gradients that are reduced once per step."""
    shape, layout, program = run.shape, run.layout, run.program
    parameters = max(run.rank_parameters)
    host = _layer_host_seconds(run)
    forward_layer = max(run.seconds(layer_forward(shape)), host / 3)
    backward_layer = max(run.seconds(layer_backward(shape)), 2 * host / 3)
    forward = [count * forward_layer for count in run.stage_layers]
    backward = [count * backward_layer for count in run.stage_layers]
    first = run.seconds(embedding(shape))
    forward[0] += first
    backward[0] += first
    forward[-1] += run.seconds(head_forward(shape))
    backward[-1] += run.seconds(head_backward(shape))
    pipeline = pipeline_seconds(
        tuple(forward), tuple(backward), _message_seconds(run), layout.micro_batches, layout.chunks
    )
    operation = REDUCE_SCATTER if layout.zero and not program.all_reduces else ALL_REDUCE
    reduction = run.collective_seconds(Collective(SHARDS, operation, program.reduced * parameters))
    gather = (
        run.collective_seconds(Collective(SHARDS, ALL_GATHER, BYTES * parameters)) if layout.zero else 0.0
    )
    if program.overlaps_reduction:
        reduction = max(reduction - _hiding_seconds(layout, backward), reduction / _BUCKETS)
        gather = max(gather - _hiding_seconds(layout, forward), gather / _BUCKETS)
    optimizer = _optimizer_seconds(run, parameters)
    return StepSeconds(pipeline, reduction, optimizer, gather, _step_host_seconds(run))


def _hiding_seconds(layout: Layout, chunks: Sequence[float]) -> float:
    """Returns the time of the passes on the fastest rank that hide the gradient reduction or the gathering of
    weights: the passes of one micro-batch. With virtual stages and p ranks, the gradients of a chunk are
    final p micro-batches before the gradients of the next chunk."""
    passes = min(sum(chunks[rank :: layout.pipeline]) for rank in range(layout.pipeline))
    if layout.chunks == 1:
        return passes
    return passes * min(layout.pipeline, layout.micro_batches) * (1 - 1 / layout.chunks)


def _layer_host_seconds(run: Run) -> float:
    """Returns the host time of both passes of a layer, by `HostTime`."""
    layout, host = run.layout, run.program.host
    if layout.pipeline > 1 and layout.tensor > 1 and layout.gpus > layout.node_size:
        return host.layer_s + host.pipeline_s * layout.tensor
    return host.layer_s + host.tensor_s * layout.tensor**2


def _step_host_seconds(run: Run) -> float:
    """Returns the host time at the end of a step, by `HostTime`."""
    layout, host = run.layout, run.program.host
    seconds = host.update_s * max(run.stage_layers) if layout.zero and layout.data > 1 else 0.0
    if layout.gpus >= host.stall_gpus:
        seconds += host.stall_s * (layout.micro_batches if layout.pipeline > 1 else 1)
    return seconds


def _optimizer_seconds(run: Run, parameters: float) -> float:
    """Returns the time of the gradients' norm and zeroing, and of the update, which reads and writes weights
    and two moments in fp32, reads the gradient and writes the weights."""
    partition = parameters / (run.layout.replicas if run.layout.zero else 1)
    gradients = partition if run.program.shards_weights else parameters
    moved = 2 * run.program.gradient * gradients + (6 * 4 + 4 + BYTES) * partition
    return moved / (run.machine.rates.memory * run.machine.gpu.bandwidth)


def _message_seconds(run: Run) -> float:
    """Returns the time of a message between stages, of which each tensor-parallel rank sends a part, all of
    them at once."""
    layout, network = run.layout, run.machine.network
    if layout.pipeline == 1:
        return 0.0
    rate, in_stage, latency = network.intra_bytes_per_s, layout.gpus // layout.pipeline, LATENCY_S["intra"]
    if in_stage >= network.node_size:
        rate, latency = min(network.inter_bytes_per_s / network.node_size, rate), LATENCY_S["inter"]
    return BYTES * run.shape.tokens / layout.tensor * run.model.hidden / rate + latency


@cache
def pipeline_seconds(
    forward: tuple[float, ...], backward: tuple[float, ...], transfer: float, micro_batches: int, chunks: int
) -> float:
    """Returns the time of the pipeline: simulated, beyond `_SIMULATED` micro-batches per rank extrapolated.

    forward, backward: seconds of each chunk. chunks: per rank; an interleaved schedule takes groups of as
    many micro-batches as there are ranks, and a last group that is not full is taken to need its part of a
    full one's time.
    """
    ranks = len(forward) // chunks
    if len(forward) == 1:
        return micro_batches * (forward[0] + backward[0])
    name, per_rank = ("interleaved", chunks) if chunks > 1 else ("1f1b", None)
    count = -(-micro_batches // ranks) * ranks if chunks > 1 else micro_batches
    transfers = [transfer] * (len(forward) - 1)

    def simulated(number: int) -> float:
        return simulate_schedule(name, forward, backward, transfers, number, per_rank).makespan

    most = min(count, _SIMULATED * ranks)
    total = simulated(most)
    if count > most:
        total += (count - most) * (total - simulated(most - ranks)) / ranks
    return total * micro_batches / count
