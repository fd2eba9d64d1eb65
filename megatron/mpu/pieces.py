"""`Piece`: elements of a parameter that one rank, or one file, holds.

Optimizers and readers produce pieces, and writers consume pieces, so checkpoint formats are independent of
ZeRO and of axes. This module does not need torch: the process that writes checkpoints computes digests of
pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import Box, ParameterSpec, boxes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The elements start to stop - 1 of a rank's flattened shard of a parameter: where they are in the full
    parameter and, if `values` is set, their values."""

    name: str
    spec: ParameterSpec
    axes: tuple[Axis, ...]
    """The rank's position on the axes that shard the parameter. It is empty for elements of the full
    parameter."""
    start: int
    stop: int
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """The elements of each state, flat: 'fp32' for the parameter's values, the optimizer's name for a moment.
    All are fp32, except weights in the precision of a run."""
    step: float | None = None
    """The number of optimizer updates; None if the optimizer does not count them."""
    quantized: bool = False
    """Whether the moments are stored in 8 bits in memory."""
    owned: bool = True
    """Whether this rank saves the parameter, which several ranks hold (tied, or replicated over
    tensor-parallel ranks). All data-parallel replicas are owners."""

    @classmethod
    def of_shard(cls, name: str, spec: ParameterSpec, axes: Sequence[Axis] = ()) -> Piece:
        """Returns the piece of a rank's whole shard, without values. Without axes it is the full
        parameter."""
        return cls(name, spec, tuple(axes), 0, spec.local_numel(axes))

    @property
    def is_first(self) -> bool:
        """Whether the piece contains the first element of the full parameter."""
        return self.start == 0 and not any(axis.rank for axis in self.axes)

    def boxes(self) -> Iterator[Box]:
        """Yields the boxes of the full parameter that make up the piece, without rows of padding."""
        return boxes(self.spec, self.axes, self.start, self.stop)

    def values_in(self, box: Box, state_name: str) -> Tensor:
        """Returns the elements of a state in one of the `boxes`, in the shape of the box."""
        first = box.first - self.start
        return self.values[state_name][first : first + box.numel].view(box.sizes)
