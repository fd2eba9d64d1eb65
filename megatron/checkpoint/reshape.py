"""A native checkpoint of any layout, read parameter by parameter for this rank's place in another.

The parameter's spec says where the shards that were saved, and this rank's, lie in the whole. Files are
memory-mapped, so a rank reads what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folders import Checkpoint
from megatron.checkpoint.optimizer_files import VALUES, OptimizerFiles
from megatron.checkpoint.torch_files import StoredTensor
from megatron.config import ConfigError
from megatron.config.vocab import padded_vocab_size
from megatron.mpu.layout import TensorGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices

# fp32 values, moments by the optimizer's names, and what else it keeps (the step).
ParameterState = tuple[Tensor, Mapping[str, Tensor], dict[str, Any]]


class ReadWhenAsked(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for: so they need not all be in memory."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        return self._read[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def spec_record(spec: ParameterSpec) -> dict[str, Any]:
    """The spec in types that JSON knows."""
    return {**asdict(spec), "whole_shape": list(spec.whole_shape)}


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
        self.kept_by = saved.optimizer.moments_kind

    def read(self, name: str, spec: ParameterSpec, tensor: TensorGroup) -> ParameterState:
        """Of this rank's shard, flat: fp32 values, moments by the optimizer's names, and what else it keeps
        (the step). The result may share memory with the file. ConfigError if the parameter is missing."""
        if name not in self._files.names:
            raise ConfigError(f"checkpoint {self.folder} holds no parameter {name}: is it of another model?")
        moments = {key: partial(self._shard, name, spec, tensor, key) for key in self._files.moments(name)}
        others = {
            key: value.tensor() if isinstance(value, StoredTensor) else value
            for key, value in self._files.others(name).items()
        }
        return self._shard(name, spec, tensor, VALUES), ReadWhenAsked(moments), others

    def _shard(self, name: str, spec: ParameterSpec, tensor: TensorGroup, key: str) -> Tensor:
        def saved_shard(tensor_rank: int) -> Tensor:
            return _joined(self._files.pieces(tensor_rank, name, key))

        saved = spec
        if spec.used_rows is not None:
            saved = replace(spec, whole_shape=(self.padded_vocab, *spec.whole_shape[1:]))
        if spec.shard_dim is None or (saved == spec and self.tensor_size == tensor.size):
            return saved_shard(0 if spec.shard_dim is None else tensor.rank)
        return recut(spec, tensor, saved, self.tensor_size, saved_shard).reshape(-1)


def _joined(pieces: Sequence[StoredTensor]) -> Tensor:
    return pieces[0].tensor() if len(pieces) == 1 else torch.cat([piece.tensor() for piece in pieces])


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
