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
        metavar="uniform|parameters|type:REGEX",
        help="what the stages hold equally much of: layers, parameters, or layers whose class name matches "
        "REGEX",
    )
    zero_stage: int = flag(
        0, at_least=0, at_most=3, help="0: every replica holds all optimizer state; 1: shared"
    )
    distributed_backend: str | None = flag(
        None, choices=("nccl", "gloo"), help="transport of torch.distributed (default: what suits the device)"
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
    def data_parallel_size(self) -> int:
        """Number of replicas of the model (DP)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
