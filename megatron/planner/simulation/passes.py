"""The actions of a device in a pass of a micro-batch, and the time that they take.

A pass is a list of kernels, starts of collectives, and waits for collectives. A replay of the list gives its
time: kernels run one after the other; the collectives of one process group also run one after the other,
concurrently with the kernels; a wait delays the kernels until its collective is complete. So a collective
costs only the time that no kernel between its start and its wait hides.

With one hardware queue (`ParallelConfig.needs_one_queue`) the device also starts all actions in the order of
their launches. Then a collective that waits for the previous one of its process group delays the kernels
after it.

`layer_costs` records the lists of a run's layers on the simulated device. Lists for other programs can be
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron.mpu.mesh import DENSE, Mesh

Group = str | tuple[int, ...]
"""A process group: a name in `GROUP_AXES`, or a tuple of pipeline ranks. See `group_name`."""
GROUP_AXES = {
    "context": ("cp",),
    "data": ("dp", "cp"),
    "tensor": ("tp",),
    "stage": ("dp", "cp", "tp"),
    "sequence": ("cp", "tp"),
    "pipeline": ("pp",),
    "model": ("pp", "tp"),
    "world": DENSE,
    "expert": ("ep",),
    "expert data": ("edp",),
}
"""Name -> the axes along which the ranks of the process group differ. Equal groups have the first of their
names."""


def group_name(ranks: Sequence[int], mesh: Mesh) -> Group:
    """Returns the name of a process group, after its axes (see `GROUP_AXES`). A group of only some pipeline
    ranks is named by the tuple of these pipeline ranks. 'data' is also the name of a single rank, and of the
    data-parallel ranks without the context-parallel ranks."""
    members = tuple(sorted(ranks))
    for name, axes in GROUP_AXES.items() if len(members) > 1 else ():
        if mesh.ranks_along(axes, members[0]) == members:
            return name
    stages = tuple(mesh.coordinates_of(rank)["pp"] for rank in members)
    return stages if len(set(stages)) > 1 else "data"


@dataclass(frozen=True)
class Kernel:
    """An operation that the device runs.

    flops: FLOPs; only matrix products and attention have them. bytes: bytes of the tensors that the operation
    reads and writes. product: (rows, columns, inner length) of a matrix product, or of each product in a
    batch or of experts; (queries, keys, elements of a head) of fused attention; None for other kernels.
    alignment: largest power of two, up to 8, that divides the row length in memory of a product's matrices,
    in elements.
    """

    name: str
    flops: float
    bytes: float
    product: tuple[float, float, float] | None = None
    alignment: int = 8


@dataclass(frozen=True)
class Collective:
    """The start of a collective.

    operation: name of the c10d operation, such as 'allreduce_'. bytes: bytes of the full tensor: the output
    of an all-gather, the input of a reduce-scatter; for an all-to-all, the larger of input and output.
    """

    group: Group
    operation: str
    bytes: float


@dataclass(frozen=True)
class Wait:
    """The wait for a collective. age: number of collectives that have started after that collective. A
    collective of an earlier pass is assumed to be complete."""

    age: int


@dataclass(frozen=True)
class Busy:
    """Other work of the device that takes a known time."""

    seconds: float


Action = Kernel | Collective | Wait | Busy


@dataclass(frozen=True)
class PassTime:
    """The seconds of a pass. products: seconds in matrix products and attention. others: seconds in other
    kernels, and in waits for kernel launches. waits: seconds in waits for collectives and, with one hardware
    queue, for their starts."""

    products: float = 0.0
    others: float = 0.0
    waits: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.others + self.waits

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.products + other.products, self.others + other.others, self.waits + other.waits)


def pass_time(
    actions: Iterable[Action],
    kernel_seconds: Callable[[Kernel], float],
    collective_seconds: Callable[[Collective], float],
    launch_seconds: float,
    contention: float = 0.0,
    one_queue: bool = False,
) -> PassTime:
    """Returns the time of a pass. launch_seconds: host time per kernel. The host runs ahead of the device, so
    this time limits only a pass of many short kernels. contention: seconds that one second of a concurrent
    collective adds to the kernels. one_queue: whether the device has one hardware queue."""
    communication = clock = products = others = waits = 0.0
    free: dict[Group, float] = {}
    ends: list[float] = []
    launches = 0
    for action in actions:
        if isinstance(action, Kernel):
            seconds = kernel_seconds(action)
            clock += seconds
            launches += 1
            if action.flops:
                products += seconds
            else:
                others += seconds
        elif isinstance(action, Collective):
            seconds = collective_seconds(action)
            communication += seconds
            start = max(clock, free.get(action.group, 0.0))
            if one_queue:
                waits += start - clock
                clock = start
            free[action.group] = start + seconds
            ends.append(start + seconds)
        elif isinstance(action, Busy):
            clock += action.seconds
        elif action.age < len(ends) and (until := ends[-1 - action.age]) > clock:
            # A wait whose collective started in an earlier pass (age >= len(ends)) takes no time.
            waits += until - clock
            clock = until
    others += max(launches * launch_seconds - clock, 0.0)
    return PassTime(products, others + contention * max(communication - waits, 0.0), waits)
