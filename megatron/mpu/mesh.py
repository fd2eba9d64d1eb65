"""The ranks of a run as named axes, and the process groups of these axes.

The ranks have two views. In each view the last axis varies fastest with the rank, as in Megatron-LM:

    DENSE    pp, dp, cp, tp    for all parameters except experts
    EXPERT   pp, edp, ep       for parameters that are sharded over `ep`; edp: replicas of one expert

The ranks with equal pipeline rank are consecutive. `ep` spans consecutive ranks among them: first over tp,
then over cp, then over dp (Megatron-LM's order tp-cp-ep-dp-pp, with one tensor-parallel rank per expert).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.config import ConfigError, ParallelConfig
from megatron.text_table import counted

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from torch.distributed import ProcessGroup

    from megatron.mpu.parameter_spec import ParameterSpec

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep")
DATA_AXES = ("dp", "cp", "edp", "ep")
"""The axes whose ranks read different tokens."""
_STAGE = ("dp", "cp", "tp")
_WITH_GROUPS = (
    *(
        ("tp",),
        ("cp",),
        ("dp",),
        ("dp", "cp"),
        ("cp", "tp"),
        ("pp", "tp"),
        ("pp",),
        _STAGE,
        ("ep",),
        ("edp",),
    ),
)
"""The axes, and the combinations of axes, that have process groups."""


def chunks_of_rank(rank_of_chunk: Sequence[int], rank: int) -> list[int]:
    """Returns a pipeline rank's model chunks (stages), in ascending order. A chunk's index in this list is
    its model_chunk_id."""
    return [chunk for chunk, holder in enumerate(rank_of_chunk) if holder == rank]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, or several axes as one: this rank's position, the size, and the process group.

    `group` is None if `size` is 1, and before the processes have connected. Without a group nothing
    communicates.
    """

    name: str
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = field(default=None, compare=False)

    @property
    def place(self) -> Axis:
        """The axis without its process group. Unlike the group, it can be sent to other processes."""
        return replace(self, group=None)


