#!/usr/bin/env python3
"""Counts the work of a training step on the simulated accelerator, and compares it with goals.

    python benchmarks/step_cost.py --preset 13B --world-size 128 --tensor-model-parallel-size 4 \\
        --pipeline-model-parallel-size 4

The real step (model, engine, optimizer, schedule) runs on tensors without values: no GPU is needed, and no
figure is measured. The cost of a layer is the difference between models with one and with two layers per
stage. Bytes are counted for the tensors that each operation reads and writes. The rows with seconds are the
planner's predictions for --gpu (default h100-80gb) with 50 GB/s per GPU between nodes: 8 GPUs share the 3200
Gbit/s of their node.

There are two estimates of MFU, with equal collectives, optimizer and pipeline. "by roofline": all calls of an
operation in a pass take max(FLOPs / peak rate, bytes / bandwidth of the memory), a bound that real kernels do
not reach; the second table has the operations of a stage. "with fitted rates": the planner's prediction, with
kernel rates that were fitted on published runs.

The command also takes all flags of pretrain_gpt.py, which replace the flags of the preset.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain

from benchmarks.machine import benchmark_parser
from megatron.arguments import parse_args
from megatron.cluster.devices import find_gpu
from megatron.config import Config
from megatron.config.registries import LAYER_ARRANGEMENTS, POSITION_EMBEDDINGS
from megatron.errors import UserError
from megatron.model.layer_kinds import layer_kinds
from megatron.mpu.mesh import Mesh
from megatron.pipeline.schedule import simulate_schedule
from megatron.pipeline.stages import StagePlan
from megatron.planner.simulation.passes import Collective, Kernel
from megatron.planner.simulation.stage_costs import rank_update
from megatron.planner.step_time import Cluster, find_cluster, planned_step, predict_step
from megatron.text_table import format_table
from tests.support.simulation.rank import find_stages
from tests.support.simulation.record import STEP, Instruction, OpCounts, OperationCount, StepRecord
from tests.support.simulation.stages import simulate_ranks, syncs_per_micro_batch

_COMMON = (
    "--dry-run --bf16 --zero-stage 1 --micro-batch-size 1 --lr 1e-4 --train-iters 100 --vocab-size 50257 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --gpu h100-80gb --node-size 8 --inter-node-gbps 3200"
)
PRESETS = {
    "13B": "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 "
    "--max-position-embeddings 2048 --global-batch-size 1024",
    "quick": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --global-batch-size 64",
}
# Flags that replace the flags of the command.
VARIANTS: dict[str, dict[str, object]] = {
    "no hidden dropout": {"model.hidden_dropout": 0.0},
    "no attention dropout": {"model.attention_dropout": 0.0},
    "no dropout": {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0},
}
# With this method, a multiple of the number of stages gives every stage an equal number of layers.
_BY_LAYERS = {"parallel.partition_method": "type:transformer"}
# The unit of the goals is the forward time of half a stage. Its backward pass takes 2 units, so a step
# without a bubble takes 3 * 2 * 16 units.
RANKS, MICRO_BATCHES = 8, 16
PASSES = ("ForwardPass", "BackwardPass", "WeightGradPass")  # the last only with zero-bubble
# (schedule, stages per rank) -> goal.
SCHEDULE_GOALS = {("1f1b", 1): 138, ("dualpipev", 2): 130, ("interleaved", 2): 117, ("zero-bubble", 1): 110}


_COPY = "copy to device"


@dataclass(frozen=True)
class Row:
    """A line of the table. met: whether the goal is met; None without a goal."""

    what: str
    value: str
    goal: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        return self.what, self.value, self.goal, {True: "met", False: "MISSED", None: "-"}[self.met]


@dataclass(frozen=True)
class LayerCost:
    """Cost of a transformer layer per micro-batch: its forward pass, and the bytes kept for the backward."""

    launches: float
    bytes: float
    kept_bytes: float


@dataclass(frozen=True)
class Simulated:
    """The simulated step of a rank in the middle of the pipeline and of all pipeline ranks, and the cost of a
    layer in each of VARIANTS."""

    config: Config
    record: StepRecord
    ranks: list[StepRecord]
    layers: dict[str, LayerCost]


def simulate(config: Config) -> Simulated:
    """Simulates the step, and models with one and with two layers per stage for the cost of a layer."""
    parallel = config.parallel
    stages = parallel.num_stages
    middle, count = parallel.pipeline_model_parallel_size // 2, parallel.pipeline_model_parallel_size
    ranks = range(0, parallel.world_size, parallel.world_size // count)
    one = config.with_settings({"model.num_layers": stages, **_BY_LAYERS})
    two = config.with_settings({"model.num_layers": 2 * stages, **_BY_LAYERS})
    others = [two.with_settings(settings) for settings in VARIANTS.values()]
    records = simulate_ranks(config, ranks)
    chunks = parallel.stages_per_rank
    small = [simulate_ranks(each, [ranks[middle]])[0] for each in (one, two, *others)]
    lower, upper, *found = map(_forward_cost, small)
    layer = [(b - a) / chunks for a, b in zip(lower, upper, strict=True)]
    costs = {"dropout": LayerCost(*layer)}
    for variant, other in zip(VARIANTS, found, strict=True):
        # The models differ only in the dropout of their two layers per stage.
        less = [(a - b) / (2 * chunks) for a, b in zip(upper, other, strict=True)]
        costs[variant] = LayerCost(*(a - b for a, b in zip(layer, less, strict=True)))
    return Simulated(config, records[middle], records, costs)


def _forward_cost(record: StepRecord) -> tuple[float, float, float]:
    """Returns launches and bytes of the forward pass of a micro-batch, and the bytes that are kept for its
    backward pass."""
    counts = [
        count
        for kind, work in record.rest.items()
        for name, count in work.operations.items()
        if kind.kind == "ForwardPass" and name != _COPY  # of the dropout keys, once for all layers
    ]
    launches = sum(count.calls for count in counts)
    return launches, sum(map(_moved, counts)), max(record.peak.activations)


def _moved(count: OperationCount) -> int:
    return count.bytes_read + count.bytes_written


def layer_rows(simulated: Simulated) -> list[Row]:
    """Rows of a transformer layer: launches, bytes of dropout, and memory that attention keeps."""
    config = simulated.config
    costs = simulated.layers
    batch, model, parallel = config.batch, config.model, config.parallel
    shards = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    elements = batch.micro_batch_size * model.seq_length * model.hidden_size / shards
    size = 4 if config.precision.name == "fp32" else 2
    # A layer has two; without dropout each residual addition moves three elements, and each bias that the
    # row-parallel layer leaves out two.
    ends_with_norm = LAYER_ARRANGEMENTS[model.layer_arrangement].ends_with_norm
    has_bias = parallel.tensor_model_parallel_size > 1 and not model.disable_bias_linear
    additions = size * (5 if has_bias and not ends_with_norm else 3)
    hidden = (costs["dropout"].bytes - costs["no hidden dropout"].bytes) / 2 / elements + additions
    heads = model.num_attention_heads / parallel.tensor_model_parallel_size
    rows = batch.micro_batch_size * heads * model.seq_length
    more = costs["dropout"].kept_bytes - costs["no attention dropout"].kept_bytes
    kept = more + 4 * rows  # PyTorch's flash attention keeps one fp32 number per row
    launches, without = costs["dropout"].launches, costs["no dropout"].launches
    moved, least = costs["dropout"].bytes, least_layer_bytes(config)
    return [
        Row("kernel launches per transformer layer, forward", f"{launches:g}", "<= 30", launches <= 30),
        Row("kernel launches without dropout", f"{without:g}", "<= 15", without <= 15),
        Row(
            "bytes moved per transformer layer, forward, and their minimum",
            f"{moved / 1e6:,.0f} MB, {moved / least:.2f} x",
            "<= 1.25 x",
            moved <= 1.25 * least,
        ),
        Row(
            "bytes moved per hidden dropout with bias and residual, forward",
            f"{hidden:.1f} per element",
            f"{3 * size}",
            hidden <= 3 * size + 0.1,
        ),
        Row(
            "attention memory kept in addition to q, k, v, output, per layer and micro-batch",
            f"{kept / 2**20:,.2f} MiB, {kept / rows:,.0f} bytes per row",
            "O(s)",
            kept / rows < model.kv_channels,
        ),
    ]


def least_layer_bytes(config: Config) -> float:
    """Returns the bytes that a transformer layer's forward pass moves if each operation reads its operands
    once and writes its result once: two norms, four matrix products with their weights, the split of the
    projection with its rotation (without rotary positions it is a view), attention, the MLP's activation and
    two residual additions with their dropouts and skipped biases."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    hidden, shards = model.hidden_size, tp_size if config.parallel.sequence_parallel else 1
    parts = 1 if model.glu_activation is None else 2
    query, key, ffn = (n / tp_size for n in (model.query_width, model.key_width, model.ffn_hidden_size))
    rotates = POSITION_EMBEDDINGS.load(model.position_embedding_type).rotary is not None
    per_token = (
        2 * 2 * hidden / shards
        + 2 * 3 * hidden / shards
        + (hidden + query + 2 * key)
        + rotates * 2 * (query + 2 * key)
        + (2 * query + 2 * key)
        + (query + hidden)
        + (hidden + parts * ffn)
        + (parts * ffn + ffn)
        + (ffn + hidden)
    )
    tokens = config.batch.micro_batch_size * model.seq_length
    size = 4 if config.precision.name == "fp32" else 2
    return size * (tokens * per_token + layer_kinds(model)[0].matrix_elements / tp_size)


