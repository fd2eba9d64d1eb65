"""A rank's shard of an unsharded tensor, computed with torch's chunk and cat instead of the program's
code."""

from collections.abc import Sequence

import torch

from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec


def shard_of(spec: ParameterSpec, full: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns the shard of `full` at the place `axes`. The result may share memory with `full`."""
    places = {axis.name: axis for axis in axes}
    for dim, name, parts in spec.sharding:
        axis = places.get(name, Axis(name))
        full = torch.cat([part.chunk(axis.size, dim)[axis.rank] for part in full.chunk(parts, dim)], dim)
    return full
