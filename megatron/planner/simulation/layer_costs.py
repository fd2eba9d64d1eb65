"""Records the costs of a run's layers and of its optimizer step on the simulated device.

The run's own code builds and runs a small model without pipeline parallelism: embedding, two transformer
layers (or recomputed groups of layers; four with ZeRO-2 and 3, which prefetch), final norm, head and loss.
One micro-batch is recorded, after tables and buffers exist. The costs of any stage are then assembled from
these layers, because all transformer layers between the first and the last have equal costs.

The optimizer step is recorded with all parameters of a rank, without passes of micro-batches.

A process that has called this module cannot be used for anything else afterwards: see `processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.cluster import processes
from megatron.config import Config, ConfigError
from megatron.config.model import padded_vocab_size
from megatron.engine.pipeline_engine import mixed_precision_optimizer, plain_optimizer
from megatron.model.layer_context import LayerIO, split_layer_io
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.logit_chunks import chunk_sizes
from megatron.mpu.mesh import Mesh
from megatron.mpu.products import quantize_weights
from megatron.mpu.vector_math import initialize_vector_math
from megatron.mpu.weight_gradient import Deferred, accumulate, supports_fused_accumulation
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.planner.simulation.costs import LayerCost, ModelCosts, PassCost, Spec, UpdateCosts
from megatron.planner.simulation.device import CollectiveCall, SimulatedDevice
from megatron.planner.simulation.memory_tracker import MemoryTracker
from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait, group_name
from megatron.planner.simulation.rank_process import (
    SimulatedAccelerator,
    no_values,
    simulated_process,
    state_tensors,
)

_EOD = 0
_MOST_CHUNKS = 8192


class _Recorder:
    """Records actions and memory between `begin` and `end`. See `device.Trace` for the `add_` methods."""

    def __init__(self, memory: MemoryTracker, mesh: Mesh) -> None:
        """mesh: the layout, which gives the process groups of collectives their names."""
        self._memory, self._layout = memory, mesh
        self._started: list[dist.Work | None] = []
        self.restart()

    def restart(self) -> None:
        """Discards everything that was recorded so far."""
        self._costs: dict[tuple[str, int], PassCost] = {}
        self._pass: tuple[str, int] | None = None
        self._start, self._actions = 0, list[Action]()

    def begin(self, name: str, index: int = 0) -> None:
        """Starts to record the pass `name` of layer `index`."""
        self.end()
        self._pass, self._start, self._actions = (name, index), self._memory.total, []
        self._memory.restart_peak()

    def end(self) -> None:
        """Ends the pass that is being recorded."""
        if self._pass is not None:
            peak, total = self._memory.peak - self._start, self._memory.total - self._start
            self._costs[self._pass] = PassCost(tuple(self._actions), peak, total)
        self._pass = None

    def cost(self, name: str, index: int = 0) -> PassCost:
        """Returns the recorded cost of a pass; an empty cost if the pass was not recorded."""
        return self._costs.get((name, index), PassCost())

    def add_operation(self, kernel: Kernel, bytes_written: int) -> None:
        self._actions.append(kernel)

    def add_call(self, call: CollectiveCall, work: dist.Work | None = None) -> None:
        self._started.append(work)
        group = group_name(call.ranks, self._layout)
        self._actions.append(Collective(group, call.operation, call.bytes))

    def add_wait(self, work: dist.Work) -> None:
        for age, started in enumerate(reversed(self._started)):
            if started is work:
                self._actions.append(Wait(age))
                return

    def add_sync(self, cause: str) -> None:
        """Records nothing, because predictions do not count the time of host synchronizations."""


class _ObservedModel(GPTModelPipe):
    """The run's model. Its layers are recorded one by one."""

    def observe(self, recorder: _Recorder, is_alive: Callable[[int], bool]) -> None:
        """Starts to record the layers. is_alive: see `MemoryTracker.is_alive`."""
        self.recorder, self._is_alive = recorder, is_alive
        self.entries: list[tuple[range, tuple[Spec, ...]]] = []
        self.freed_inputs: list[int] = []
        self._input: tuple[int, int] | None = None

    def run_layers(self, positions: range, run: Callable[[LayerIO], LayerIO], inputs: LayerIO) -> LayerIO:
        self._note_input(inputs)
        index = len(self.entries)
        self.recorder.begin("forward", index)
        outputs = super().run_layers(positions, run, inputs)
        self.entries.append((positions, _specs(outputs)))
        hidden, _ = split_layer_io(outputs)
        if hidden.requires_grad and hidden is not split_layer_io(inputs)[0]:
            # Registered after the tensor's own hooks: a hook of the next layer copies the gradient.
            assert hidden.grad_fn is not None
            hidden.grad_fn.register_prehook(lambda gradients: self.recorder.begin("backward", index))
        return outputs

    def loss(self, outputs: Tensor, loss_inputs: tuple[Tensor, ...]) -> Tensor:
        self._note_input(outputs)
        self.recorder.begin("forward", len(self.entries))
        return super().loss(outputs, loss_inputs)

    def begin_backward(self, host_bytes: int) -> None:
        """Ends the forward pass and begins the backward pass. host_bytes: bytes that are allocated in host
        memory."""
        self.recorder.begin("backward", len(self.entries))
        self._note_freed_input()
        self.host_bytes = host_bytes

    def deferred_by_entry(self, deferred: Deferred) -> dict[int, Deferred]:
        """Moves the deferred gradients to one list for each entry. If lists shared gradients, they would keep
        each other's memory."""
        owners: dict[torch.Tensor, int] = {
            parameter: index
            for index, (positions, _) in enumerate(self.entries)
            for position in positions
            if position in self.layers
            for parameter in self.layers[position].parameters()
        }
        found: dict[int, Deferred] = {}
        while deferred:
            owner = owners.get(deferred[0][0], len(self.entries))  # no owner: a layer that the loss runs
            found.setdefault(owner, []).append(deferred.pop(0))
        return found

    def _note_freed_input(self) -> None:
        """Records how many bytes of the last layer's input are freed: all or none."""
        if self._input is not None:
            key, size = self._input
            self.freed_inputs.append(0 if self._is_alive(key) else size)
            self._input = None

    def _note_input(self, inputs: LayerIO) -> None:
        self._note_freed_input()
        storage = split_layer_io(inputs)[0].untyped_storage()
        self._input = storage._cdata, storage.nbytes()


