"""Native checkpoints: DeepSpeed's files, as runs save them.

The layer files hold the weights in the run's precision; the optimizer's files hold fp32 values and moments.
Both are read on any layout: a parameter's spec says where the saved shards, and this rank's shard, are in the
global tensor. Files are memory-mapped, so a rank reads only the bytes that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.formats.deepspeed_files import (
    VALUES,
    OptimizerFiles,
    has_index,
    lacks,
    layer_files,
    layer_of,
    optimizer_files,
    unneeded_files,
)
from megatron.checkpoint.formats.state import (
    ParameterRecord,
    ReplicaMismatch,
    StateReader,
    check_shape,
    padded_spec,
)
from megatron.checkpoint.formats.torch_archive import read_file
from megatron.checkpoint.names import check_parameter
from megatron.checkpoint.record import Checkpoint
from megatron.errors import UserError
from megatron.files import HostileFileError
from megatron.mapped_file import release_pages
from megatron.model.layer_list import EMBEDDING, FIRST_TRANSFORMER_LAYER
from megatron.mpu.mesh import Axis, place_on
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import merge_shards, reshard
from megatron.mpu.pieces import Piece
from megatron.text_table import first_few

# Size of a block of `read_blocks`. A thread of a conversion holds one block, and as many bytes of the shards.
BLOCK_BYTES = 1 << 20
VALUE_BYTES = 4


class NativeReader(StateReader):
    """Reads a native checkpoint of any layout."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        saved_specs: dict[str, ParameterSpec] | None = None,
        tp_size: int | None = None,
    ) -> None:
        """saved_specs: the specs of the parameters with the vocabulary padding of the run that saved.
        tp_size: the tensor-parallel size of that run. If None, each comes from the checkpoint's config."""
        super().__init__(checkpoint)
        self._has_saved_specs = saved_specs is not None
        if saved_specs is not None:
            self.specs = saved_specs
        if tp_size is not None:
            self.tp_size = tp_size

    @cached_property
    def tp_size(self) -> int:
        """Tensor-parallel size of the run that saved."""
        return self.checkpoint.config.parallel.tensor_model_parallel_size

    @property
    def _axes(self) -> tuple[Axis, ...]:
        """The sizes of the axes that shard parameters in the files."""
        return (Axis("tp", size=self.tp_size),)

    @cached_property
    def files(self) -> OptimizerFiles:
        run = self.checkpoint.run
        on_disk = Path(os.fspath(self.folder))  # because an `ObjectPath` lists the object store's files
        present = {path.name for path in on_disk.glob("*")} if self.checkpoint.is_partial else None
        return OptimizerFiles(self.folder, self.tp_size, run.get("index"), run.get("files"), present)

    @cached_property
    def layers(self) -> LayerFiles:
        return LayerFiles(self.folder)

    @property
    def stored_names(self) -> Collection[str]:
        return self.files.names

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        return self.files.common["loss_scaler"]

    def state_names(self, name: str) -> list[str]:
        return list(self.files.one_of(name))

    def optimizer_scalars(self, name: str) -> dict[str, Any]:
        return self.files.one_of(name).scalars

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        """See `StateReader`. Reads only the first TP rank's replica of a replicated parameter."""
        saved = self._saved_spec(spec or self.specs[name])
        shape, numel = saved.local_shape(self._axes), saved.local_numel(self._axes)
        num_shards = len(saved.all_shards(self._axes))
        shards = [self._shard(rank, name, state_name, saved) for rank in range(num_shards)]
        return merge_shards(saved, [elements(shard, state_name, 0, numel).view(shape) for shard in shards])

    def read_piece(self, piece: Piece, state_name: str, out: Tensor | None = None) -> Tensor:
        """See `StateReader`. Opens only the files that contain elements of the piece."""
        name, saved = piece.name, self._saved_spec(piece.spec)
        if (rank := self._rank_of_shard(piece)) is not None:
            shard = self._shard(rank, name, state_name, saved)
            return elements(shard, state_name, piece.start, piece.stop, out)
        shard_of = cache(partial(self._shard, name=name, state_name=state_name, saved=saved))

        def saved_elements(rank: int, first: int, last: int) -> Tensor:
            return elements(shard_of(rank), state_name, first, last)

        return reshard(
            piece.spec, piece.axes, piece.start, piece.stop, saved, self._axes, saved_elements, out
        )

    def files_of_pieces(self, pieces: Iterable[Piece]) -> set[str]:
        run = self.checkpoint.run
        if not has_index(run):
            return {path.name for _, path, _ in optimizer_files(self.folder, run["files"])}
        paths: set[Path] = set()
        for piece in pieces:
            if (rank := self._rank_of_shard(piece)) is not None:
                paths |= self.files.paths(rank, piece.name, piece.start, piece.stop)
            else:  # reads the elements of all shards, which is more than the piece needs
                paths |= {path for one in range(self.tp_size) for path in self.files.paths(one, piece.name)}
        return {path.name for path in paths or {self.files.first_path}}

    def _rank_of_shard(self, piece: Piece) -> int | None:
        """Returns the tensor-parallel rank whose files contain exactly the shard of the piece. Returns None
        if the piece is spread over the files of several ranks, or is a part of a saved shard."""
        if "tp" not in piece.spec.axis_names:  # the files of each tensor-parallel rank hold all experts
            return 0 if all(axis.size == 1 for axis in piece.axes) else None
        tp = place_on(piece.axes, "tp")
        is_saved = self._saved_spec(piece.spec) == piece.spec and self.tp_size == tp.size
        return tp.rank if is_saved else None

    def read_blocks(self, name: str, state_name: str, mismatch: ReplicaMismatch) -> Iterator[Tensor]:
        """See `StateReader`. If replicas differ, the blocks are the mean of the replicas."""
        saved = self._saved_spec(self.specs[name])
        shards = [self._shard(rank, name, state_name, saved) for rank in range(self.tp_size)]
        full = replace(saved, global_shape=saved.valid_shape, num_valid_rows=None)
        rows, *row_shape = full.global_shape
        step = max(BLOCK_BYTES // VALUE_BYTES // prod(row_shape), 1)
        if not saved.sharding:
            step = max(step // len(shards), 1)  # because one block of every replica is in memory

        read: list[tuple[list[Piece], int, int]] = []

        def saved_elements(rank: int, first: int, last: int) -> Tensor:
            read.append((shards[rank], first, last))
            return elements(shards[rank], state_name, first, last)

        for first in range(0, rows, step):
            span = first * prod(row_shape), min(first + step, rows) * prod(row_shape)
            if not saved.sharding:
                replicas = [saved_elements(rank, *span) for rank in range(len(shards))]
                yield _mean_of_replicas(replicas, mismatch)
            else:
                yield reshard(full, (), *span, saved, self._axes, saved_elements)
            while read:  # so that the pages need not stay in memory
                for part in _parts(*read.pop(), state_name):
                    release_pages(part.data_ptr(), part.nbytes)

    def _saved_spec(self, spec: ParameterSpec) -> ParameterSpec:
        """Returns the spec with the vocabulary padding of the run that saved the checkpoint."""
        return spec if self._has_saved_specs else padded_spec(spec, self.checkpoint, self.tp_size)

    def _shard(self, rank: int, name: str, state_name: str, saved: ParameterSpec) -> list[Piece]:
        """Returns a tensor-parallel rank's shard. Raises UserError if its number of elements is wrong."""
        shard = self.files.pieces(rank, name, saved, (Axis("tp", rank, self.tp_size),))
        if not shard:
            raise lacks(self.folder, rank, name, state_name)
        if (expected := saved.local_numel(self._axes)) != shard[-1].stop:
            raise UserError(
                f"checkpoint {self.folder}: TP rank {rank} holds {shard[-1].stop:,} elements of {name}, "
                f"expected {expected:,}: the files are from different checkpoints"
            )
        return shard

    def weight_pieces(self, name: str, mismatch: ReplicaMismatch, verify: bool) -> Iterator[Piece]:
        """See `StateReader`. Reads the layer files. verify: first compare all layer files with their
        digests."""
        if verify:
            _ = self._num_verified_files
        spec = self.specs[name]
        values = self.layers.weight(name, self.specs)[: spec.num_valid_rows].reshape(-1)
        yield Piece(name, ParameterSpec(spec.valid_shape), (), 0, values.numel(), {VALUES: values})

    @cached_property
    def _num_verified_files(self) -> int:
        return self.verify_weights()

    def weights(self, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
        """See `StateReader`. Yields the weights in the layer files."""
        yield from self.layers.all_tensors(specs)

    def weights_verification(self, master_weights: bool) -> str:
        return super().weights_verification(True) if master_weights else "the digests of the layer files"

    def compared_files(self, weights_only: bool = False) -> list[str]:
        """See `StateReader`. Leaves out missing files that a resume does not need."""
        run = self.checkpoint.run
        chosen = [
            name for name in sorted(run.get("files", ())) if name.startswith("layer_") or not weights_only
        ]
        unneeded = unneeded_files(run)
        return [name for name in chosen if name not in unneeded or (self.folder / name).exists()]

    def inspect_parameters(self) -> tuple[list[ParameterRecord], list[str]]:
        """Returns the parameters in the layer files, and what is wrong with them."""
        records: list[ParameterRecord] = []
        problems: list[str] = []
        try:
            files = self.layers
        except UserError as error:
            return [], [str(error)]
        unreadable = False
        for layer in files.paths:
            try:
                global_tensors = files.global_tensors(layer, self.specs, meta=True)
                shards = files.shards(layer)
            except HostileFileError:
                raise
            except UserError as error:
                problems.append(str(error))
                unreadable = True
                continue
            for name, tensor in global_tensors.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                records.append(ParameterRecord(name, tuple(tensor.shape), dtype))
                first, *others = shards[name]
                if not self.specs[name].sharding and not all(torch.equal(first, o) for o in others):
                    problems.append(f"the TP ranks hold different values of {name}, which is not sharded")
        missing = self.specs.keys() - {record.name for record in records}
        if missing and not unreadable:
            problems.append(f"parameters that no file holds: {first_few(sorted(missing))}")
        return records, problems


def elements(
    shard: Sequence[Piece], state_name: str, start: int, stop: int, out: Tensor | None = None
) -> Tensor:
    """Returns elements start to stop - 1 of a shard in consecutive pieces. If `out` is given, copies them
    there; otherwise they share memory with a file that contains all of them."""
    parts = _parts(shard, start, stop, state_name)
    if out is not None:
        for part, target in zip(parts, out.split([part.numel() for part in parts]), strict=True):
            target.copy_(part)
        return out
    return torch.cat(parts) if len(parts) > 1 else (parts or [torch.empty(0)])[0]


def _parts(shard: Sequence[Piece], start: int, stop: int, state_name: str) -> list[Tensor]:
    """Returns elements start to stop - 1 with the stored dtype, one tensor per file."""
    return [
        piece.values[state_name][max(start - piece.start, 0) : stop - piece.start]
        for piece in shard
        if max(start, piece.start) < min(stop, piece.stop)
    ]


def _mean_of_replicas(replicas: list[Tensor], mismatch: ReplicaMismatch) -> Tensor:
    """Returns the first of the flat replicas if all are equal, else their mean."""
    values = [replica.numpy() for replica in replicas]
    differ = [mismatch.update(values[0], other) for other in values[1:]]
    return torch.from_numpy(np.mean(values, axis=0, dtype=np.float32)) if any(differ) else replicas[0]


class LayerFiles:
    """The weights in the folder of a native checkpoint. DeepSpeed writes a file per layer and TP rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = layer_files(folder)
        self._last: tuple[int, dict[str, Tensor]] = -1, {}
        if not self.paths:
            raise UserError(
                f"{folder} holds no layer files (layer_XX-model_YY-model_states.pt): is it a checkpoint?"
            )

    def shards(self, layer: int) -> dict[str, list[Tensor]]:
        """Returns global parameter name -> memory-mapped shards of all tensor-parallel ranks, in order."""
        paths = self.paths[layer]
        states = [read_file(path) for path in paths]
        for path, state in zip(paths, states, strict=True):
            if not isinstance(state, dict) or not all(
                isinstance(tensor, Tensor) for tensor in state.values()
            ):
                raise UserError(f"{path} holds something other than a dict of tensors: it is damaged")
            if state.keys() != states[0].keys():
                raise UserError(f"{path} and {paths[0]} hold different parameters: they are of two runs")
        prefix = parameter_prefix(layer)
        names = {name: check_parameter(prefix + str(name), paths[0]) for name in states[0]}
        return {full: [state[name] for state in states] for name, full in names.items()}

    def global_tensors(
        self, layer: int, specs: Mapping[str, ParameterSpec], meta: bool = False
    ) -> dict[str, Tensor]:
        """Returns the layer's parameters merged over tensor-parallel ranks, with the dtype and padding of the
        files.

        meta: return tensors on the meta device; this reads almost nothing from the files. Raises UserError
        for a parameter that is not in `specs`, or whose shape differs from its spec.
        """
        global_tensors = {}
        for name, shards in self.shards(layer).items():
            if name not in specs:
                raise UserError(f"{self.paths[layer][0]} holds {name}, which the model does not have")
            shards = shards if "tp" in specs[name].axis_names else shards[:1]
            shards = [shard.to("meta") for shard in shards] if meta else shards
            try:
                global_tensors[name] = merge_shards(specs[name], shards)
                shape = tuple(global_tensors[name].shape)
            except (RuntimeError, IndexError, ValueError):  # the shapes cannot be concatenated
                shape = tuple(shards[0].shape)
            source = f"{self.folder}: the {len(shards)} files of layer {layer} make {name}"
            check_shape(shape, specs[name], source, "they are not the files of one run")
        return global_tensors

    def all_tensors(self, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, global tensor) of every parameter, layer by layer. Raises UserError if one is
        missing."""
        missing = set(specs)
        for layer in self.paths:
            global_tensors = self.global_tensors(layer, specs)
            missing -= global_tensors.keys()
            yield from global_tensors.items()
        if missing:
            raise UserError(f"{self.folder} lacks {len(missing)} parameters, among them {sorted(missing)[0]}")

    def weight(self, name: str, specs: Mapping[str, ParameterSpec]) -> Tensor:
        """Returns one parameter as `global_tensors` does. Keeps its layer's files open for the next call."""
        layer = layer_of(name)
        if self._last[0] != layer:
            self._last = layer, self.global_tensors(layer, specs) if layer in self.paths else {}
        if name not in self._last[1]:
            raise UserError(f"{self.folder} lacks the parameter {name}")
        return self._last[1][name]


def parameter_prefix(layer_index: int) -> str:
    """Returns the prefix of a layer's parameter names. Before the transformer only the embedding has any."""
    return EMBEDDING if layer_index < FIRST_TRANSFORMER_LAYER else f"{layer_index}."
