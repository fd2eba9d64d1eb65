"""Restores the optimizer state of one group of parameters from a checkpoint.

With ZeRO each data-parallel rank reads the state of its own partition. Without ZeRO every replica holds the
state of all parameters. If every replica read all of it, the file system would deliver each byte once per
replica. Therefore each replica reads an equal share of the elements into its own buffers, and then the
replicas broadcast their shares. Until the broadcast no replica waits for another one, so an error on one
replica can be raised on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.optimizer.eight_bit import new_moment
from megatron.optimizer.flat_group import ALIGNMENT, FlatGroup
from megatron.optimizer.quantized import write_moment


def in_host_memory(values: Tensor) -> Tensor | None:
    """Returns `values` if a reader can write into them, that is, if they are fp32 in host memory; otherwise
    None."""
    return values if values.device.type == "cpu" and values.dtype == torch.float32 else None


class LoadedGroup:
    """The state of one group of parameters while it is loaded. `store_moment` and `add_others` take what this
    rank has read. `exchange` completes the state."""

    def __init__(
        self,
        flat: FlatGroup,
        state: MutableMapping[Any, dict[str, Any]],
        group: dict[str, Any],
        steps_in_group: bool,
    ) -> None:
        """state, group: the optimizer's state, and its record of the group. steps_in_group: whether the
        optimizer keeps the number of updates in `group`."""
        self._flat, self._state, self._group, self._steps_in_group = flat, state, group, steps_in_group
        self._axis = flat.axis
        # Replicas cannot share if a share could divide a block of 8-bit elements, or if NCCL had to reach
        # host memory.
        is_shared = (
            flat.partitions == 1 and flat.axis.size > 1 and not flat.quantized and flat.host_gradients is None
        )
        self._shares = flat.axis.size if is_shared else 1
        self._share_size = math.ceil(flat.size / self._shares / ALIGNMENT) * ALIGNMENT
        # The optimizer's state, other than moments, that all parameters of the group share: the step.
        self._others: dict[str, Any] = {}
        self._first_name = ""
        self._moments: list[str] = []

    def fragments(self) -> list[tuple[nn.Parameter, int, int]]:
        """Returns (parameter, start, length) for each parameter with elements in this rank's share of the
        partition, in order."""
        rank = self._axis.rank if self._shares > 1 else 0
        low, high = rank * self._share_size, (rank + 1) * self._share_size
        clipped = [
            (parameter, max(start, low), min(start + length, high))
            for parameter, start, length in self._flat.fragments()
        ]
        return [(parameter, first, last - first) for parameter, first, last in clipped if first < last]

    def host_moment(self, key: str, start: int, length: int) -> Tensor | None:
        """Returns elements of a moment of the partition that a reader may fill, if they are in host memory;
        None if they are on a device or quantized."""
        moment = self._moment(key)
        return in_host_memory(moment[start : start + length]) if isinstance(moment, Tensor) else None

    def store_moment(self, name: str, key: str, start: int, elements: Tensor) -> None:
        """Stores elements of a moment, beginning at element `start` of the partition. It does nothing if they
        are in the tensor that `host_moment` returns."""
        place = self.host_moment(key, start, elements.numel())
        if place is not None and place.data_ptr() == elements.data_ptr():
            return
        if not write_moment(self._moment(key), start, elements):
            raise RuntimeError(f"{key} of {name} was not quantized to within one step")

    def _moment(self, key: str) -> Any:
        """Returns a moment of the partition, which is zero before it is loaded."""
        state = self._state[self._flat.master]
        if key not in state:
            state[key] = new_moment(key, self._flat.master, self._flat.moment_bits)
            self._moments.append(key)
        return state[key]

    def add_others(self, name: str, others: Mapping[str, Any]) -> None:
        """Adds the optimizer's state of a parameter, except its moments. Raises UserError if it differs from
        the state of an earlier parameter of the group."""
        self._first_name = self._first_name or name
        for key, value in others.items():
            first = self._others.setdefault(key, value)
            if float(value) != float(first):
                raise UserError(
                    f"the checkpoint is inconsistent: {name} has {float(value):g} optimizer updates, "
                    f"{self._first_name} has {float(first):g}; expected files of one step"
                )

    def exchange(self) -> None:
        """Broadcasts each replica's share to all replicas, and restores the step. It is a collective in the
        data-parallel group. Raises UserError on all of its ranks if they have read different steps."""
        if self._shares > 1:
            read: list[Any] = [None] * self._shares
            dist.all_gather_object(read, (self._first_name, self._others, self._moments), self._axis.group)
            for name, others, moments in read:
                self.add_others(name, others)
                for key in moments:  # a share that consists of padding has no moments
                    self._moment(key)
            buffers = [self._flat.master.data, *(self._moment(key) for key in sorted(self._moments))]
            for buffer in buffers:
                for rank, share in enumerate(buffer.split(self._share_size)):
                    dist.broadcast(share, group=self._axis.group, group_src=rank)
        self._store_others()

    def _store_others(self) -> None:
        """Restores the state that is not a moment in the place where the optimizer reads it."""
        for key, value in self._others.items():
            kept = self._group if self._steps_in_group else self._state[self._flat.master]
            if self._steps_in_group and key == "step":
                value = int(value)
            elif isinstance(value, Tensor):
                # A fused kernel reads the step on the device; other implementations read it on the CPU.
                device = self._flat.master.device if self._group.get("fused") else "cpu"
                value = value.to(device, copy=True)
            kept[key] = value
