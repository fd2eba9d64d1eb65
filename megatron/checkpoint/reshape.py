"""A native checkpoint of any layout, read parameter by parameter for this rank's place in another.

Every (stage, tensor rank) pair of the run that saved, and with ZeRO-1 each of its data-parallel ranks, wrote
a file of flat fp32 partitions that says which parameter lies where in them. The fragments of a parameter in
the order of the data-parallel ranks are its tensor-parallel shard; the parameter's spec says where a shard
lies in the whole. Files are memory-mapped, so a rank reads what it needs.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron.checkpoint.folders import Checkpoint
from megatron.config import ConfigError
from megatron.config.vocab import padded_vocab_size
from megatron.mpu.layout import TensorGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices

_ZERO_FILE = re.compile(r"zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")


# fp32 values, moments by the optimizer's names, and what else it keeps (the step).
ParameterState = tuple[Tensor, dict[str, Tensor], dict[str, Any]]


def spec_record(spec: ParameterSpec) -> dict[str, Any]:
    """The spec in types that JSON knows."""
    return {**asdict(spec), "whole_shape": list(spec.whole_shape)}


@dataclass(frozen=True)
class _Fragment:
    """Elements start to start + length - 1 of an optimizer group's partition in one file."""

    state: dict
    group: int
    start: int
    length: int

    def of(self, partition: Tensor) -> Tensor:
        return partition[self.start : self.start + self.length]

    @property
    def master(self) -> Tensor:
        return self.state["single_partition_of_fp32_groups"][self.group]

    @property
    def kept(self) -> dict[str, Any]:
        """What the optimizer keeps of the group: moments as long as the partition, and the step."""
        return self.state["base_optimizer_state"]["state"].get(self.group, {})

    @property
    def moments(self) -> list[str]:
        """The names of what is kept per element."""
        return [
            key
            for key, value in self.kept.items()
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.master.numel()
        ]

    @property
    def others(self) -> dict[str, Any]:
        """What is kept beside the moments: the step."""
        moments = self.moments
        return {key: value for key, value in self.kept.items() if key not in moments}


class SavedParameters:
    """fp32 values and moments of every parameter in a checkpoint folder, by global name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """ConfigError names a file that is damaged."""
        saved = checkpoint.config
        self.folder = folder = checkpoint.folder
        self.tensor_size = tensor_size = saved.parallel.tensor_model_parallel_size
        self.padded_vocab = padded_vocab_size(checkpoint.vocab_size, saved.model, tensor_size)
        self._fragments: list[dict[str, list[_Fragment]]] = [{} for _ in range(tensor_size)]
        states = [(model, _read(path)[key]) for model, path, key in _optimizer_files(folder)]
        if not states:
            raise ConfigError(f"checkpoint {folder} holds no optimizer state: take another one")
        self.loss_scaler: dict = states[0][1]["loss_scaler"]
        first_holder: dict[tuple[int, str], int] = {}
        for model_rank, state in states:
            tensor_rank = model_rank % tensor_size
            for group, addresses in enumerate(state["param_slice_mappings"]):
                for name, address in addresses.items():
                    # A tied parameter is on two stages: one of them is enough.
                    if first_holder.setdefault((tensor_rank, name), model_rank) == model_rank:
                        fragment = _Fragment(state, group, address.start, address.numel)
                        self._fragments[tensor_rank].setdefault(name, []).append(fragment)

    def read(self, name: str, spec: ParameterSpec, tensor: TensorGroup) -> ParameterState:
        """Of this rank's shard, flat: fp32 values, moments by the optimizer's names, and what else it keeps
        (the step). The result may share memory with the file. ConfigError if the parameter is missing."""
        if name not in self._fragments[0]:
            raise ConfigError(f"checkpoint {self.folder} holds no parameter {name}: is it of another model?")
        first = self._fragments[0][name][0]
        values = self._shard(name, spec, tensor, lambda fragment: fragment.master)
        return (
            values,
            {key: self._shard(name, spec, tensor, lambda f, key=key: f.kept[key]) for key in first.moments},
            first.others,
        )

    def spread(self, name: str) -> float:
        """Largest difference between the tensor ranks' copies of a replicated parameter and its moments."""
        copies = [self._copy(name, rank) for rank in range(self.tensor_size)]
        return max(
            float((copy[key] - copies[0][key]).abs().max())
            for copy in copies
            for key in copies[0]
            if copy[key].numel()
        )

    def mean(self, name: str) -> ParameterState:
        """As `read` for a replicated parameter, averaged over the tensor ranks."""
        copies = [self._copy(name, rank) for rank in range(self.tensor_size)]
        average = {key: torch.stack([copy[key] for copy in copies]).mean(0) for key in copies[0]}
        return average.pop("fp32"), average, self._fragments[0][name][0].others

    def _copy(self, name: str, tensor_rank: int) -> dict[str, Tensor]:
        """What one tensor rank holds of a replicated parameter."""
        fragments = self._fragments[tensor_rank][name]
        return {
            "fp32": torch.cat([fragment.of(fragment.master) for fragment in fragments]),
            **{key: torch.cat([f.of(f.kept[key]) for f in fragments]) for key in fragments[0].moments},
        }

    def _shard(
        self, name: str, spec: ParameterSpec, tensor: TensorGroup, partition: Callable[[_Fragment], Tensor]
    ) -> Tensor:
        def saved_shard(tensor_rank: int) -> Tensor:
            parts = [fragment.of(partition(fragment)) for fragment in self._fragments[tensor_rank][name]]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        saved = spec
        if spec.used_rows is not None:
            saved = replace(spec, whole_shape=(self.padded_vocab, *spec.whole_shape[1:]))
        if spec.shard_dim is None or (saved == spec and self.tensor_size == tensor.size):
            return saved_shard(0 if spec.shard_dim is None else tensor.rank)
        return recut(spec, tensor, saved, self.tensor_size, saved_shard).reshape(-1)


