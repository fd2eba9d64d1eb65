"""Which part of the job a process does: the degrees of parallelism and this rank's coordinates in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.config import ConfigError, ParallelConfig

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorGroup:
    """This rank's place among the ranks that hold the shards of one layer.

    `group` is None where `size` is 1: then no layer communicates.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor, pipeline and data degrees, and the coordinates of `rank`.

    Ranks are numbered with the tensor coordinate fastest, then data, then pipeline: the ranks of a tensor
    group are neighbours, which on a cluster means on one node.
    """

    tensor: int
    pipeline: int
    data: int
    rank: int = 0

    @classmethod
    def create(cls, world_size: int, tensor: int, pipeline: int, rank: int = 0) -> ParallelLayout:
        """Derive the data-parallel degree; ConfigError if the degrees do not divide `world_size`."""
        for flag, degree in (
            ("--tensor-model-parallel-size", tensor),
            ("--pipeline-model-parallel-size", pipeline),
            ("--world-size", world_size),
        ):
            if degree < 1:
                raise ConfigError(f"{flag} is {degree}: expected at least 1")
        if world_size % (tensor * pipeline) != 0:
            raise ConfigError(
                f"{world_size} processes cannot be divided into groups of {tensor * pipeline}: the number of "
                f"processes must be a multiple of --tensor-model-parallel-size ({tensor}) x "
                f"--pipeline-model-parallel-size ({pipeline})"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside a job of {world_size} processes: check RANK, WORLD_SIZE"
            )
        return cls(tensor=tensor, pipeline=pipeline, data=world_size // (tensor * pipeline), rank=rank)

    @classmethod
    def from_config(cls, parallel: ParallelConfig, rank: int) -> ParallelLayout:
        """The degrees of the config, and the coordinates of `rank`."""
        return cls.create(
            parallel.world_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            rank,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor % self.data

    @property
    def pipeline_stage(self) -> int:
        return self.rank // (self.tensor * self.data)

    @cached_property
    def topology(self) -> PipeModelDataParallelTopology:
        """The same layout as DeepSpeed's engine wants it, with the axes pipe, data, model (model fastest)."""
        # Importing DeepSpeed takes seconds, which a command that only checks its flags should not pay.
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(num_pp=self.pipeline, num_mp=self.tensor, num_dp=self.data)

    def make_tensor_group(self) -> TensorGroup:
        """Make the process groups of tensor parallelism; return the one that this rank is in.

        Collective: every rank of the job calls it at the same point, for a group is made by all ranks,
        members or not. The default process group must exist, unless the tensor degree is 1.
        """
        if self.tensor == 1:
            return TensorGroup()
        import torch.distributed

        own = None
        for first in range(0, self.world_size, self.tensor):
            group = torch.distributed.new_group(list(range(first, first + self.tensor)))
            if first <= self.rank < first + self.tensor:
                own = group
        return TensorGroup(rank=self.tensor_rank, size=self.tensor, group=own)
