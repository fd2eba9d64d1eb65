"""The parameters of an optimizer group in flat buffers, of which each data-parallel rank owns a partition.

Per group there are whole weights in the run's precision, whole gradients in fp32, and this rank's partition
of both and of the fp32 master weights. What of the whole exists, and when:

    ZeRO 0, 1    weights and gradients are whole always, and the partition is a view of them (ZeRO-0: all)
    ZeRO 2       a transformer layer's gradients are whole during its backward pass, at the end of which they
                 are summed over the replicas into the partitions
    ZeRO 3       its weights, too, are whole only in its forward and backward pass: gathered for each

`megatron.optimizer.sharded_units` says when that is. What is let go of is the storage: the tensors that refer
to it, among them the parameters and what autograd has saved of them, are valid again once it is filled again.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment, read_moment

# A partition's length is a multiple of this many elements: 64 bytes of fp32, the widest vector registers. Of
# other lengths PyTorch's fused optimizers compute the last elements one by one, with other roundings, so that
# two copies of a tied weight, which lie at different places in their buffers, would drift apart.
ALIGNMENT = 16
# fp32 sums of squares over whole tensors lose digits (4e-3 of the norm of 50 M elements on a CPU), so squares
# are summed in fp32 within chunks of this many elements and in fp64 between them.
NORM_CHUNK = 4096


class FlatGroup:
    """The parameters of one optimizer group as views of flat buffers, cut into equal partitions.

    With moments of 8 bits (`quantized`), parameters and partitions begin at multiples of the quantisation
    block, so no block holds elements of two parameters or of two ranks. Where a parameter is cut into blocks
    then depends on its tensor shard alone: stages, replicas and ZeRO do not change a code. The gaps have no
    gradient and are not saved.
    """

    def __init__(
        self,
        group: dict[str, Any],
        partitions: int,
        partition: int,
        *,
        shards_gradients: bool = False,
        shards_weights: bool = False,
        master_on_host: bool = False,
    ) -> None:
        """`shards_gradients`, `shards_weights`: whole ones exist for a while only; at first there are none.
        `master_on_host`: master weights, and with them the moments, are kept in the host's memory."""
        self.parameters: list[nn.Parameter] = list(group["params"])
        self.moment_bits: int = group.get("moment_bits", 32)
        self.unit: str | None = group.get("unit")
        self.shards_gradients, self.shards_weights = shards_gradients, shards_weights
        alignment = BLOCK_SIZE if self.quantized else 1
        aligned = max(alignment, ALIGNMENT) * partitions
        offset = 0
        for parameter in self.parameters:
            parameter.flat_offset = math.ceil(offset / alignment) * alignment
            offset = parameter.flat_offset + parameter.numel()
        length = math.ceil(offset / aligned) * aligned
        first = self.parameters[0]
        self.weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(length, dtype=torch.float32, device=first.device)
        self.size = length // partitions
        self.start = partition * self.size
        for parameter in self.parameters:
            place = slice(parameter.flat_offset, parameter.flat_offset + parameter.numel())
            view = self.weights[place].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.main_grad = self.gradients[place].view_as(parameter)
        own = slice(self.start, self.start + self.size)
        self.local_weights = self.weights[own].clone() if shards_weights else self.weights[own]
        self.local_gradients = (
            torch.zeros_like(self.gradients[own]) if shards_gradients else self.gradients[own]
        )
        # Of each parameter, what the gradients were that this rank has summed with the others' and let go of.
        self.reduced_grad_norms = self.gradients.new_zeros(len(self.parameters), dtype=torch.float64)
        # In fp32 the weights are their own master copy: no second one, nothing to copy after a step.
        self.weights_are_master = first.dtype == torch.float32 and not master_on_host
        self.host_gradients: Tensor | None = None
        master = self.local_weights if self.weights_are_master else self.local_weights.float()
        if master_on_host:
            # Page-locked, which copies to and from the device need to be fast.
            master = get_accelerator().pin_memory(master.to("cpu", copy=True))
            self.host_gradients = get_accelerator().pin_memory(torch.zeros_like(master))
        self.master = nn.Parameter(master.detach())
        if shards_weights:
            self.free_full_params()
        if shards_gradients:
            _free_storage(self.gradients)

    @property
    def quantized(self) -> bool:
        """Whether the moments of these parameters have 8 bits."""
        return self.moment_bits == 8

    def fragment(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """(start, length) within the local partition of what this rank owns of the parameter, if anything."""
        begin = max(parameter.flat_offset, self.start)
        end = min(parameter.flat_offset + parameter.numel(), self.start + self.size)
        return (begin - self.start, end - begin) if begin < end else None

    def fragments(self) -> list[tuple[nn.Parameter, int, int]]:
        """(parameter, start, length) of what this rank owns, in the order of the partition."""
        owned = [(parameter, self.fragment(parameter)) for parameter in self.parameters]
        return [(parameter, *fragment) for parameter, fragment in owned if fragment is not None]

    def without_padding(self, values: Tensor | QuantizedMoment) -> Tensor:
        """The parameters' elements of the partition one after the other, in fp32; a view where they are
        already so. Copies are on the CPU: the device need not hold more than one parameter's at a time."""
        fragments = self.fragments()
        lengths = [length for _, _, length in fragments]
        if isinstance(values, Tensor) and fragments[-1:] and sum(fragments[-1][1:]) == sum(lengths):
            return values[: sum(lengths)]
        result = torch.empty(sum(lengths), dtype=torch.float32)
        for (_, start, length), part in zip(fragments, result.split(lengths), strict=True):
            part.copy_(read_moment(values, start, length))
        return result

    # --- weights ---

    @property
    def has_full_params(self) -> bool:
        """Whether all weights are here now."""
        return self.weights.untyped_storage().nbytes() > 0

    def copy_master_to_params(self) -> None:
        """Rounds the master weights to the run's precision, into this rank's partition."""
        if not self.weights_are_master:
            self.local_weights.copy_(self.master.detach())

    def all_gather_params(self, dp_group: dist.ProcessGroup) -> dist.Work:
        """Starts to fill the whole weights from the partitions of all replicas; they are there after
        `wait()`. Collective."""
        own = self.local_weights
        if self.shards_weights:
            _alloc_storage(self.weights)
        else:
            own = own.clone()  # gloo may not gather into the buffer that it sends from
        # What autograd has saved of a parameter stays valid: its version is counted apart from the buffer's.
        return dist.all_gather_into_tensor(self.weights, own, group=dp_group, async_op=True)

    def free_full_params(self) -> None:
        """Keeps this rank's partition only."""
        _free_storage(self.weights)

    # --- gradients ---

    def zero_gradients(self) -> None:
        """Empties what has accumulated."""
        (self.local_gradients if self.shards_gradients else self.gradients).zero_()
        self.reduced_grad_norms.zero_()

    def alloc_full_grads(self) -> None:
        """Makes room for whole gradients, all zero, where these are shared."""
        _alloc_storage(self.gradients)
        self.gradients.zero_()

    def reduce_scatter_grads(self, dp_group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
        """Starts to sum the replicas' whole gradients; after `wait()`, this partition's part of the sum is
        for `accumulate_grad_shard`. Collective."""
        norms = [torch.linalg.vector_norm(parameter.main_grad) for parameter in self.parameters]
        self.reduced_grad_norms += torch.stack(norms)
        part = torch.empty_like(self.local_gradients)
        return part, dist.reduce_scatter_tensor(part, self.gradients, group=dp_group, async_op=True)

    def accumulate_grad_shard(self, part: Tensor) -> None:
        """Adds what `reduce_scatter_grads` has made to the partition's gradient and lets go of the whole."""
        self.local_gradients += part
        _free_storage(self.gradients)

    def local_grad(self, parameter: nn.Parameter) -> Tensor:
        """The accumulated gradient, flat, as a view: of gradients that are shared what this rank owns, which
        may be nothing."""
        if not self.shards_gradients:
            return parameter.main_grad.reshape(-1)
        start, length = self.fragment(parameter) or (0, 0)
        return self.local_gradients[start : start + length]

    def local_grad_norms(self) -> list[Tensor]:
        """Per parameter the norm of `local_grad`, fp64 scalars."""
        return [accurate_norm(self.local_grad(parameter)) for parameter in self.parameters]

    def unreduced_grad_norms(self) -> list[Tensor]:
        """Per parameter a norm, fp64, of what this rank has computed by itself: finite only if all of it is.
        To be asked for before whole gradients are summed over replicas."""
        return list(self.reduced_grad_norms) if self.shards_gradients else self.local_grad_norms()

    def set_master_grad(self, factor: float) -> None:
        """The partition's gradient, times `factor`, becomes that of the master weights."""
        if factor != 1.0:
            self.local_gradients.mul_(factor)
        if self.host_gradients is not None:
            self.host_gradients.copy_(self.local_gradients)
        self.master.grad = self.local_gradients if self.host_gradients is None else self.host_gradients


def is_host_memory(device: torch.device) -> bool:
    """Whether tensors of the device lie in the host's memory anyway."""
    return device.type == "cpu"


def _free_storage(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)


def _alloc_storage(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def accurate_norm(values: Tensor) -> Tensor:
    """2-norm of an fp32 tensor to about 1e-8 relative, as an fp64 scalar, at the speed of reading it once."""
    flat = values.reshape(-1)
    whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
    square = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        chunks = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)
        square = square + chunks.double().square().sum()
    return square.sqrt()