def recut(
    spec: ParameterSpec,
    tensor: TensorGroup,
    saved: ParameterSpec,
    saved_size: int,
    saved_shard: Callable[[int], Tensor],
) -> Tensor:
    """This rank's shard out of those that `saved_size` tensor ranks held, of which it reads what overlaps.

    `saved`: the spec as it was, whose padding of the vocabulary may differ; padding comes out as zeros.
    saved_shard: tensor rank -> its shard, of any shape.
    """
    dim = spec.shard_dim
    target = torch.zeros(local_shape(spec, tensor))
    used = spec.used_rows if spec.used_rows is not None else spec.whole_shape[dim]
    for rank in range(saved_size):
        group = TensorGroup(rank, saved_size)
        shard: Tensor | None = None
        for target_offset, mine in _with_offsets(local_slices(spec, tensor)):
            for saved_offset, theirs in _with_offsets(local_slices(saved, group)):
                start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop, used)
                if start >= stop:
                    continue
                if shard is None:
                    shard = saved_shard(rank).view(local_shape(saved, group))
                source = shard.narrow(dim, saved_offset + start - theirs.start, stop - start)
                target.narrow(dim, target_offset + start - mine.start, stop - start).copy_(source)
    return target


def _with_offsets(slices: tuple[slice, ...]) -> list[tuple[int, slice]]:
    """Each slice of the whole with its place in the shard, where the slices follow one another."""
    offset, result = 0, []
    for part in slices:
        result.append((offset, part))
        offset += part.stop - part.start
    return result


def _optimizer_files(folder: Path) -> list[tuple[int, Path, str]]:
    """(model-parallel rank, path, key of the optimizer's state), in the order of the data-parallel ranks:
    ZeRO-1's files, else those of ZeRO-0."""
    zero = [(_ZERO_FILE.fullmatch(path.name), path) for path in folder.glob("zero_pp_rank_*_optim_states.pt")]
    found = sorted((int(match["data"]), int(match["model"]), path) for match, path in zero if match)
    if found:
        return [(model, path, "optimizer_state_dict") for _, model, path in found]
    plain = [(_MODEL_FILE.fullmatch(path.name), path) for path in folder.glob("mp_rank_*_model_states.pt")]
    return sorted((int(match["model"]), path, "optimizer") for match, path in plain if match)


def _read(path: Path) -> dict:
    try:
        with torch.serialization.safe_globals([fragment_address, OrderedDict]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside torch
        raise ConfigError(
            f"checkpoint file {path} cannot be read ({error}): delete the folder, and the newest one before "
            f"it is taken"
        ) from error
