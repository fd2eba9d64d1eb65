"""How many processes there are and how the work is cut over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Parallel degrees and what carries the messages."""

    group: ClassVar[str] = "distributed"

    tensor_model_parallel_size: int = flag(1, at_least=1, help="processes that share each layer (TP)")
    pipeline_model_parallel_size: int = flag(
        1, at_least=1, help="stages that the list of layers is cut into (PP)"
    )
    partition_method: str = flag(
        "type:transformer",
        aliases=("--pp-partition-method",),
        strip_quotes=True,
        metavar="METHOD",
        help="what the stages hold equally much of: uniform (layers), parameters, type:REGEX[:WEIGHT]|... "
        "(layers whose class name matches, as in type:embed:2|transformer:1), memory, time or profile (by "
        "a model of the layers' memory or work, or by their measured time); or what each stage holds, as in "
        "stages:5,6*10,5 or layout:Et*3|(tt|)*29,t|L. docs/partition.md",
    )
    partition_profile: str | None = flag(
        None,
        metavar="FILE",
        help="where --partition-method profile keeps the measured times: written if missing, else read",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        choices=("1f1b", "dualpipev"),
        help="order of forward and backward passes; dualpipev: each rank holds two stages, the first and the "
        "last one share rank 0, which shortens the pipeline's idle ends",
    )
    sequence_parallel: bool = flag(
        False,
        help="cut norms, dropout and residuals along the sequence over the processes that share a layer: "
        "less memory for activations, the same numbers",
    )
    zero_stage: int = flag(
        0,
        at_least=0,
        at_most=3,
        help="0: every replica holds all optimizer state; 1: the replicas share it; 2: and the gradients of "
        "transformer layers; 3: and their weights, once they have been whole on each process at the start "
        "(2 and 3 without a pipeline)",
    )
    cpu_offload: bool = flag(
        False,
        help="keep the optimizer's fp32 weights and moments in the memory of the host, whose processor takes "
        "the step (OMP_NUM_THREADS says on how many cores)",
    )
    distributed_backend: str | None = flag(
        None, choices=("nccl", "gloo"), help="transport of torch.distributed (default: what suits the device)"
    )
    start_timeout: float = flag(
        600.0,
        above=0,
        metavar="SECONDS",
        help="longest wait for all processes to arrive at MASTER_ADDR:MASTER_PORT; a line every 30 s says "
        "which ones are missing",
    )
    world_size: int = flag(
        1, at_least=1, help="number of processes to plan for with --dry-run; a run gets it from its launcher"
    )
    local_rank: int = flag(
        0,
        at_least=0,
        aliases=("--local_rank",),
        help="place of this process on its machine; set by the launcher",
    )

    @property
    def num_stages(self) -> int:
        """Pieces that the list of layers is cut into: with dualpipev each pipeline rank holds two."""
        ranks = self.pipeline_model_parallel_size
        return 2 * ranks if self.pipeline_schedule == "dualpipev" else ranks

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model (DP)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
