"""What a pass of a micro-batch does on its device, in order, and how long that takes.

A pass is a list of kernels, of collectives that start, and of waits for them. Its time is that of a replay:
kernels run one after the other; the collectives of one process group run one after the other, beside the
kernels; a wait holds the kernels until its collective is complete. So a collective costs the time that no
kernel between its start and its wait hides.

The lists come from `layer_costs`, which records the layers of a run on the simulated
device. Those of other programs can be written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Group = str | tuple[int, ...]
"""'tensor', 'data', 'pipeline', 'model', 'world', or some pipeline ranks."""


@dataclass(frozen=True)
class Kernel:
    """An operation that the device runs.

    flops: of matrix products and attention. bytes: of the tensors that are read and written. product: rows,
    columns and inner length of a matrix product, of each of the products of a batch; queries, keys and
    elements of a head of fused attention; None for others. alignment: the largest power of two, up to 8, that
    divides the rows of a product's matrices as they lie in memory, in elements.
    """

    name: str
    flops: float
    bytes: float
    product: tuple[float, float, float] | None = None
    alignment: int = 8


@dataclass(frozen=True)
class Collective:
    """The start of a collective.

    group: what its ranks differ in, see `matching.group_name`. operation: of c10d, as
    'allreduce_'. bytes: of the full tensor: the output of an all-gather, the input of a reduce-scatter.
    """

    group: Group
    operation: str
    bytes: float


@dataclass(frozen=True)
class Wait:
    """The wait for a collective. age: number of collectives that have started since. The collective of an
    earlier pass is taken to be complete."""

    age: int


@dataclass(frozen=True)
class Busy:
    """Other work of the device, of known length."""

    seconds: float


Action = Kernel | Collective | Wait | Busy


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: in matrix products and attention, in other kernels and in waits for launches, and
    in waits for collectives."""

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
) -> PassTime:
    """The time of a pass. launch_seconds: of the host, per kernel; the host waits for nothing, so only a pass
    of many short kernels is limited by it. contention: by how much a second of a collective lengthens the
    kernels beside it."""
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
            end = max(clock, free.get(action.group, 0.0)) + seconds
            free[action.group] = end
            ends.append(end)
        elif isinstance(action, Busy):
            clock += action.seconds
        elif action.age < len(ends) and (until := ends[-1 - action.age]) > clock:
            # A collective of an earlier pass is complete: this pass has computed beside it.
            waits += until - clock
            clock = until
    others += max(launches * launch_seconds - clock, 0.0)
    return PassTime(products, others + contention * max(communication - waits, 0.0), waits)
