"""Tensor-parallel shards of a full tensor: the inverse of `megatron.mpu.parameters.merge_shards`."""

import torch

from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, local_slices


def shard_of(spec: ParameterSpec, full: torch.Tensor, tp_group: Axis) -> torch.Tensor:
    """This rank's shard of `full`. The result may share memory with it."""
    if spec.shard_dim is None:
        return full
    dim = spec.shard_dim
    parts = [full.narrow(dim, part.start, part.stop - part.start) for part in local_slices(spec, tp_group)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
