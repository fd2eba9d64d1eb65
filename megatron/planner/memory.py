"""Plans the memory of each pipeline rank, and whether it fits the device.

The plan replays the rank's instructions. `simulation.stage_costs` has, for each pass, the bytes that every
layer allocates, keeps and frees. The replay adds the activations and gradients that the engine holds between
passes (because they were received or are being sent), the weights, the gradients and the optimizer state.
`tests/simulated` compares the planned memory with a whole simulated step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.checkpoint.saving.writer import ring_bytes
from megatron.cluster.devices import device_memory_bytes
from megatron.config import Config
from megatron.engine.instructions import pipeline_schedule
from megatron.mpu.mesh import Mesh
from megatron.planner.in_flight import filling_micro_batches
from megatron.planner.simulation.costs import spec_bytes
from megatron.planner.simulation.stage_costs import StageCosts, rank_update, stage_costs
from megatron.run import Run
from megatron.units import GIB

_LABEL_BYTES = 8 + 4
"""Bytes of a token's label and of the weight that the label has in the loss."""
# A device needs memory in addition to the planned tensors. The three values below are assumptions, which this
# repository has never measured. The first is the CUDA context with the kernels of PyTorch and cuBLAS.
CONTEXT_BYTES = GIB
# The second is the buffers of each NCCL communicator. Published figures for A100s are 0.5 to 0.7 GB.
COMMUNICATOR_BYTES = 600_000_000
# The third is memory that the allocator has reserved but cannot use, as a fraction of the planned memory. It
# assumes expandable segments, which a run sets. Without them BigScience's logs of 2021 show 11 to 22 %.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class StageMemory:
    """The bytes of one pipeline rank at the peak of a step, as PyTorch's allocator counts them."""

    state: float
    """Weights, gradients, master weights, moments."""
    activations: float
    """Activations of all micro-batches in flight, and messages between stages."""
    head: float
    """Temporaries of the LM head and the loss if the peak occurs while they run; otherwise 0."""
    temporaries: float
    """Temporaries of any other layer, or of the optimizer step, if the peak occurs while it runs."""
    tables: float
    """Attention bias and rotary angles."""
    host: float
    """Bytes in host memory: with --cpu-offload master weights, moments and gradients; with
    --checkpoint-in-cpu the inputs of layers; with --async-save a copy of what the rank saves."""

    @property
    def total(self) -> float:
        """Number of bytes on the device."""
        return self.state + self.activations + self.head + self.temporaries + self.tables


def plan_memory(run: Run) -> list[StageMemory]:
    """Returns the peak memory of each pipeline rank. The device also needs `reserve_bytes`."""
    return [_plan_rank(run, rank) for rank in range(run.config.parallel.pipeline_model_parallel_size)]


def _plan_rank(run: Run, rank: int) -> StageMemory:
    config, plan = run.config, run.stages
    held = [stage for stage, holder in enumerate(config.parallel.rank_of_stage) if holder == rank]
    costs = [stage_costs(run, stage) for stage in held]
    update = rank_update(run, rank)
    schedule = pipeline_schedule(config.parallel, rank, filling_micro_batches(config), trains=True)
    stages = [_Stage.of(config, cost, stage) for cost, stage in zip(costs, held, strict=True)]
    replay = _Replay(stages, schedule.micro_batches)
    for command in chain.from_iterable(schedule):
        replay.run(type(command).__name__, **command.kwargs)
    state = update.parameters + update.gradients + update.optimizer
    tables = max(cost.tables for cost in costs)
    host = update.host + replay.most_in_flight * max(cost.host for cost in costs)
    if config.checkpoint.async_save:
        layers = [range(plan.bounds[stage], plan.bounds[stage + 1]) for stage in held]
        host += ring_bytes([plan.parameters[layer] for layer in chain.from_iterable(layers)], config)
    if update.peak > replay.kept + replay.extra:
        return StageMemory(state, 0.0, 0.0, update.peak, tables, host)
    in_loss = replay.extra if replay.is_loss else 0
    return StageMemory(state, replay.kept, in_loss, replay.extra - in_loss, tables, host)