def synchronization_rows(simulated: Simulated) -> list[Row]:
    """Rows of host synchronizations: per micro-batch, and in the rest of the step."""
    record = simulated.record
    often = sum(syncs_per_micro_batch(record).values())
    in_step = len(record.outside.syncs)
    for works in (record.first, record.last):
        for kind, work in works.items():
            in_step += len(work.syncs) - (len(record.rest[kind].syncs) if kind in record.rest else 0)
    return [
        Row("host synchronizations per micro-batch", str(often), "0", often == 0),
        Row(f"host synchronizations per {STEP}", str(in_step), "1", in_step <= 1),
    ]


def data_parallel_rows(simulated: Simulated) -> list[Row]:
    """Rows of the bytes that a rank sends to its data-parallel group, and of the predicted exposed time."""
    config, record = simulated.config, simulated.record
    size, peers = config.parallel.data_parallel_size, data_parallel_ranks(config, record.rank)
    sent = sum(wire_bytes(work, peers) for work in record.counts) if size > 1 else 0.0
    weights = record.parameters * (4 if config.precision.name == "fp32" else 2)
    gradients = record.parameters * 4
    goal = (gradients + weights) * (size - 1) / size
    rows = [
        Row(
            f"ZeRO-{config.parallel.zero_stage} bytes on the wire per rank and step",
            f"{sent / 1e9:.3g} GB",
            f"gradients + weights: {goal / 1e9:.3g} GB",
            sent <= 1.01 * goal,
        )
    ]
    vocab, plan = find_stages(config)
    step = planned_step(config, plan, vocab.size)
    if step is not None:
        share = (step.reduction + step.gather) / step.total
        gather = _gather_seconds(config, plan, vocab.size)
        rows += [
            Row(
                "exposed weight gather (predicted)",
                f"{100 * step.gather / gather:.0f} % of {1e3 * gather:.1f} ms",
                "<= 15 %",
                step.gather <= 0.15 * gather,
            ),
            Row(
                "exposed data-parallel communication (predicted)",
                f"{100 * share:.1f} % of {step.total:.2f} s",
                "<= 1 %",
                share <= 0.01,
            ),
            Row(
                "exposed tensor-parallel communication (predicted)",
                f"{100 * (step.exposed_communication - step.reduction - step.gather) / step.total:.1f} %",
                "-",
                None,
            ),
        ]
    return rows


