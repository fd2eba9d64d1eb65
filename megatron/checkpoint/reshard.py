"""A native checkpoint of any layout, read parameter by parameter for this rank's place in another.

The parameter's spec says where the shards that were saved, and this rank's, lie in the whole. Files are
memory-mapped, so a rank reads what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.discovery import Checkpoint
from megatron.checkpoint.formats.native import VALUES, OptimizerFiles
from megatron.checkpoint.formats.torch_archive import StoredTensor, concat_pieces
from megatron.config import ConfigError
from megatron.config.vocab import padded_vocab_size
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices

# fp32 values, moments by the optimizer's names, and what else it keeps (the step).
ParameterState = tuple[Tensor, Mapping[str, Tensor], dict[str, Any]]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for: so they need not all be in memory."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        return self._read[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


# What `run.json` calls the fields of a ParameterSpec, where that is another name.
_FILE_KEYS = {
    "global_shape": "whole_shape",
    "num_valid_rows": "used_rows",
    "num_fused_parts": "blocks",
    "lr_mult": "rate_factor",
}


def spec_record(spec: ParameterSpec) -> dict[str, Any]:
    """The spec in types that JSON knows."""
    record = {_FILE_KEYS.get(name, name): value for name, value in asdict(spec).items()}
    return {**record, "whole_shape": list(spec.global_shape)}


class SavedParameters:
    """fp32 values and moments of every parameter in a checkpoint folder, by global name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """ConfigError names a file that is damaged."""
        saved = checkpoint.config
        self.folder = checkpoint.folder
        self.tensor_size = saved.parallel.tensor_model_parallel_size
        self.padded_vocab = padded_vocab_size(checkpoint.vocab_size, saved.model, self.tensor_size)
        self._files = OptimizerFiles(self.folder, self.tensor_size)
        self.loss_scaler: dict = self._files.common["loss_scaler"]
        self.moments_kind = saved.optimizer.moments_kind

    def read(self, name: str, spec: ParameterSpec, tp_group: TPGroup) -> ParameterState:
        """Of this rank's shard, flat: fp32 values, moments by the optimizer's names, and what else it keeps
        (the step). The result may share memory with the file. ConfigError if the parameter is missing."""
        if name not in self._files.names:
            raise ConfigError(f"checkpoint {self.folder} holds no parameter {name}: is it of another model?")
        moments = {key: partial(self._shard, name, spec, tp_group, key) for key in self._files.moments(name)}
        others = {
            key: value.tensor() if isinstance(value, StoredTensor) else value
            for key, value in self._files.others(name).items()
        }
        return self._shard(name, spec, tp_group, VALUES), LazyTensors(moments), others

    def _shard(self, name: str, spec: ParameterSpec, tp_group: TPGroup, key: str) -> Tensor:
        def saved_shard(tp_rank: int) -> Tensor:
            return concat_pieces(self._files.pieces(tp_rank, name, key))

        saved = spec
        if spec.num_valid_rows is not None:
            saved = replace(spec, global_shape=(self.padded_vocab, *spec.global_shape[1:]))
        if spec.shard_dim is None or (saved == spec and self.tensor_size == tp_group.size):
            return saved_shard(0 if spec.shard_dim is None else tp_group.rank)
        return reshard(spec, tp_group, saved, self.tensor_size, saved_shard).reshape(-1)


def reshard(
    spec: ParameterSpec,
    tp_group: TPGroup,
    saved: ParameterSpec,
    saved_size: int,
    saved_shard: Callable[[int], Tensor],
) -> Tensor:
    """This rank's shard out of those that `saved_size` tensor ranks held, of which it reads what overlaps.

    `saved`: the spec as it was, whose padding of the vocabulary may differ; padding comes out as zeros.
    saved_shard: tensor rank -> its shard, of any shape.
    """
    dim = spec.shard_dim
    target = torch.zeros(local_shape(spec, tp_group))
    used = spec.num_valid_rows if spec.num_valid_rows is not None else spec.global_shape[dim]
    for rank in range(saved_size):
        group = TPGroup(rank, saved_size)
        shard: Tensor | None = None
        for target_offset, mine in _with_offsets(local_slices(spec, tp_group)):
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