@dataclass(frozen=True)
class _Stage:
    """A pipeline stage of a rank.

    inputs, outputs, labels: bytes of the stage's input, of its output, and of labels with loss mask.
    shares_output: whether the next stage is on the same rank. input_is_shared: whether the previous stage is
    on the same rank.
    """

    costs: StageCosts
    inputs: int
    outputs: int
    labels: int
    shares_output: bool
    input_is_shared: bool

    @classmethod
    def of(cls, config: Config, costs: StageCosts, stage: int) -> _Stage:
        """Returns stage number `stage` of the run. costs: the costs of this stage."""
        holders = config.parallel.rank_of_stage
        tokens = config.batch.micro_batch_size * config.model.seq_length
        return cls(
            costs,
            spec_bytes(costs.inputs),
            spec_bytes(costs.outputs),
            tokens * _LABEL_BYTES,
            holders[stage : stage + 2] == holders[stage : stage + 1] * 2,
            stage > 0 and holders[stage - 1] == holders[stage],
        )

    @property
    def is_first(self) -> bool:
        return self.costs.receives == 0

    @property
    def is_last(self) -> bool:
        return self.costs.sends == 0


class _Replay:
    """Replays the instructions of a rank, and finds its peak memory.

    At the peak, `kept` is the number of bytes of all activations, `extra` the number of further bytes that
    the running pass needs, and `is_loss` says whether that pass computes the loss.
    """

    def __init__(self, stages: Sequence[_Stage], micro_batches: int) -> None:
        self._stages, self._micro_batches = stages, micro_batches
        self._held: dict[tuple[str, int], int] = {}
        self._total = 0
        self._queued: list[tuple[str, int]] = []
        self._sending: list[tuple[str, int]] = []
        self._receives = False
        self.kept = self.extra = self.most_in_flight = 0
        self.is_loss = False

    def run(self, name: str, buffer_id: int = -1, model_chunk_id: int = 0) -> None:
        """Replays an instruction. name: DeepSpeed's name, such as 'ForwardPass'."""
        method = getattr(self, f"_{name}", None)
        if method is not None:
            method(self._stages[model_chunk_id], buffer_id)

    def _hold(self, what: str, buffer_id: int, size: int) -> None:
        """Sets the bytes of the tensors `what` in the buffer; 0 frees them."""
        self._total += size - self._held.get((what, buffer_id), 0)
        self._held[what, buffer_id] = size

    def _note(self, level: int, extra: int, is_loss: bool) -> None:
        """Compares the memory of a layer's pass with the peak so far. level: bytes that earlier layers of the
        pass have allocated (or, if negative, freed), which `_hold` does not count yet. extra: bytes that this
        layer needs in addition."""
        kept = self._total + level
        if kept + extra > self.kept + self.extra:
            self.kept, self.extra, self.is_loss = kept, extra, is_loss

    def _LoadMicroBatch(self, stage: _Stage, buffer_id: int) -> None:
        first, last = self._stages[0], self._stages[-1]
        if first.is_first:
            self._hold("input", buffer_id, first.inputs)
        if last.is_last:
            self._hold("labels", buffer_id, last.labels)

    def _RecvActivation(self, stage: _Stage, buffer_id: int) -> None:
        self._receives = True
        self._hold("input", buffer_id, stage.inputs // stage.costs.receives)

    def _ForwardPass(self, stage: _Stage, buffer_id: int) -> None:
        layers, level = stage.costs.layers, 0
        if not stage.is_first:
            self._hold("input", buffer_id, 0 if stage.input_is_shared else stage.inputs)  # all-gathered
        for layer in layers:
            self._note(level, layer.forward.peak, stage.is_last and layer is layers[-1])
            level += layer.forward.change
        if layers:
            level += layers[0].frees_input  # because the buffer still holds the input
        if stage.costs.sends > 1:  # the rank keeps only its part of the output until the part is sent
            level -= stage.outputs
            self._hold("message", buffer_id, stage.outputs // stage.costs.sends)
        self._hold("kept", buffer_id, level)
        in_flight = sum(size > 0 for (what, _), size in self._held.items() if what == "kept")
        self.most_in_flight = max(self.most_in_flight, in_flight)

    def _SendActivation(self, stage: _Stage, buffer_id: int) -> None:
        self._queued.append(("message", buffer_id))

    def _RecvGrad(self, stage: _Stage, buffer_id: int) -> None:
        self._receives = True
        self._hold("gradient", buffer_id, stage.outputs // stage.costs.sends)

    def _BackwardPass(self, stage: _Stage, buffer_id: int) -> None:
        layers, level = stage.costs.layers, 0
        if stage.costs.sends > 1:
            self._hold("gradient", buffer_id, stage.outputs)  # all-gathered
        for layer in reversed(layers):
            self._note(level, layer.backward.peak, stage.is_last and layer is layers[-1])
            level += layer.backward.change
        self._hold("kept", buffer_id, -stage.costs.weight.change)
        self._hold("gradient", buffer_id, 0)
        if stage.shares_output:
            self._hold("input gradient", buffer_id + self._micro_batches, 0)
        if stage.is_first:
            self._hold("input", buffer_id, 0)
        else:
            self._hold("input gradient", buffer_id, stage.inputs)
        if stage.is_last:
            self._hold("labels", buffer_id % self._micro_batches, 0)

    def _WeightGradPass(self, stage: _Stage, buffer_id: int) -> None:
        self._note(0, stage.costs.weight.peak, False)
        self._hold("kept", buffer_id, 0)

    def _SendGrad(self, stage: _Stage, buffer_id: int) -> None:
        self._hold("input", buffer_id, 0)
        self._queued.append(("input gradient", buffer_id))

    def _CommitP2P(self, stage: _Stage, buffer_id: int) -> None:
        for message in self._sending:
            self._hold(*message, 0)
        self._sending, self._queued = self._queued, []
        if self._receives:
            for message in self._sending:
                self._hold(*message, 0)
            self._sending = []
        self._receives = False


def communicators(config: Config) -> int:
    """Returns the number of NCCL communicators of the rank that has the most of them.

    A rank has one communicator for all ranks, and one for each set of several ranks: tensor parallel; context
    parallel; data and context parallel; pipeline parallel; model parallel (TP x PP); the two stages of a tied
    embedding; all ranks of a stage with an optimizer of whole matrices or with experts, unless these are all
    ranks. With experts there are three more: the ranks that divide the experts, the ranks with equal experts,
    and the ranks that divide a sequence.
    """
    mesh, holders = Mesh.from_config(config.parallel, 0), config.parallel.rank_of_stage
    groups = [("tp",), ("cp",), ("dp", "cp"), ("pp",), ("pp", "tp")]
    sets = {mesh.ranks_along(names, 0) for names in groups}
    if not config.model.untie_embeddings_and_output_weights:
        sets.add(tuple(sorted({stage * mesh.ranks_per_stage for stage in (holders[0], holders[-1])})))
    has_experts = config.model.num_experts is not None
    if (config.optimizer.updates_matrices or has_experts) and mesh.pp_size > 1:
        sets.add(mesh.ranks_along(("dp", "cp", "tp"), 0))
    if has_experts:
        sets |= {mesh.ranks_along(names, 0) for names in (("ep",), ("edp",))}
        sets.add(mesh.ranks_along(("cp", "tp") if config.parallel.sequence_parallel else ("cp",), 0))
    return (mesh.world_size > 1) + sum(len(ranks) > 1 for ranks in sets)


def reserve_bytes(config: Config, planned: float) -> float:
    """Returns the bytes that a device needs in addition to `planned` bytes of tensors; see CONTEXT_BYTES."""
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators(config) + FRAGMENTATION * planned


def fits(config: Config, planned: float) -> bool:
    """Returns whether a rank with `planned` bytes of tensors fits the device; True if the device is not
    known."""
    device = device_memory_bytes(config)
    return device is None or planned + reserve_bytes(config, planned) <= device