def _gather_seconds(config: Config, plan: StagePlan, vocab_size: int) -> float:
    """Returns the predicted seconds of all all-gathers of the first pipeline rank's weights."""
    cluster, update = find_cluster(config), rank_update(config, plan, vocab_size, 0)
    assert cluster is not None
    mesh = Mesh.from_config(config.parallel, 0)
    calls = [action for action in chain(update.step, *update.gathers) if isinstance(action, Collective)]
    return sum(cluster.network.seconds(call, mesh) for call in calls if call.operation == "_allgather_base_")


class Roofline(Cluster):
    """The rates of devices whose kernels reach the roofline."""

    contention = 0.0

    def kernel_seconds(self, kernel: Kernel, dtype: str) -> float:
        return self.gpu.least_seconds(kernel.flops, kernel.bytes, dtype)


def utilisation_rows(simulated: Simulated) -> list[Row]:
    """Returns the two estimates of MFU (see the module's docstring)."""
    config, cluster = simulated.config, find_cluster(simulated.config)
    if cluster is None:
        return []
    vocab, plan = find_stages(config)
    roofline = Roofline(cluster.kind, cluster.gpu, cluster.network, launch_s=0.0)
    bound = predict_step(config, plan, vocab.size, roofline).mfu
    predicted = predict_step(config, plan, vocab.size, cluster).mfu
    return [
        Row("MFU by roofline", f"{100 * bound:.0f} %", ">= 50 %", bound >= 0.5),
        Row("MFU with fitted rates", f"{100 * predicted:.0f} %", "", None),
    ]


def _operations(record: StepRecord, kind: str, chunk: int = 0) -> Mapping[str, OperationCount]:
    """Returns the operations of a pass in the middle of the step; none if the schedule has no such pass."""
    instruction = Instruction(kind, chunk)
    work = record.rest.get(instruction) or record.first.get(instruction)
    return {} if work is None else work.operations


def _least_seconds(config: Config, count: OperationCount) -> float:
    """Returns the roofline seconds of these calls of an operation."""
    gpu = find_gpu(config)
    assert gpu is not None
    return gpu.least_seconds(count.flops, _moved(count), config.precision.name)


