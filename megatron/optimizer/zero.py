"""How the optimizer is distributed over ranks: what ZeRO shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn


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
