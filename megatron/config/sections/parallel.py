"""The number of processes and how the model is distributed over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag
from megatron.config.registries import PARTITION_METHODS, PIPELINE_SCHEDULES, PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Parallel sizes, the pipeline's partition and schedule, ZeRO, and the communication backend."""

    group: ClassVar[str] = "distributed"

    tensor_model_parallel_size: int = flag(
        1,
        at_least=1,
        help="tensor-parallel size (TP)",
        group=COMMON_FLAGS,
    )
    pipeline_model_parallel_size: int = flag(
        1,
        at_least=1,
        at_most=100_000,
        help="pipeline-parallel size (PP), the number of pipeline ranks",
        group=COMMON_FLAGS,
    )
    partition_method: str = flag(
        "type:transformer",
        aliases=("--pp-partition-method",),
        strip_quotes=True,
        metavar="METHOD",
        registry=PARTITION_METHODS,
        help="how layers are assigned to pipeline stages, see docs/partition.md",
    )
    partition_profile: str | None = flag(
        None,
        metavar="FILE",
        help="file of layer times for --partition-method profile: written if missing, read if present",
    )
    pipeline_schedule: str = flag(
        derived="1f1b; with --virtual-pipeline-stages interleaved",
        choices=PIPELINE_SCHEDULES,
        help="pipeline schedule",
    )
    virtual_pipeline_stages: int = flag(
        1,
        aliases=("--num-virtual-stages-per-pipeline-rank",),
        at_least=1,
        at_most=10_000,
        metavar="N",
        help="with the schedule interleaved: pipeline stages per pipeline rank, 2 or more",
    )
    sequence_parallel: bool = flag(
        False,
        help="shard norms, dropout and residual connections along the sequence dimension over the "
        "tensor-parallel group, which reduces activation memory",
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    tp_comm_overlap: bool = flag(
        False,
        help="with --sequence-parallel: divide the all-gather before a matrix product and the reduce-scatter "
        "after one into chunks of the sequence; each overlaps with the product of another chunk",
        needs={
            "parallel.sequence_parallel": "it divides collectives along the sequence, add "
            "--sequence-parallel or remove it"
        },
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    tp_comm_overlap_chunks: int = flag(
        2,
        at_least=2,
        at_most=64,
        metavar="N",
        help="with --tp-comm-overlap: number of chunks, the largest up to N that divides --seq-length / TP",
        used_with=("parallel.tp_comm_overlap",),
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    zero_stage: int = flag(
        0,
        at_least=0,
        at_most=3,
        help="ZeRO stage. 0: nothing is sharded over data-parallel ranks; 1: optimizer states; 2: also the "
        "gradients of the transformer layers; 3: also their parameters, from the start on. "
        "Stages 2 and 3 need --pipeline-model-parallel-size 1",
    )
    ddp_bucket_size: int | None = flag(
        None,
        at_least=1,
        aliases=("--bucket-size",),
        metavar="ELEMENTS",
        help="with --zero-stage 1: least number of parameters on a rank whose gradients are reduced, and "
        "weights gathered, in one message, a number of whole layers (default: 40 million, or 1 million x the "
        "data-parallel size if that is more)",
    )
    no_overlap_grad_reduce: bool = flag(
        False,
        help="with --zero-stage 1: reduce the gradients after the last backward pass, not during it as the "
        "gradients of each bucket of layers become final; with --zero-stage 2 and 3: wait for the reduction "
        "of a layer's gradients before the backward pass of the layer before it",
    )
    no_overlap_param_gather: bool = flag(
        False,
        help="with --zero-stage 1: wait for the weights of all ranks after the update, not in the next "
        "forward pass before each bucket of layers; with --zero-stage 3: gather a layer's weights when it "
        "runs, not while the layer before it runs",
    )
    cpu_offload: bool = flag(
        False,
        help="keep optimizer states in host memory and run the optimizer step on the CPU, with "
        "OMP_NUM_THREADS threads",
        excludes={
            "optimizer.use_apex": "the Adam of apex runs on GPUs only, and the optimizer step would run on "
            "the CPU; remove one of the two"
        },
    )
    distributed_backend: str | None = flag(
        None, choices=("nccl", "gloo"), help="torch.distributed backend (default: nccl on GPUs, gloo on CPUs)"
    )
    start_timeout: float = flag(
        600.0,
        above=0,
        metavar="SECONDS",
        help="how long to wait at the start for processes that have not connected to MASTER_ADDR:MASTER_PORT "
        "and make no progress with their preparation; the missing ones are logged every 30 s",
    )
    world_size: int = flag(
        1, at_least=1, help="number of processes to plan for with --dry-run; set by the launcher in a run"
    )
    local_rank: int = flag(
        0, at_least=0, aliases=("--local_rank",), help="rank of this process on its node; set by the launcher"
    )

    node_size: int | None = flag(
        None,
        at_least=1,
        at_most=100_000,
        metavar="DEVICES",
        help="with --gpu: devices per node, for the planned time of a step (default: 8)",
    )
    intra_node_gbps: float | None = flag(
        None,
        above=0,
        metavar="GBIT_PER_S",
        help="with --gpu: Gbit/s of one device to the others of its node, per direction (default: by --gpu)",
    )
    inter_node_gbps: float | None = flag(
        None,
        above=0,
        metavar="GBIT_PER_S",
        help="with --gpu: Gbit/s of one node to the others, per direction (default: by --gpu)",
    )
    network_figures: str | None = flag(
        None,
        metavar="FILE",
        help="JSON file of measured rates of the network: a run of several processes measures them at its "
        "start and writes the file; with --dry-run and --gpu the plan reads it, where --node-size, "
        "--intra-node-gbps and --inter-node-gbps are not given",
    )

    def derive(self) -> dict[str, Any]:
        if self.pipeline_schedule is not None:
            return {}
        return {"pipeline_schedule": "1f1b" if self.virtual_pipeline_stages == 1 else "interleaved"}

    @property
    def schedule(self) -> PipelineSchedule:
        """The properties of --pipeline-schedule."""
        return PIPELINE_SCHEDULES[self.pipeline_schedule]

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages of a pipeline rank."""
        return self.schedule.stages_per_rank or self.virtual_pipeline_stages

    @property
    def sends_parts(self) -> bool:
        """Whether each tensor-parallel rank sends its part of a replicated activation to the next stage."""
        return self.tensor_model_parallel_size > 1 and not self.sequence_parallel

    @property
    def schedule_title(self) -> str:
        """The schedule in a list of settings: with --virtual-pipeline-stages as in 'interleaved x 2'."""
        stages = "" if self.schedule.stages_per_rank else f" x {self.stages_per_rank}"
        return self.pipeline_schedule + stages

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of all pipeline ranks."""
        return self.stages_per_rank * self.pipeline_model_parallel_size

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The pipeline rank that holds each stage."""
        ranks = range(self.pipeline_model_parallel_size)
        if self.schedule.is_v_schedule:
            return (*ranks, *reversed(ranks))
        return tuple(ranks) * self.stages_per_rank

    def reads_tokens(self, rank: int) -> bool:
        """Whether a pipeline rank reads tokens or labels: it holds the first or the last stage."""
        return rank in (self.rank_of_stage[0], self.rank_of_stage[-1])

    @property
    def min_micro_batches(self) -> int:
        """Least number of micro-batches per step and replica."""
        return max(self.schedule.micro_batches_per_rank * self.pipeline_model_parallel_size, 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches per step and replica is a multiple of this."""
        return self.pipeline_model_parallel_size if self.schedule.micro_batches_multiple_of_ranks else 1

    @property
    def bucket_size(self) -> int | None:
        """Least number of parameters of a bucket of layers; None without buckets. The default is that of
        Megatron-LM: larger messages for more ranks, since a ring collective takes a step per rank."""
        overlaps = not (self.no_overlap_grad_reduce and self.no_overlap_param_gather)
        if self.zero_stage != 1 or self.data_parallel_size == 1 or not overlaps:
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * self.data_parallel_size)

    @property
    def overlap_chunks(self) -> int:
        """Most chunks of --tp-comm-overlap; 1 without it."""
        return self.tp_comm_overlap_chunks if self.tp_comm_overlap else 1

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model (DP)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def optimizer_partitions(self) -> int:
        """Number of data-parallel ranks that the optimizer state is divided over: 1 without ZeRO."""
        return self.data_parallel_size if self.zero_stage >= 1 else 1

    @property
    def shards_gradients(self) -> bool:
        """Whether the gradients of the transformer layers are sharded too (ZeRO-2, ZeRO-3)."""
        return self.zero_stage >= 2 and self.data_parallel_size > 1

    @property
    def shards_weights(self) -> bool:
        """Whether the weights of the transformer layers are sharded too (ZeRO-3)."""
        return self.zero_stage == 3 and self.data_parallel_size > 1