def place_on(axes: Sequence[Axis], name: str) -> Axis:
    """Returns the position on an axis. If the axis is not in `axes`, it has one rank."""
    return next((axis for axis in axes if axis.name == name), Axis(name))


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, and the coordinates of `rank`.

    The ranks of a context-parallel group read equal samples and hold equal parameters. Therefore gradients
    are reduced, and ZeRO shards, over the data- and context-parallel ranks together (`dp_cp`). These ranks
    are the axis `data` of DeepSpeed's topology.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    rank: int = 0
    cp_size: int = 1
    ep_size: int = 1
    groups: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict, compare=False, repr=False)
    """The process group of each set of ranks along one of `_WITH_GROUPS`; empty before `connect`."""

    @classmethod
    def create(
        cls, world_size: int, tp_size: int, pp_size: int, rank: int = 0, cp_size: int = 1, ep_size: int = 1
    ) -> Mesh:
        """Returns a mesh whose data-parallel size follows from the other sizes. Raises ConfigError if TP x CP
        x PP does not divide `world_size`, or if EP does not divide the number of ranks per pipeline rank."""
        for flag, degree in (
            ("--tensor-model-parallel-size", tp_size),
            ("--context-parallel-size", cp_size),
            ("--pipeline-model-parallel-size", pp_size),
            ("--expert-model-parallel-size", ep_size),
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
        if (ranks := world_size // pp_size) % ep_size:
            raise ConfigError(
                f"--expert-model-parallel-size {ep_size} does not divide the {counted(ranks, 'rank')} of "
                f"each pipeline rank (TP x CP x DP): set a divisor of {ranks}"
            )
        return cls(tp_size, pp_size, world_size // per_replica, rank, cp_size, ep_size)

    @classmethod
    def from_config(cls, parallel: ParallelConfig, rank: int) -> Mesh:
        """Returns the mesh with the sizes of the configuration, for `rank`."""
        return cls.create(
            parallel.world_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            rank,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
        )

    @property
    def world_size(self) -> int:
        return self.ranks_per_stage * self.pp_size

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks with the same pipeline rank."""
        return self.tp_size * self.cp_size * self.dp_size

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, in both views."""
        if self.ranks_per_stage % self.ep_size:
            raise ValueError(f"{self.ranks_per_stage} ranks are not divisible into groups of {self.ep_size}")
        dense = {"pp": self.pp_size, "dp": self.dp_size, "cp": self.cp_size, "tp": self.tp_size}
        return dense | {"edp": self.ranks_per_stage // self.ep_size, "ep": self.ep_size}

    def coordinates_of(self, rank: int, view: Sequence[str] = DENSE) -> dict[str, int]:
        """Returns the coordinates of a rank on the axes of a view, in the view's order."""
        coordinates = {}
        for name in reversed(view):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return {name: coordinates[name] for name in view}

    def ranks_along(self, names: Sequence[str], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` at most on the axes `names` of one view, in ascending
        order."""
        view = _view_of(names)
        coordinates = self.coordinates_of(rank, view)
        ranks = [0]
        for name in view:
            places = range(self.sizes[name]) if name in names else (coordinates[name],)
            ranks = [base * self.sizes[name] + place for base in ranks for place in places]
        return tuple(ranks)

    @cached_property
    def _known_axes(self) -> dict[tuple[str, ...], Axis]:
        return {}

    def axis(self, *names: str) -> Axis:
        """Returns one axis, or several axes of one view as one axis. The first name varies slowest."""
        if names not in self._known_axes:
            ranks = self.ranks_along(names, self.rank)
            if self.groups and len(ranks) > 1 and ranks not in self.groups:
                raise ValueError(f"the mesh has no process group of the axes {' x '.join(names)}")
            axis = Axis("_".join(names), ranks.index(self.rank), len(ranks), self.groups.get(ranks))
            self._known_axes[names] = axis
        return self._known_axes[names]

    @cached_property
    def pp(self) -> Axis:
        """The axis of pipeline ranks."""
        return self.axis("pp")

    @cached_property
    def dp(self) -> Axis:
        """The axis of data-parallel ranks, which read different samples."""
        return self.axis("dp")

    @cached_property
    def cp(self) -> Axis:
        """The axis of context-parallel ranks, which share sequences."""
        return self.axis("cp")

    @cached_property
    def tp(self) -> Axis:
        """The axis of tensor-parallel ranks."""
        return self.axis("tp")

    @cached_property
    def dp_cp(self) -> Axis:
        """The data- and context-parallel ranks, which hold equal dense parameters."""
        return self.axis("dp", "cp")

    @cached_property
    def sequence(self) -> Axis:
        """The ranks that share sequences with --sequence-parallel: context- and tensor-parallel ranks."""
        return self.axis("cp", "tp")

    @cached_property
    def ep(self) -> Axis:
        """The axis of expert-parallel ranks, which share the experts of a layer."""
        return self.axis("ep")

    @cached_property
    def stage(self) -> Axis:
        """All ranks with this rank's pipeline rank. The tensor-parallel rank varies fastest."""
        return self.axis(*_STAGE)

    @cached_property
    def model(self) -> Axis:
        """All pipeline and tensor-parallel ranks of one replica of the dense parameters."""
        return self.axis("pp", "tp")

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of both views."""
        return tuple(self.axis(name) for name in self.sizes)

    @property
    def place(self) -> str:
        """The coordinates of `rank` as text, for messages."""
        context = f"CP rank {self.cp.rank}, " if self.cp_size > 1 else ""
        return f"stage {self.pp.rank}, TP rank {self.tp.rank}, {context}DP rank {self.dp.rank}"

    # --- process groups and ranks that follow from a parameter's sharding ---

    def reduced_over(self, spec: ParameterSpec) -> Axis:
        """Returns the ranks along `ParameterSpec.reduced_axes`, as one axis."""
        return self.axis(*spec.reduced_axes)

    def axes_of(self, spec: ParameterSpec) -> tuple[Axis, ...]:
        """Returns this rank's position on the axes that shard a parameter, without process groups."""
        return tuple(self.axis(name).place for name in spec.axis_names)

    def replica_of(self, spec: ParameterSpec, is_partitioned: bool) -> tuple[int, ...]:
        """Returns the identity of the replica of a parameter that this rank holds a part of: its pipeline
        rank, and its coordinates on the replica axes. is_partitioned: whether the ranks of `reduced_over`
        hold parts of one replica (ZeRO)."""
        names = [name for name in spec.replica_axes if not (is_partitioned and name in spec.reduced_axes)]
        return (self.pp.rank, *(self.axis(name).rank for name in names))

    def counts(self, spec: ParameterSpec, is_partitioned: bool = True) -> bool:
        """Returns whether this rank's elements of a parameter count in sums over all ranks. Only the first
        replica counts. is_partitioned: see `replica_of`."""
        return not any(self.replica_of(spec, is_partitioned)[1:])

    # --- process groups ---

    def connect(self) -> Mesh:
        """Returns the mesh with all process groups. Equal sets of ranks share one group.

        This is a collective: every rank of the job must call it, since torch requires all ranks to create a
        group. The default process group must exist, unless the run has one rank.
        """
        groups: dict[tuple[int, ...], ProcessGroup] = {}
        if self.world_size > 1:
            import torch.distributed as dist
        for names in _WITH_GROUPS:
            for ranks in self._sets_along(names):
                if len(ranks) == 1 or ranks in groups:
                    continue
                world = dist.group.WORLD if names == _STAGE and len(ranks) == self.world_size else None
                groups[ranks] = world or dist.new_group(list(ranks))
        return replace(self, groups=groups)

    def _sets_along(self, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yields each set of `ranks_along` over all ranks once, ordered by its first rank."""
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen:
                ranks = self.ranks_along(names, rank)
                seen.update(ranks)
                yield ranks

    @cached_property
    def topology(self) -> PipeModelDataParallelTopology:
        """This mesh as DeepSpeed's topology with the axes pipe, data, model. The axis model varies
        fastest."""
        # The import is here because it takes seconds, and commands that only check flags do not need
        # DeepSpeed.
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(
            num_pp=self.pp_size, num_mp=self.tp_size, num_dp=self.dp_size * self.cp_size
        )


ONE_RANK = Mesh(1, 1, 1)
"""The mesh of a run with one process."""


def _view_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the view that contains the axes `names`."""
    return EXPERT if {"ep", "edp"} & set(names) else DENSE
