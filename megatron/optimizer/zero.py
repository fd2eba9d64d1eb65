"""How the optimizer is distributed over ranks: what ZeRO shards, and each rank's part."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from deepspeed import __version__ as deepspeed_version
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec


@dataclass(frozen=True)
class LocalParamState:
    """The elements of one parameter in this rank's partition."""

    name: str
    spec: ParameterSpec
    axes: tuple[Axis, ...]
    """This rank's place on the axes that shard the parameter."""
    start: int
    """Index of the first element within this rank's flattened shard of the parameter."""
    values: dict[str, Tensor]
    """'fp32': master weights; other keys: moments, by the optimizer's names. All flat, equally long, fp32."""
    step: float | None
    """Number of updates, None if the optimizer does not count them."""
    quantized: bool
    """Whether the moments are stored in 8 bits."""
    owned: bool = True
    """Whether this rank owns the parameter among its replicas, data-parallel ones aside."""


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded over the data-parallel ranks, and where the optimizer state is kept."""

    zero_stage: int
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose gradients (ZeRO-2) and weights (ZeRO-3) are sharded. The key is the 'unit' of their
    parameter groups. Empty below ZeRO-2, and if the data-parallel size is 1."""
    initial_values: Callable[[str, range], Tensor] | None = None
    """With ZeRO-3: returns the initial values of some elements of a parameter by name (fp32, on the host).
    Parameters of units have no memory before the optimizer is made."""
    buckets: Mapping[str, Sequence[nn.Module]] = field(default_factory=dict)
    """Layers whose gradients are reduced, and weights gathered, together (ZeRO-1). The key is the 'unit' of
    their parameter groups. Empty if nothing overlaps, and if the data-parallel size is 1."""
    overlap_grad_reduce: bool = True
    """Whether the gradients of a bucket are reduced during the last backward pass, and the gradients of a
    unit while the next unit computes."""
    overlap_param_gather: bool = True
    """Whether the weights of a bucket may arrive during the next forward pass, and the weights of a unit
    while the previous unit computes."""
    chains_param_gathers: bool = False
    """Whether the all-gather of a bucket's weights starts only when the previous bucket's first layer runs.
    Otherwise the all-gathers of all buckets start after the update."""
    cpu_offload: bool = False
    """Whether master weights and moments are kept and updated in host memory."""


def deepspeed_state(
    masters: list[Tensor], lengths: Sequence[Mapping[str, int]], partition_count: int, **more: Any
) -> dict[str, Any]:
    """Returns the optimizer state of a rank as DeepSpeed's files hold it.

    masters: flat fp32 values of each group of parameters, without padding: DeepSpeed's tools would expect a
    different padding. lengths: for each group, the parameters in it, in order, and their numbers of elements.
    more: `base_optimizer_state`, `clip_grad` and `loss_scaler`.
    """
    mappings = []
    for group in lengths:
        starts = accumulate(group.values(), initial=0)
        addresses = (fragment_address(start=s, numel=n) for s, n in zip(starts, group.values(), strict=False))
        mappings.append(OrderedDict(zip(group, addresses, strict=True)))
    return {
        **more,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [0] * len(masters),
        "partition_count": [partition_count] * len(masters),
        "ds_version": deepspeed_version,
        "param_slice_mappings": mappings,
    }