def operations_table(simulated: Simulated) -> str:
    """Returns the table of the middle rank's operations in a micro-batch, the longest first. Operations below
    1 % of the time share one line."""
    cells: list[tuple[str, ...]] = [("pass", "operation", "calls", "GFLOP", "MB", "us", "bound by")]
    passes = {kind: _operations(simulated.record, kind) for kind in PASSES}
    times = {
        (kind, name): _least_seconds(simulated.config, count)
        for kind, operations in passes.items()
        for name, count in operations.items()
    }
    least = sum(times.values()) / 100
    for kind, operations in passes.items():
        if not operations:
            continue
        longest = sorted(operations, key=lambda name: times[kind, name], reverse=True)
        shown = [name for name in longest if times[kind, name] >= least]
        rest = [operations[name] for name in longest if times[kind, name] < least]
        rows = [(name, operations[name], times[kind, name]) for name in shown]
        others = sum((times[kind, name] for name in longest if times[kind, name] < least), 0.0)
        columns = zip(*((0, 0, 0, 0), *map(astuple, rest)), strict=True)
        rows.append(("others", OperationCount(*map(sum, columns)), others))
        cells += [(kind, *_cells_of(simulated.config, *row)) for row in rows]
    return format_table(cells, left_align=(0, 1, 6))


def _cells_of(config: Config, name: str, count: OperationCount, seconds: float) -> tuple[str, ...]:
    gpu = find_gpu(config)
    assert gpu is not None
    by_memory = seconds > count.flops / gpu.peak_flops[config.precision.name]
    return (
        name,
        str(count.calls),
        f"{count.flops / 1e9:,.0f}",
        f"{_moved(count) / 1e6:,.0f}",
        f"{1e6 * seconds:,.1f}",
        "memory" if by_memory else "GEMMs",
    )


def data_parallel_ranks(config: Config, rank: int) -> tuple[int, ...]:
    """Returns the global ranks of the data-parallel group of `rank`."""
    mesh = Mesh.from_config(config.parallel, rank)
    first = mesh.pp.rank * mesh.tp_size * mesh.dp_size + rank % mesh.tp_size
    return tuple(first + mesh.tp_size * index for index in range(mesh.dp_size))


def wire_bytes(work: OpCounts, peers: Sequence[int]) -> float:
    """Returns the bytes that a rank sends for the collectives of a group with ring algorithms. Reduce-scatter
    and all-gather send (n - 1) / n of the tensor; an all-reduce is one of each."""
    return sum(
        call.bytes * (2 if call.operation.startswith("allreduce") else 1) * (len(peers) - 1) / len(peers)
        for call in work.calls
        if call.ranks == tuple(peers)
    )


def schedule_rows() -> list[Row]:
    """Rows of the simulated step of each schedule, with equal stages."""
    rows = []
    name = (
        f"step, p = {RANKS}, m = {MICRO_BATCHES}, in half-stage forward times (ideal {6 * MICRO_BATCHES}): "
    )
    for (schedule, chunks), goal in SCHEDULE_GOALS.items():
        forward = [2 / chunks] * (RANKS * chunks)
        backward = [2 * time for time in forward]
        transfer = [0.0] * (len(forward) - 1)
        found = simulate_schedule(schedule, forward, backward, transfer, MICRO_BATCHES, chunks).makespan
        rows.append(Row(name + schedule, f"{found:g}", f"{goal}", found <= goal))
        name = "  "
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="13B", help="sizes of the model and of the batch"
    )
    parser.add_argument(
        "--kernels",
        choices=("triton", "pytorch"),
        default="triton",
        help="kernels whose launches are counted",
    )
    arguments, flags = parser.parse_known_args()
    os.environ["MEGATRON_KERNELS"] = arguments.kernels  # read by the simulation and by the plan
    try:
        config = parse_args([*_COMMON.split(), *PRESETS[arguments.preset].split(), *flags], {})
        if config.parallel.pipeline_model_parallel_size < 3:
            raise UserError("--pipeline-model-parallel-size must be at least 3: a middle stage is measured")
        simulated = simulate(config)
    except UserError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    rows = [*layer_rows(simulated), *synchronization_rows(simulated), *data_parallel_rows(simulated)]
    rows += utilisation_rows(simulated)
    cells: list[tuple[str, ...]] = [("what", arguments.kernels, "goal", "")]
    cells += [row.cells() for row in (*rows, *schedule_rows())]
    print(f"counted on the simulated accelerator, rank {simulated.record.rank}; no GPU was used")
    print(format_table(cells, left_align=(0, 3)))
    if find_gpu(config) is not None:
        print("\nroofline time of the operations of a micro-batch on this rank")
        print(operations_table(simulated))


if __name__ == "__main__":
    main()
