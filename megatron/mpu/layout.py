"""The parallel layout of a run: the tensor, context, data and pipeline degrees, and a rank's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.config import ConfigError, ParallelConfig
from megatron.text_table import counted

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
class CPGroup:
    """The context-parallel group of this rank: its rank in the group, the group's size, the process group.

    A sequence is divided into 2 x `size` equal chunks. Rank i holds the chunks i and 2 x `size` - 1 - i, so
    that causal attention is equal work on every rank (Llama 3, arXiv 2407.21783, section 3.3.2). `group`
    is None if `size` is 1: then each rank holds whole sequences, and nothing communicates.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    def chunks(self, seq: int) -> tuple[range, ...]:
        """Returns the positions of this rank's chunks in a sequence of `seq` tokens, ascending. Raises
        ValueError if `seq` is not divisible by 2 x `size`."""
        if self.size == 1:
            return (range(seq),)
        if seq % (2 * self.size):
            raise ValueError(f"{seq} tokens are not divisible by 2 x {self.size} context-parallel ranks")
        width = seq // (2 * self.size)
        indices = (self.rank, 2 * self.size - 1 - self.rank)
        return tuple(range(index * width, (index + 1) * width) for index in indices)


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor, context, data and pipeline degrees, and the coordinates of `rank`.

    The tensor coordinate varies fastest with the rank, then context, then data, then pipeline, as in
    Megatron-LM. So the ranks of a tensor-parallel group are consecutive, and share a node if TP divides the
    number of GPUs per node.

    The ranks of a context-parallel group read equal samples and hold equal parameters, so gradients are
    reduced, and ZeRO shards, over the data- and context-parallel ranks together (`dp_cp_size`). This group is
    the axis `data` of DeepSpeed's topology.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    rank: int = 0
    cp_size: int = 1

    @classmethod
    def create(
        cls, world_size: int, tp_size: int, pp_size: int, rank: int = 0, cp_size: int = 1
    ) -> ParallelLayout:
        """Derives the data-parallel degree. Raises ConfigError if TP x CP x PP does not divide
        `world_size`."""
        for flag, degree in (
            ("--tensor-model-parallel-size", tp_size),
            ("--context-parallel-size", cp_size),
            ("--pipeline-model-parallel-size", pp_size),
            ("--world-size", world_size),
        ):
            if degree < 1:
                raise ConfigError(f"{flag} is {degree}: expected at least 1")
        per_replica = tp_size * cp_size * pp_size
        if world_size % per_replica != 0:
            context = f" x --context-parallel-size ({cp_size})" if cp_size > 1 else ""
            raise ConfigError(
                f"{counted(world_size, 'process')} cannot be divided into groups of {per_replica}: the "
                f"number of processes must be a multiple of --tensor-model-parallel-size ({tp_size})"
                f"{context} x --pipeline-model-parallel-size ({pp_size})"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside a job of {counted(world_size, 'process')}: check RANK, WORLD_SIZE"
            )
        return cls(tp_size, pp_size, world_size // per_replica, rank, cp_size)

    @classmethod
    def from_config(cls, parallel: ParallelConfig, rank: int) -> ParallelLayout:
        """Returns the layout of the config's degrees, for `rank`."""
        return cls.create(
            parallel.world_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            rank,
            parallel.context_parallel_size,
        )

    @property
    def world_size(self) -> int:
        return self.ranks_per_stage * self.pp_size

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of each pipeline rank."""
        return self.tp_size * self.dp_cp_size

    def coordinates_of(self, rank: int) -> tuple[int, int, int, int]:
        """Returns the pipeline, data, context and tensor coordinates of a rank."""
        rest, tensor = divmod(rank, self.tp_size)
        rest, context = divmod(rest, self.cp_size)
        return (*divmod(rest, self.dp_size), context, tensor)

    def rank_at(self, pipeline: int, data: int, context: int, tensor: int) -> int:
        """Inverts `coordinates_of`."""
        return ((pipeline * self.dp_size + data) * self.cp_size + context) * self.tp_size + tensor

    @property
    def tp_rank(self) -> int:
        return self.coordinates_of(self.rank)[3]

    @property
    def cp_rank(self) -> int:
        return self.coordinates_of(self.rank)[2]

    @property
    def dp_rank(self) -> int:
        return self.coordinates_of(self.rank)[1]

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks with equal parameters: DP x CP."""
        return self.dp_size * self.cp_size

    @property
    def dp_cp_rank(self) -> int:
        """Index of this rank among the `dp_cp_size` ranks with equal parameters."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def pipeline_stage(self) -> int:
        return self.coordinates_of(self.rank)[0]

    @property
    def place(self) -> str:
        """The coordinates of `rank`, for messages."""
        context = f"CP rank {self.cp_rank}, " if self.cp_size > 1 else ""
        return f"stage {self.pipeline_stage}, TP rank {self.tp_rank}, {context}DP rank {self.dp_rank}"

    @cached_property
    def topology(self) -> PipeModelDataParallelTopology:
        """This layout as DeepSpeed's topology, with the axes pipe, data, model (model fastest)."""
        # Imported on use: the import takes seconds, and commands that only check flags do not need DeepSpeed.
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(num_pp=self.pp_size, num_mp=self.tp_size, num_dp=self.dp_cp_size)

    def make_tp_group(self) -> TPGroup:
        """Creates all tensor-parallel process groups and returns this rank's group.

        Collective: every rank of the job must call it, since torch requires all ranks to create a group. The
        default process group must exist, unless the TP degree is 1.
        """
        return TPGroup(self.tp_rank, self.tp_size, self._make_groups(self.tp_size, 1))

    def make_cp_group(self) -> CPGroup:
        """Creates all context-parallel process groups and returns this rank's group. Collective, as
        `make_tp_group`."""
        return CPGroup(self.cp_rank, self.cp_size, self._make_groups(self.cp_size, self.tp_size))

    def make_stage_group(self) -> ProcessGroup:
        """Creates the process groups of all ranks of each pipeline rank, and returns this rank's. Collective,
        see `make_tp_group`."""
        group = self._make_groups(self.ranks_per_stage, 1)
        assert group is not None  # the caller has several ranks per pipeline rank
        return group

    def _make_groups(self, size: int, stride: int) -> ProcessGroup | None:
        """Creates the groups of `size` ranks that are `stride` apart, and returns this rank's group."""
        if size == 1:
            return None
        import torch.distributed

        own = None
        for block in range(0, self.world_size, size * stride):
            for first in range(block, block + stride):
                ranks = range(first, first + size * stride, stride)
                group = torch.distributed.new_group(list(ranks))
                if self.rank in ranks:
                    own = group
        return own