def record_layers(config: Config, vocab_size: int, num_entries: int, kernels: bool) -> ModelCosts:
    """Returns the costs of the layers of a configuration with few layers and without pipeline parallelism.
    num_entries: length of the layer list. kernels: whether the device runs Triton kernels. Raises ConfigError
    if the loss is computed in too many chunks to record."""
    _check_chunks(config, vocab_size)
    with _rank_on_device(config, vocab_size, (0, num_entries), 0, kernels) as rank:
        simulated, model, recorder = rank.simulated, rank.model, rank.recorder
        before = simulated.memory.total
        model.observe(recorder, simulated.memory.is_alive)
        if config.parallel.shards_gradients:  # the first pass finds the order of prefetching
            _run_micro_batch(rank)
        else:
            _make_tables(rank)
        recorder.restart()
        model.observe(recorder, simulated.memory.is_alive)
        tables, on_host = simulated.memory.total - before, simulated.host_memory.total
        head_input = _run_micro_batch(rank)
        entries = [(part.start, part.stop, output) for part, output in model.entries]
        entries.append((entries[-1][1], num_entries, head_input))
        layers = tuple(
            LayerCost(
                first,
                end,
                recorder.cost("forward", index),
                recorder.cost("backward", index),
                recorder.cost("weight", index),
                model.freed_inputs[index],
                output,
            )
            for index, (first, end, output) in enumerate(entries)
        )
        return ModelCosts(layers, tables, model.host_bytes - on_host)


def _check_chunks(config: Config, vocab_size: int) -> None:
    """Raises ConfigError if the fused loss has too many chunks, because recording one chunk takes
    milliseconds."""
    tokens = config.batch.micro_batch_size * config.seq_length_per_rank
    tp_size = config.parallel.tensor_model_parallel_size
    element_size = 4 if config.precision.name == "fp32" else 2
    columns = padded_vocab_size(vocab_size, config.model, tp_size) // tp_size
    sizes = chunk_sizes(tokens, columns, config.model.hidden_size, element_size, on_cpu=False)
    if tokens > _MOST_CHUNKS * sizes.tokens:
        raise ConfigError(
            f"--micro-batch-size {config.batch.micro_batch_size} x --seq-length {config.model.seq_length}: "
            f"the loss of {tokens:,} tokens has {-(-tokens // sizes.tokens):,} chunks. Expected at most "
            f"{_MOST_CHUNKS:,}. Reduce one of the two, or increase --tensor-model-parallel-size."
        )


def _run_micro_batch(rank: _Rank) -> tuple[Spec, ...]:
    """Runs the passes of a micro-batch as the engine does. Returns the shapes and dtypes of the loss's
    input."""
    model, optimizer, tokens = rank.model, rank.optimizer, rank.tokens()
    mask = torch.ones(tokens.shape, device=tokens.device)
    inputs = [tokens] * model.loss_reads_tokens
    labels = model.loss_inputs(torch.zeros_like(tokens), mask, [1] * model.loss_depths, *inputs)
    optimizer.unit_overlap.begin_micro_batch()
    scale = optimizer.scaler.scale
    with model.metrics.recording():
        with model.dropout_rng.use_samples(range(len(tokens))), model.fused_head_loss(scale):
            outputs = model(tokens)
            loss = model.loss(outputs, labels)
        model.begin_backward(rank.simulated.host_memory.total)
        (loss * scale).backward()
    if model.deferred_gradients is not None:
        for index, deferred in model.deferred_by_entry(model.deferred_gradients.take()).items():
            model.recorder.begin("weight", index)
            accumulate(deferred)
    model.recorder.end()
    return _specs(outputs)


