#!/usr/bin/env python3
"""Counts the work of a training step on the simulated accelerator, and compares the numbers with goals.

    python benchmarks/step_cost.py --world-size 128 --tensor-model-parallel-size 4 \\
        --pipeline-model-parallel-size 4

The layers and the optimizer of a run are executed on tensors without values, so no GPU is needed, and no
figure is measured. Host synchronizations are counted in a whole simulated step. Bytes are counted for the
tensors that each operation reads and writes; layer_bytes.py compares the bytes of a layer with their minimum.
The rows with seconds are the planner's predictions for --gpu (default h100-80gb), with 50 GB/s per GPU
between nodes (8 GPUs share the 3200 Gbit/s of their node).

There are two estimates of MFU, with equal collectives, optimizer and pipeline. In the estimate "by roofline",
all calls of an operation in a pass take max(FLOPs / peak rate, bytes / bandwidth of the memory), a bound that
real kernels do not reach; the second table has the operations of a stage. The estimate "with fitted rates" is
the planner's prediction, with kernel rates that were fitted on published runs.

The model has 13B parameters. The command also accepts all flags of pretrain_gpt.py, which override the flags
of this model.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import chain

from benchmarks.machine import benchmark_parser
from megatron.arguments import parse_args
from megatron.cluster.devices import GPU, find_gpu
from megatron.config import Config
from megatron.errors import UserError
from megatron.planner.layer_memory import planned_run
from megatron.planner.network import ALL_REDUCE
from megatron.planner.simulation.passes import Collective, Kernel
from megatron.planner.simulation.stage_costs import StageCosts, rank_update, stage_costs
from megatron.planner.step_time import Cluster, find_cluster, planned_step, predict_step
from megatron.run import Run
from megatron.text_table import format_table
from tests.support.simulation.stages import simulate_ranks, syncs_per_micro_batch

_COMMON = (
    "--dry-run --bf16 --zero-stage 1 --micro-batch-size 1 --lr 1e-4 --train-iters 100 --vocab-size 50257 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --gpu h100-80gb --node-size 8 --inter-node-gbps 3200 "
    "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 "
    "--max-position-embeddings 2048 --global-batch-size 1024"
)
PASSES = ("forward", "backward", "weight")  # 'weight' only with zero bubble


@dataclass(frozen=True)
class Row:
    """A row of the table. met: whether the goal is met; None without a goal."""

    what: str
    value: str
    goal: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        return self.what, self.value, self.goal, {True: "met", False: "MISSED", None: "-"}[self.met]


@dataclass(frozen=True)
class Step:
    """The costs of a step on a rank in the middle of the pipeline, as the planner records them."""

    run: Run

    @classmethod
    def of(cls, config: Config) -> Step:
        assert config.model.vocab_size is not None
        return cls(planned_run(config, config.model.vocab_size))

    @property
    def rank(self) -> int:
        """Returns the middle pipeline rank."""
        return self.run.config.parallel.pipeline_model_parallel_size // 2

    @property
    def stages(self) -> list[int]:
        """Returns the stages of the middle rank."""
        return [stage for stage, rank in enumerate(self.run.stages.rank_of_stage) if rank == self.rank]

    def stage_costs(self) -> list[StageCosts]:
        return [stage_costs(self.run, stage) for stage in self.stages]

    def kernels(self, name: str) -> list[Kernel]:
        """Returns the kernels of one pass of a micro-batch. name: 'forward', 'backward' or 'weight'."""
        actions = chain.from_iterable(cost.passes[name] for cost in self.stage_costs())
        return [action for action in actions if isinstance(action, Kernel)]

    def collectives(self, group: str) -> list[tuple[Collective, int]]:
        """Returns (collective, number of calls in a step) for each collective of a group."""
        update, count = rank_update(self.run, self.rank), self.run.config.micro_batches_per_step
        passes = chain.from_iterable(chain(*cost.passes.values()) for cost in self.stage_costs())
        once = chain(*update.reductions, update.reduce, update.step, *update.gathers)
        return [
            (action, times)
            for actions, times in ((passes, count), (once, 1))
            for action in actions
            if isinstance(action, Collective) and action.group == group
        ]


def synchronization_rows(step: Step) -> list[Row]:
    """Returns the rows about host synchronizations in a simulated step: per micro-batch, and in the rest of
    the step."""
    parallel = step.run.config.parallel
    first = step.rank * parallel.world_size // parallel.pipeline_model_parallel_size
    (record,) = simulate_ranks(step.run.config, [first])
    often = sum(syncs_per_micro_batch(record).values())
    in_step = len(record.outside.syncs)
    for works in (record.first, record.last):
        for kind, work in works.items():
            in_step += len(work.syncs) - (len(record.rest[kind].syncs) if kind in record.rest else 0)
    return [
        Row("host synchronizations per micro-batch", str(often), "0", often == 0),
        Row("host synchronizations per step", str(in_step), "1", in_step <= 1),
    ]


def data_parallel_rows(step: Step) -> list[Row]:
    """Returns the rows about the bytes that a rank sends to its data-parallel group, and about the predicted
    exposed time."""
    config = step.run.config
    size, zero_stage = config.parallel.data_parallel_size, config.parallel.zero_stage
    sent = sum(times * wire_bytes(call, size) for call, times in step.collectives("data"))
    parameters = sum(step.run.stages.stage_parameters(stage) for stage in step.stages)
    goal = parameters * (4 + (4 if config.precision.name == "fp32" else 2)) * (size - 1) / size
    rows = [
        Row(
            f"ZeRO-{zero_stage} bytes on the wire per rank and step",
            f"{sent / 1e9:.3g} GB",
            f"gradients + weights: {goal / 1e9:.3g} GB",
            sent <= 1.01 * goal,
        )
    ]
    predicted = planned_step(step.run)
    if predicted is not None:
        share = (predicted.reduction + predicted.gather) / predicted.total
        tensor = predicted.exposed_communication - predicted.reduction - predicted.gather
        gather = _gather_seconds(step.run)
        rows += [
            Row(
                "exposed weight gather (predicted)",
                f"{100 * predicted.gather / gather:.0f} % of {1e3 * gather:.1f} ms",
                "<= 15 %",
                predicted.gather <= 0.15 * gather,
            ),
            Row(
                "exposed data-parallel communication (predicted)",
                f"{100 * share:.1f} % of {predicted.total:.2f} s",
                "<= 1 %",
                share <= 0.01,
            ),
            Row(
                "exposed tensor-parallel communication (predicted)",
                f"{100 * tensor / predicted.total:.1f} %",
                "-",
                None,
            ),
        ]
    return rows


def wire_bytes(call: Collective, ranks: int) -> float:
    """Returns the bytes that a rank sends for a collective with a ring algorithm. Reduce-scatter and
    all-gather send (n - 1) / n of the tensor; an all-reduce is a reduce-scatter and an all-gather."""
    return call.bytes * (2 if call.operation == ALL_REDUCE else 1) * (ranks - 1) / ranks


def _gather_seconds(run: Run) -> float:
    """Returns the predicted seconds of all all-gathers of weights on the first pipeline rank."""
    cluster, update = find_cluster(run.config), rank_update(run, 0)
    assert cluster is not None
    mesh = run.mesh
    calls = [action for action in chain(update.step, *update.gathers) if isinstance(action, Collective)]
    return sum(cluster.network.seconds(call, mesh) for call in calls if call.operation == "_allgather_base_")


class Roofline(Cluster):
    """A cluster of devices whose kernels reach the roofline."""

    contention = 0.0

    def kernel_seconds(self, kernel: Kernel, dtype: str) -> float:
        return self.gpu.least_seconds(kernel.flops, kernel.bytes, dtype)


def utilisation_rows(step: Step) -> list[Row]:
    """Returns the two estimates of MFU (see the module's docstring)."""
    cluster = find_cluster(step.run.config)
    if cluster is None:
        return []
    roofline = Roofline(cluster.kind, cluster.gpu, cluster.network, launch_s=0.0)
    bound, predicted = (predict_step(step.run, rates).mfu for rates in (roofline, cluster))
    return [
        Row("MFU by roofline", f"{100 * bound:.0f} %", ">= 50 %", bound >= 0.5),
        Row("MFU with fitted rates", f"{100 * predicted:.0f} %", "", None),
    ]


def operations_table(step: Step, gpu: GPU) -> str:
    """Returns the table of the middle rank's operations in a micro-batch, the operation with the most time
    first. Operations below 1 % of the time share one row."""
    dtype = step.run.config.precision.name
    cells: list[tuple[str, ...]] = [("pass", "operation", "calls", "GFLOP", "MB", "us", "bound by")]
    operations: dict[tuple[str, str], list[Kernel]] = {}
    for kind in PASSES:
        for kernel in step.kernels(kind):
            operations.setdefault((kind, kernel.name), []).append(kernel)

    def seconds(kernels: list[Kernel]) -> float:
        return gpu.least_seconds(
            sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels), dtype
        )

    least = sum(map(seconds, operations.values())) / 100
    shown: dict[tuple[str, str], list[Kernel]] = {}
    for (kind, name), kernels in operations.items():
        shown.setdefault((kind, name if seconds(kernels) >= least else "others"), []).extend(kernels)
    for kind in PASSES:
        rows = [(name, kernels) for (of, name), kernels in shown.items() if of == kind]
        for name, kernels in sorted(rows, key=lambda row: (row[0] == "others", -seconds(row[1]))):
            flops, moved = sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels)
            by_memory = moved / gpu.bandwidth > flops / gpu.peak_flops[dtype]
            numbers = (
                str(len(kernels)),
                f"{flops / 1e9:,.0f}",
                f"{moved / 1e6:,.0f}",
                f"{1e6 * seconds(kernels):,.1f}",
            )
            cells.append((kind, name, *numbers, "memory" if by_memory else "GEMMs"))
    return format_table(cells, left_align=(0, 1, 6))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--kernels",
        choices=("triton", "pytorch"),
        default="triton",
        help="kernels whose launches are counted",
    )
    arguments, flags = parser.parse_known_args()
    os.environ["MEGATRON_KERNELS"] = arguments.kernels  # read by the simulation and by the plan
    try:
        config = parse_args([*_COMMON.split(), *flags], {})
        if config.parallel.pipeline_model_parallel_size < 3:
            raise UserError("--pipeline-model-parallel-size must be at least 3: a middle stage is measured")
        step = Step.of(config)
        rows = [*synchronization_rows(step), *data_parallel_rows(step)]
    except UserError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    rows += utilisation_rows(step)
    cells: list[tuple[str, ...]] = [("what", arguments.kernels, "goal", "")]
    cells += [row.cells() for row in rows]
    print(f"counted on the simulated accelerator, pipeline rank {step.rank}; no GPU was used")
    print(format_table(cells, left_align=(0, 3)))
    if (gpu := find_gpu(config)) is not None:
        print("\nroofline time of the operations of a micro-batch on this rank")
        print(operations_table(step, gpu))


if __name__ == "__main__":
    main()
