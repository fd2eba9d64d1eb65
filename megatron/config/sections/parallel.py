"""The number of processes, and how the model is distributed over them."""

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
        help="tensor-parallel size (TP): number of ranks that share each layer",
        group=COMMON_FLAGS,
    )
    pipeline_model_parallel_size: int = flag(
        1,
        at_least=1,
        at_most=100_000,
        help="pipeline-parallel size (PP): number of pipeline ranks",
        group=COMMON_FLAGS,
    )
    context_parallel_size: int = flag(
        1,
        at_least=1,
        metavar="N",
        help="context-parallel size (CP), for long sequences: number of ranks that share the tokens of each "
        "sequence. Attention all-gathers keys and values over these ranks, see docs/context_parallel.md. "
        "--seq-length must be divisible by 2 x CP, and with --sequence-parallel by 2 x CP x TP",
    )
    expert_model_parallel_size: int = flag(
        1,
        at_least=1,
        metavar="N",
        help="expert-parallel size (EP): number of ranks that share the experts of each layer. TP x CP x DP "
        "must be divisible by it. With --tensor-model-parallel-size above 1, experts need "
        "--sequence-parallel",
        needs={
            "model.num_experts": "only experts are divided over these ranks; set --num-experts (or, with "
            "--load, --use-checkpoint-args), or remove --expert-model-parallel-size"
        },
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        choices=("alltoall", "allgather"),
        rejected={"flex": "DeepEP and similar libraries are not used; set alltoall"},
        help="how tokens reach the ranks of their experts, and return\n"
        "alltoall: each token is sent to the ranks of its experts\n"
        "allgather: each rank receives all tokens; suitable for few ranks and many experts per token",
        unused_with=("parallel.expert_model_parallel_size=1",),
    )
    partition_method: str = flag(
        "type:transformer",
        aliases=("--pp-partition-method",),
        strip_quotes=True,
        metavar="METHOD",
        registry=PARTITION_METHODS,
        help="method that assigns layers to pipeline stages, see docs/partition.md",
    )
    partition_profile: str | None = flag(
        None,
        metavar="FILE",
        help="with --partition-method profile: file of layer times. If the file exists, the run reads it; "
        "otherwise the run measures the times and writes it (default: measure at each start)",
        needs={"parallel.partition_method=profile": "only this method uses it"},
    )
    pipeline_schedule: str = flag(
        derived="1f1b, or interleaved with --virtual-pipeline-stages",
        choices=PIPELINE_SCHEDULES,
        help="pipeline schedule",
    )
    virtual_pipeline_stages: int = flag(
        1,
        aliases=("--num-virtual-stages-per-pipeline-rank",),
        at_least=1,
        at_most=10_000,
        metavar="N",
        help="with --pipeline-schedule interleaved: number of pipeline stages on each pipeline rank, at "
        "least 2",
    )
    sequence_parallel: bool = flag(
        False,
        help="reduce activation memory: shard norms, dropout and residual connections along the sequence "
        "dimension, across the tensor-parallel group",
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    tp_comm_overlap: bool = flag(
        False,
        help="with --sequence-parallel: split each all-gather before a GEMM and each reduce-scatter after a "
        "GEMM into chunks of the sequence. The communication of one chunk then overlaps with the GEMM of "
        "the next or previous chunk",
        needs={"parallel.sequence_parallel": "it splits collectives along the sequence"},
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    tp_comm_overlap_chunks: int = flag(
        2,
        at_least=2,
        at_most=64,
        metavar="N",
        help="with --tp-comm-overlap: maximum number of chunks. The run uses the largest number up to N "
        "that divides --seq-length / TP",
        used_with=("parallel.tp_comm_overlap",),
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )
    zero_stage: int = flag(
        0,
        at_least=0,
        at_most=3,
        help="ZeRO stage: what is sharded across data-parallel ranks. Stages 2 and 3 need "
        "--pipeline-model-parallel-size 1\n"
        "0: nothing\n"
        "1: optimizer states\n"
        "2: optimizer states, and the gradients of the transformer layers\n"
        "3: optimizer states, and the gradients and parameters of the transformer layers, from "
        "initialization on",
    )
    ddp_bucket_size: int | None = flag(
        None,
        at_least=1,
        aliases=("--bucket-size",),
        metavar="ELEMENTS",
        help="with --zero-stage 1: minimum bucket size, in parameters per rank. A bucket holds whole "
        "layers. Its gradients are reduced in one message, and its weights are gathered in one message "
        "(default: 40 million, or 1 million x data-parallel size if that is larger)",
    )
    no_overlap_grad_reduce: bool = flag(
        False,
        help="do not overlap gradient reduction with the backward pass. With --zero-stage 1, the reduction "
        "starts after the last backward pass. With --zero-stage 2 or 3, the backward pass waits for the "
        "reduction of each layer's gradients",
    )
    no_overlap_param_gather: bool = flag(
        False,
        help="do not overlap the all-gather of parameters with the forward pass. With --zero-stage 1, all "
        "weights are gathered right after the update. With --zero-stage 3, the weights of a layer are "
        "gathered when the layer runs, instead of while the preceding layer runs",
    )
    cpu_offload: bool = flag(
        False,
        help="keep optimizer states in host memory and run the optimizer step on the CPU, with "
        "OMP_NUM_THREADS threads",
        excludes={
            "optimizer.use_apex": "the Adam of apex runs on GPUs only, and the optimizer step would run on "
            "the CPU"
        },
    )
    distributed_backend: str | None = flag(
        None, choices=("nccl", "gloo"), help="torch.distributed backend (default: nccl on GPUs, gloo on CPUs)"
    )
    start_timeout: float = flag(
        600.0,
        above=0,
        metavar="SECONDS",
        help="seconds without progress after which the startup ends with an error. Progress is a process "
        "that connects to MASTER_ADDR:MASTER_PORT or completes a part of its preparation. "
        "Missing processes are logged every 30 s",
    )
    world_size: int = flag(
        1,
        at_least=1,
        help="number of processes of the run that --dry-run plans; in a run the launcher sets it",
    )
    local_rank: int = flag(
        0,
        at_least=0,
        aliases=("--local_rank",),
        help="rank of this process on its node; the launcher sets it",
    )

    node_size: int | None = flag(
        None,
        at_least=1,
        at_most=100_000,
        metavar="DEVICES",
        help="with --gpu: GPUs per node, for the predicted step time (default: 8)",
    )
    intra_node_gbps: float | None = flag(
        None,
        above=0,
        metavar="GBIT_PER_S",
        help="with --gpu: bandwidth from one GPU to the other GPUs of its node, in Gbit/s per direction "
        "(default: depends on --gpu)",
    )
    inter_node_gbps: float | None = flag(
        None,
        above=0,
        metavar="GBIT_PER_S",
        help="with --gpu: bandwidth from one node to the other nodes, in Gbit/s per direction (default: "
        "depends on --gpu)",
    )
    host_us_per_kernel: float | None = flag(
        None,
        at_least=0,
        metavar="US",
        help="with --gpu: host time to launch a kernel, in microseconds, as benchmarks/host_time.py "
        "measures it (default: 8)",
    )
    network_figures: str | None = flag(
        None,
        metavar="FILE",
        help="JSON file of measured network rates. A run of several processes measures the rates at startup "
        "and writes the file. With --dry-run and --gpu, the plan reads from the file the rates that "
        "--node-size, --intra-node-gbps and --inter-node-gbps do not set",
    )

    def derive(self) -> dict[str, Any]:
        if self.pipeline_schedule is not None:
            return {}
        return {"pipeline_schedule": "1f1b" if self.virtual_pipeline_stages == 1 else "interleaved"}

    @property
    def schedule(self) -> PipelineSchedule:
        """Returns the properties of --pipeline-schedule."""
        return PIPELINE_SCHEDULES[self.pipeline_schedule]

    @property
    def stages_per_rank(self) -> int:
        """Returns the number of pipeline stages on each pipeline rank."""
        return self.schedule.stages_per_rank or self.virtual_pipeline_stages

    @property
    def sends_parts(self) -> bool:
        """Returns whether each tensor-parallel rank sends only its part of a replicated activation to the
        next stage."""
        return self.tensor_model_parallel_size > 1 and not self.sequence_parallel

    @property
    def schedule_title(self) -> str:
        """Returns a text about the schedule for lists of settings, with --virtual-pipeline-stages for example
        'interleaved x 2'."""
        stages = "" if self.schedule.stages_per_rank else f" x {self.stages_per_rank}"
        return self.pipeline_schedule + stages

    @property
    def num_stages(self) -> int:
        """Returns the number of pipeline stages of all pipeline ranks."""
        return self.stages_per_rank * self.pipeline_model_parallel_size

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Returns the pipeline rank of each stage."""
        ranks = range(self.pipeline_model_parallel_size)
        if self.schedule.is_v_schedule:
            return (*ranks, *reversed(ranks))
        return tuple(ranks) * self.stages_per_rank

    def reads_tokens(self, rank: int) -> bool:
        """Returns whether a pipeline rank reads tokens or labels, because it holds the first or last
        stage."""
        return rank in (self.rank_of_stage[0], self.rank_of_stage[-1])

    @property
    def min_micro_batches(self) -> int:
        """Returns the minimum number of micro-batches per step and replica."""
        return max(self.schedule.micro_batches_per_rank * self.pipeline_model_parallel_size, 1)

    @property
    def micro_batch_multiple(self) -> int:
        """Returns the number that must divide the number of micro-batches per step and replica."""
        return self.pipeline_model_parallel_size if self.schedule.micro_batches_multiple_of_ranks else 1

    @property
    def bucket_size(self) -> int | None:
        """Returns the minimum number of parameters in a bucket of layers; None without buckets. The default
        is Megatron-LM's. It grows with the number of ranks, because a ring collective takes one step per
        rank."""
        overlaps = not (self.no_overlap_grad_reduce and self.no_overlap_param_gather)
        if self.zero_stage != 1 or self.dp_cp_size == 1 or not overlaps:
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * self.dp_cp_size)

    @property
    def needs_one_queue(self) -> bool:
        """Returns whether the GPU must start kernels in the order of their launches (one hardware queue).

        With one queue, a tensor-parallel collective starts before the GEMM that it overlaps with (Megatron-LM
        requires this). With ZeRO-2 and ZeRO-3 there must be more queues, because the all-gathers of the
        weights would wait for the computation.
        """
        return self.tensor_model_parallel_size > 1 and self.zero_stage < 2

    @property
    def overlap_chunks(self) -> int:
        """Returns the maximum number of chunks of --tp-comm-overlap; 1 without the flag."""
        return self.tp_comm_overlap_chunks if self.tp_comm_overlap else 1

    @property
    def data_parallel_size(self) -> int:
        """Returns the data-parallel size (DP): number of replicas of the model."""
        return self.world_size // self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Returns the number of ranks that compute the samples of one data-parallel replica: TP x CP x PP."""
        return (
            self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size
        )

    @property
    def dp_cp_size(self) -> int:
        """Returns the number of ranks with equal parameters: DP x CP. Gradients are reduced over these
        ranks."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Returns the number of ranks with equal experts: TP x CP x DP / EP."""
        return self.tensor_model_parallel_size * self.dp_cp_size // self.expert_model_parallel_size

    @property
    def length_multiple(self) -> int:
        """Returns the number that must divide the length of a sequence, so that its shards have equal
        lengths."""
        context = self.context_parallel_size
        chunks = 2 * context if context > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def length_multiple_terms(self) -> str:
        """Returns a text of the flags whose product is `length_multiple`, for errors."""
        context, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        terms = [f"2 x --context-parallel-size {context}"] if context > 1 else []
        if self.sequence_parallel:
            terms.append(f"--tensor-model-parallel-size {tensor} with --sequence-parallel")
        return " x ".join(terms)

    @property
    def optimizer_partitions(self) -> int:
        """Returns the number of data- and context-parallel ranks across which optimizer states are sharded; 1
        without ZeRO."""
        return self.dp_cp_size if self.zero_stage >= 1 else 1

    @property
    def shards_gradients(self) -> bool:
        """Returns whether gradients of the transformer layers are sharded (ZeRO-2, ZeRO-3)."""
        return self.zero_stage >= 2 and self.dp_cp_size > 1

    @property
    def shards_weights(self) -> bool:
        """Returns whether weights of the transformer layers are sharded (ZeRO-3)."""
        return self.zero_stage == 3 and self.dp_cp_size > 1
