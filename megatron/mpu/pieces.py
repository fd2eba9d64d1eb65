"""`Piece`: elements of a parameter that one rank, or one file, holds.

Optimizers and readers give pieces, writers take pieces; checkpoint formats know nothing of ZeRO or of axes.
The module needs no torch: the process that writes checkpoints computes digests of pieces.
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
    """Elements start to stop - 1 of a rank's flattened shard of a parameter: where they are in the full
    parameter and, with `values`, what they are."""

    name: str
    spec: ParameterSpec
    axes: tuple[Axis, ...]
    """The rank's place on the axes that shard the parameter; none for elements of the full parameter."""
    start: int
    stop: int
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """State -> elements: 'fp32' for the values, the optimizer's name for a moment. All are flat, and in
    fp32 except for weights in the precision of a run."""
    step: float | None = None
    """The number of updates; None if the optimizer does not count them."""
    quantized: bool = False
    """Whether the moments are stored in 8 bits in memory."""
    owned: bool = True
    """Whether the rank owns the parameter among its replicas, data-parallel ones aside."""

    @classmethod
    def of_shard(cls, name: str, spec: ParameterSpec, axes: Sequence[Axis] = ()) -> Piece:
        """Returns the place of a rank's whole shard; without axes of the full parameter."""
        return cls(name, spec, tuple(axes), 0, spec.local_numel(axes))

    @property
    def is_first(self) -> bool:
        """Whether the piece has the first element of the full parameter."""
        return self.start == 0 and not any(axis.rank for axis in self.axes)

    def boxes(self) -> Iterator[Box]:
        """Yields the boxes of the full parameter that make up the piece, without rows of padding."""
        return boxes(self.spec, self.axes, self.start, self.stop)

    def values_in(self, box: Box, state_name: str) -> Tensor:
        """Returns the elements of a state in one of the `boxes`, in its shape."""
        first = box.first - self.start
        return self.values[state_name][first : first + box.numel].view(box.sizes)
