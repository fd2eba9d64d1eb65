"""The parallel layout of a run: the tensor, pipeline and data degrees, and the coordinates of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.config import ConfigError, ParallelConfig

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from torch.distributed import ProcessGroup


def chunks_of_rank(rank_of_chunk: Sequence[int], rank: int) -> list[int]:
    """Returns a pipeline rank's model chunks (stages). A chunk's index in the list is its model_chunk_id."""
    return [chunk for chunk, holder in enumerate(rank_of_chunk) if holder == rank]


@dataclass(frozen=True)
class TPGroup:
    """The tensor-parallel group of this rank: its rank in the group, the group's size, the process group.

    `group` is None if `size` is 1: then no layer communicates.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor, pipeline and data degrees, and the coordinates of `rank`.

    The tensor coordinate varies fastest with the rank, then data, then pipeline. So the ranks of a
    tensor-parallel group are consecutive, and share a node if TP divides the number of GPUs per node.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    rank: int = 0

    @classmethod
    def create(cls, world_size: int, tp_size: int, pp_size: int, rank: int = 0) -> ParallelLayout:
        """Derives the data-parallel degree. Raises ConfigError if TP x PP does not divide `world_size`."""
        for flag, degree in (
            ("--tensor-model-parallel-size", tp_size),
            ("--pipeline-model-parallel-size", pp_size),
            ("--world-size", world_size),
        ):
            if degree < 1:
                raise ConfigError(f"{flag} is {degree}: expected at least 1")
        if world_size % (tp_size * pp_size) != 0:
            raise ConfigError(
                f"{world_size} processes cannot be divided into groups of {tp_size * pp_size}: the number of "
                f"processes must be a multiple of --tensor-model-parallel-size ({tp_size}) x "
                f"--pipeline-model-parallel-size ({pp_size})"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside a job of {world_size} processes: check RANK, WORLD_SIZE"
            )
        return cls(tp_size=tp_size, pp_size=pp_size, dp_size=world_size // (tp_size * pp_size), rank=rank)

    @classmethod
    def from_config(cls, parallel: ParallelConfig, rank: int) -> ParallelLayout:
        """Returns the layout of the config's degrees, for `rank`."""
        return cls.create(
            parallel.world_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            rank,
        )

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size % self.dp_size

    @property
    def pipeline_stage(self) -> int:
        return self.rank // (self.tp_size * self.dp_size)

    @cached_property
    def topology(self) -> PipeModelDataParallelTopology:
        """This layout as DeepSpeed's topology, with the axes pipe, data, model (model fastest)."""
        # Imported on use: the import takes seconds, and commands that only check flags do not need DeepSpeed.
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(num_pp=self.pp_size, num_mp=self.tp_size, num_dp=self.dp_size)

    def make_tp_group(self) -> TPGroup:
        """Creates all tensor-parallel process groups and returns this rank's group.

        Collective: every rank of the job must call it, since torch requires all ranks to create a group. The
        default process group must exist, unless the TP degree is 1.
        """
        if self.tp_size == 1:
            return TPGroup()
        return TPGroup(rank=self.tp_rank, size=self.tp_size, group=self._make_group(self.tp_size))

    def make_stage_group(self) -> ProcessGroup:
        """Creates the process groups of all TP and DP ranks of each pipeline rank, and returns this rank's.
        Collective, see `make_tp_group`."""
        return self._make_group(self.tp_size * self.dp_size)

    def _make_group(self, size: int) -> ProcessGroup:
        """Creates the process groups of each `size` consecutive ranks. Returns this rank's."""
        import torch.distributed

        own = None
        for first in range(0, self.world_size, size):
            group = torch.distributed.new_group(list(range(first, first + size)))
            if first <= self.rank < first + size:
                own = group
        assert own is not None  # the sizes divide the world size
        return own
