"""Saves of a run as folders of torch.distributed.checkpoint (see `megatron.checkpoint.formats.dcp`).

Each rank writes one file with the elements that it holds, divided into boxes of the full parameters. Of the
replicas of a parameter one is written: by tensor-parallel rank 0, by the first stage that holds a tied
parameter, and without ZeRO by one of the data-parallel ranks, which share the parameters. Rank 0 writes
`.metadata` from the tables of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.files import Files
from megatron.checkpoint.formats.dcp import CHUNK_BYTES, DcpFiles, append_archive, key_of, path_of
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.universal_info import recorded_spec
from megatron.checkpoint.saving.files import Content, RankFiles
from megatron.checkpoint.saving.formats import SaveFormat
from megatron.checkpoint.saving.run_record import within_limit
from megatron.engine.pipeline_engine import GPTEngine
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import Box, boxes
from megatron.mpu.parameters import own_storage
from megatron.optimizer.zero import LocalParamState
from megatron.shares import share_out

_STEP = "step"
# Writes of at most this many bytes are collected.
_SMALL_BYTES = 1 << 12


class _Chunk(NamedTuple):
    """A box of a parameter's state, or its step, and the place of its archive."""

    name: str
    state_name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DcpFormat(SaveFormat):
    """Folders of torch.distributed.checkpoint. A table has the rank's chunks and loss scale."""

    def write(self, engine: GPTEngine, folder: Path, run: dict[str, Any], files: RankFiles) -> Any:
        optimizer = engine.optimizer
        files.make_folder(folder)
        parts = list(optimizer.local_param_states(with_values=False))
        written = {part.name for part in parts if part.owned}
        if not optimizer.is_partitioned:
            written = _share_of_replica([part for part in parts if part.owned], engine.mesh)
        archives = _Archives(f"__{engine.global_rank}_0.distcp")
        if written:
            states = optimizer.local_param_states(written)
            files.write(folder / archives.file_name, map(archives.content, states))
        rest = {part.name for part in parts} - written
        files.write(None, map(_memory, optimizer.local_param_states(rest)))
        return archives.chunks, optimizer.scaler.state_dict()

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        """See `SaveFormat`. Compares the sizes of the chunks with the shapes of the parameters."""
        expected = {(name, VALUES) for name in run["parameters"]}
        for state_name, digests in run["certificate"]["digests"].items():
            expected |= {(name, state_name) for name in digests}
        numel = Counter[tuple[str, str]]()
        for chunk in (chunk for chunks, _ in tables for chunk in chunks):
            numel[chunk.name, chunk.state_name] += prod(chunk.sizes)
        return [
            f"a part of {key_of(name, state_name)}"
            for name, state_name in sorted(expected | numel.keys())
            if numel[name, state_name] != prod(_shape(run, name, state_name))
        ]

    def finish(self, folder: Path, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `SaveFormat`. Writes `.metadata`."""
        distcp = DcpFiles(folder)
        for chunk in (chunk for chunks, _ in tables for chunk in chunks):
            key = key_of(chunk.name, chunk.state_name)
            distcp.declare(key, _shape(run, chunk.name, chunk.state_name), path_of(key))
            place = _StorageInfo(chunk.file, chunk.start, chunk.length)
            distcp.add_chunk(key, chunk.offsets, chunk.sizes, place)
        files = {**run["files"], **distcp.finish()}
        return within_limit({**run, "files": files, "loss_scaler": tables[0][1]})


def _share_of_replica(parts: Sequence[LocalParamState], mesh: Mesh) -> set[str]:
    """Returns the parameters that this rank writes. Ranks with equal elements of a parameter share them."""
    sizes: dict[tuple[str, ...], dict[str, int]] = {}
    for part in parts:
        sizes.setdefault(part.spec.reduced_axes, {})[part.name] = prod(part.spec.global_shape)
    written: set[str] = set()
    for names, of_parameters in sizes.items():
        axis = mesh.axis(*names)
        shares = share_out(of_parameters, axis.size)
        written |= {name for name, share in shares.items() if share == axis.rank}
    return written


def _shape(run: dict[str, Any], name: str, state_name: str) -> tuple[int, ...]:
    return () if state_name == _STEP else recorded_spec(run["parameters"][name]).valid_shape


class _Archives:
    """The archives in the file of this rank, and their chunks."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.chunks: list[_Chunk] = []
        self._position = 0

    def content(self, part: LocalParamState) -> Content:
        """Returns the content with all states of a part of a parameter."""
        return Content(partial(self._write, part), [part])

    def _write(self, part: LocalParamState, file: Any) -> None:
        collected = _CollectedWrites(file, self._position)
        stop = part.start + next(iter(part.values.values())).numel()
        held = [limited for box in boxes(part.spec, part.axes, part.start, stop) for limited in _limited(box)]
        for state_name, values in part.values.items():
            for box in held:
                first = box.first - part.start
                elements = own_storage(values[first : first + box.numel].view(box.sizes))
                self._append(part.name, state_name, box.offsets, elements, collected)
        if part.step is not None and part.start == 0 and not any(axis.rank for axis in part.axes):
            self._append(part.name, _STEP, (), torch.tensor(part.step, dtype=torch.float32), collected)
        collected.flush()
        self._position = collected.tell()

    def _append(
        self, name: str, state_name: str, offsets: tuple[int, ...], values: Tensor, file: _CollectedWrites
    ) -> None:
        file.address = values.data_ptr()
        place = append_archive(self.file_name, file, values)
        where = (self.file_name, place.offset, place.length)
        self.chunks.append(_Chunk(name, state_name, offsets, tuple(values.shape), *where))


class _CollectedWrites:
    """Collects the small writes of torch.save, which writes an archive in forty pieces, and passes the memory
    of a tensor on as it is. address: of that memory."""

    def __init__(self, file: Any, position: int) -> None:
        self.address = 0
        self._position = position
        self._file = file
        self._small = bytearray()

    def write(self, data: Any) -> int:
        """Appends the bytes of a buffer."""
        content = memoryview(data).cast("B")
        self._position += len(content)
        is_tensor = len(content) > 0 and np.frombuffer(content, np.uint8).ctypes.data == self.address
        if is_tensor or len(content) > _SMALL_BYTES:
            self.flush()
            self._file.write(content)
        else:
            self._small += content
        return len(content)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        if self._small:
            self._file.write(bytes(self._small))
            self._small.clear()


def _limited(box: Box) -> Iterator[Box]:
    """Divides a box into boxes of at most CHUNK_BYTES, along its first dimension with several indices: a rank
    that loads a part of it reads less, and a copy from a device needs less memory."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), 0)
    inner = prod(box.sizes[dim + 1 :])
    step = max(CHUNK_BYTES // 4 // inner, 1)
    for first in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += first
        sizes[dim] = min(step, box.sizes[dim] - first)
        yield Box(box.first + first * inner, tuple(offsets), tuple(sizes))


def _memory(part: LocalParamState) -> Content:
    """Returns the memory of a part of a parameter as a content, for its digests."""

    def save(file: Any) -> None:
        for values in part.values.values():
            file.write(values.contiguous().numpy().data)

    return Content(save, [part])