@torch.no_grad()
def _make_tables(rank: _Rank) -> None:
    """Runs the layers once, so that they create the tables and metrics that they keep for all
    micro-batches."""
    tokens = rank.tokens()
    with rank.model.metrics.recording(), rank.model.dropout_rng.use_samples(range(len(tokens))):
        rank.model(tokens)


def record_update(
    config: Config, vocab_size: int, bounds: tuple[int, ...], rank: int, kernels: bool
) -> UpdateCosts:
    """Returns the state and the optimizer step of a rank. bounds: layer indices at which the stages begin,
    and the end of the last stage. kernels: whether the device runs Triton kernels."""
    with _rank_on_device(config, vocab_size, bounds, rank, kernels) as on_device:
        simulated, optimizer, recorder = on_device.simulated, on_device.optimizer, on_device.recorder
        optimizer.master_update.run(1.0)  # because optimizers allocate their state in the first step
        optimizer.begin_step()
        for index, bucket in enumerate(reversed(optimizer.buckets)):
            recorder.begin("reduction", index)
            bucket.start_reduction()
        recorder.begin("reduce")
        optimizer.reduce_gradients()
        recorder.begin("step")
        optimizer.step()
        for index, bucket in enumerate(optimizer.buckets):
            recorder.begin("gather", index)
            bucket.begin_forward()
        recorder.begin("quantization")
        quantize_weights(on_device.model)
        recorder.end()
        state = simulated.memory.sizes_of(state_tensors(on_device.model, optimizer))
        count = len(optimizer.buckets)
        before_layers = [recorder.cost("gather", index).actions for index in range(count)]
        waits = [sum(isinstance(action, Wait) for action in part) for part in before_layers]
        chained = [action for action in chain(*before_layers) if isinstance(action, Collective)]
        step = recorder.cost("step").actions
        # At its end the step starts the all-gathers for which layers of the next step wait.
        end = len(step) - (sum(waits) - len(chained))
        starts = iter([*(action for action in step[end:] if isinstance(action, Collective)), *chained])
        return UpdateCosts(
            state["parameters"],
            state["gradients"],
            state["optimizer"],
            simulated.host_memory.total,
            tuple(recorder.cost("reduction", index).actions for index in range(count)),
            recorder.cost("reduce").actions,
            (*step[:end], *recorder.cost("quantization").actions),
            tuple(tuple(islice(starts, number)) for number in waits),
            bool(chained),
            max(recorder.cost("reduce").peak, recorder.cost("step").peak),
        )


@dataclass(frozen=True)
class _Rank:
    """A rank on the simulated device, with its model and optimizer."""

    config: Config
    simulated: SimulatedDevice
    model: _ObservedModel
    optimizer: MixedPrecisionOptimizer
    recorder: _Recorder

    def tokens(self) -> Tensor:
        """Returns the tokens of a micro-batch, without values."""
        shape = (self.config.batch.micro_batch_size, self.config.model.seq_length)
        return torch.zeros(shape, dtype=torch.int64, device=self.simulated.device)


@contextmanager
def _rank_on_device(
    config: Config, vocab_size: int, bounds: tuple[int, ...], rank: int, kernels: bool
) -> Iterator[_Rank]:
    """Yields the model and the optimizer of a rank on the simulated device."""
    initialize_vector_math()
    mesh = Mesh.from_config(config.parallel, rank)
    memory = MemoryTracker()
    recorder = _Recorder(memory, mesh)
    simulated = SimulatedDevice(recorder, memory)
    with simulated_process(mesh, SimulatedAccelerator(simulated, kernels)):
        processes.init_distributed(config, FakeStore())
        mesh = mesh.connect()
        model = _ObservedModel(config, mesh, vocab_size, _EOD, bounds, no_values)
        for weight in islice(model.parameters(), 1):  # a rank without layers has no parameters
            supports_fused_accumulation(weight)  # asks the device, once per process
        plain = plain_optimizer(config, model)
        optimizer = mixed_precision_optimizer(config, mesh, model, plain)
        yield _Rank(config, simulated, model, optimizer, recorder)


def _specs(layer_io: LayerIO) -> tuple[Spec, ...]:
    tensors = (layer_io,) if isinstance(layer_io, Tensor) else layer_io
    return tuple((tuple(x.shape), x.dtype) for x in tensors)
