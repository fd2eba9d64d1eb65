"""Writes folders of torch.distributed.checkpoint (see `megatron.checkpoint.formats.dcp`), for runs and
conversions.

The elements of a piece are divided into boxes of the full parameter; each box is a chunk. In a run each rank
writes one file. One replica of each parameter is written: tensor-parallel rank 0 writes replicated
parameters, the first pipeline stage a tied parameter, and without ZeRO the data-parallel ranks share the
parameters. A conversion writes one file per thread. `.metadata` is written last, from the chunks of all
files.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.archive_writer import ALIGNMENT, save_archive
from megatron.checkpoint.formats.dcp import OPTIMIZER, Chunk, key_of, path_of
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.universal_info import recorded_spec
from megatron.checkpoint.formats.writing import (
    CheckpointWriter,
    Content,
    RankFiles,
    has_all_digests,
    in_rows,
)
from megatron.checkpoint.names import INTEGRITY_KEY, METADATA_FILE
from megatron.checkpoint.saving.run_record import within_limit
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import Box
from megatron.mpu.parameters import own_storage
from megatron.mpu.pieces import Piece
from megatron.shares import share_out

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine

# Size of a chunk. A chunk is in memory while it is written; a load reads only chunks that overlap with its
# shard.
CHUNK_BYTES = 1 << 26
# A conversion begins a new file after this many bytes.
_FILE_BYTES = 1 << 34
# Writes of at most this many bytes are collected into one write.
_SMALL_BYTES = 1 << 12
_STEP = "step"
Chunks = list[tuple[str, Chunk]]
"""(key, chunk) of each chunk in the files of a rank."""


class DcpWriter(CheckpointWriter):
    """Writes a DCP checkpoint with the parameter names of this program. A table (see `CheckpointWriter`)
    consists of a rank's chunks and the state of the loss scale."""

    def __init__(self, folder: Path, source: StateReader | None = None) -> None:
        super().__init__(folder, source)
        # If all states have digests, a reader compares the states, so the files need no SHA-256.
        self.distcp = DcpFiles(folder, hashed=source is not None and not has_all_digests(source))

    def write(self, engine: GPTEngine, run: dict[str, Any], files: RankFiles) -> Any:
        optimizer = engine.optimizer
        files.make_folder(self.folder)
        own = list(optimizer.pieces(with_values=False))
        written = {piece.name for piece in own if piece.owned}
        if not optimizer.is_partitioned:
            written = _share_of_replica([piece for piece in own if piece.owned], engine.mesh)
        archives, chunks = DcpFile(f"__{engine.global_rank}_0.distcp"), Chunks()
        if written:
            contents = (
                Content(partial(save_piece, piece, archives, chunks), [piece])
                for piece in optimizer.pieces(written)
            )
            files.write(self.folder / archives.name, contents)
        rest = {piece.name for piece in own} - written
        files.write(None, map(_memory, optimizer.pieces(rest)))
        return chunks, optimizer.scaler.state_dict()

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        with self.distcp.append() as (archives, file):
            for piece in in_rows(pieces, CHUNK_BYTES):
                save_piece(piece, archives, self.distcp.chunks, file)

    def close(self) -> tuple[Files, Any]:
        return self.distcp.close(), (self.distcp.chunks, self.reader.loss_scaler)

    def abandon(self) -> None:
        self.distcp.abandon()

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        """See `CheckpointWriter`. Compares the chunks' numbers of elements with the shapes of the
        parameters."""
        numel = Counter[str]()
        for key, chunk in _all_chunks(tables):
            numel[key] += prod(chunk.shape)
        digests = run[INTEGRITY_KEY]["digests"]
        expected = {key_of(name, state) for state, by_name in digests.items() for name in by_name}
        expected |= {key_of(name, VALUES) for name in run["parameters"]} | numel.keys()
        return [f"a part of {key}" for key in sorted(expected) if numel[key] != prod(_shape(run, key))]

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `CheckpointWriter`. Writes `.metadata`."""
        files = {**run["files"], **self.write_table(tables, partial(_shape, run))}
        return within_limit({**run, "files": files, "loss_scaler": tables[0][1]})

    def write_table(self, tables: Sequence[Any], shape_of: Callable[[str], tuple[int, ...]]) -> Files:
        """Writes `.metadata`. Returns its size and digest. shape_of: returns the shape of a key's tensor."""
        table = DcpTable()
        for key, chunk in _all_chunks(tables):
            table.add(key, chunk, shape_of(key), path=path_of(key))
        return table.write(self.folder)


def _all_chunks(tables: Sequence[Any]) -> Iterator[tuple[str, Chunk]]:
    return (entry for chunks, _ in tables for entry in chunks)


def _shape(run: dict[str, Any], key: str) -> tuple[int, ...]:
    """Returns the shape of a state of a parameter, or of its step."""
    of_state = key.removeprefix(f"{OPTIMIZER}state.")
    name, _, state_name = of_state.rpartition(".") if of_state != key else (key, "", VALUES)
    return () if state_name == _STEP else recorded_spec(run["parameters"][name]).valid_shape


def _share_of_replica(pieces: Sequence[Piece], mesh: Mesh) -> set[str]:
    """Returns the parameters that this rank writes. Ranks with equal elements divide the parameters."""
    sizes: dict[tuple[str, ...], dict[str, int]] = {}
    for piece in pieces:
        sizes.setdefault(piece.spec.reduced_axes, {})[piece.name] = prod(piece.spec.global_shape)
    written: set[str] = set()
    for names, of_parameters in sizes.items():
        axis = mesh.axis(*names)
        shares = share_out(of_parameters, axis.size)
        written |= {name for name, share in shares.items() if share == axis.rank}
    return written


def _limited(box: Box) -> Iterator[Box]:
    """Divides a box into boxes of at most CHUNK_BYTES, along its first dimension of size above 1. A rank that
    loads a part of the box reads less, and a copy from a device needs less memory."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), 0)
    inner = prod(box.sizes[dim + 1 :])
    step = max(CHUNK_BYTES // 4 // inner, 1)
    for first in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += first
        sizes[dim] = min(step, box.sizes[dim] - first)
        yield Box(box.first + first * inner, tuple(offsets), tuple(sizes))


def save_piece(piece: Piece, archives: DcpFile, chunks: Chunks, file: Any) -> None:
    """Writes all states of a piece. Writes the parameter's step along with the parameter's first elements."""
    boxes = [part for box in piece.boxes() for part in _limited(box)]
    for state_name in piece.values:
        for box in boxes:
            values = own_storage(piece.values_in(box, state_name))
            chunks.append((key_of(piece.name, state_name), archives.append(file, values, box.offsets)))
    if piece.step is not None and piece.is_first and VALUES in piece.values:
        step = torch.tensor(piece.step, dtype=torch.float32)
        chunks.append((key_of(piece.name, _STEP), archives.append(file, step)))


def _memory(piece: Piece) -> Content:
    """Returns the states of a piece in host memory as a content, from which digests are computed."""

    def save(file: Any) -> None:
        for values in piece.values.values():
            file.write(values.contiguous().numpy().data)

    return Content(save, [piece])


class DcpFile:
    """A `.distcp` file: archives of torch.save, one after the other.

    It is the file-like object that torch.save writes to. It collects the small writes (torch.save writes an
    archive in forty pieces), and passes the memory of a tensor on without a copy.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self._small = bytearray()
        self._file: Any = None
        self._address = 0

    def append(self, file: Any, value: Any, offsets: Sequence[int] = ()) -> Chunk:
        """Writes an archive at the end of a file-like object. Returns its place as a chunk. offsets: index in
        the tensor where the chunk begins."""
        self._file, self._address = file, value.data_ptr() if isinstance(value, Tensor) else 0
        self.write(bytes(-self.num_bytes % ALIGNMENT))
        start = self.num_bytes
        save_archive(value, self)
        self.flush()
        shape = tuple(getattr(value, "shape", ()))
        return Chunk(tuple(offsets), shape, self.name, start, self.num_bytes - start)

    def write(self, data: Any) -> int:
        """Appends the bytes of a buffer."""
        content = memoryview(data).cast("B")
        self.num_bytes += len(content)
        is_tensor = len(content) > 0 and np.frombuffer(content, np.uint8).ctypes.data == self._address
        if is_tensor or len(content) > _SMALL_BYTES:
            self.flush()
            self._file.write(content)
        else:
            self._small += content
        return len(content)

    def flush(self) -> None:
        """Writes the collected bytes to the file."""
        if self._small:
            self._file.write(bytes(self._small))
            self._small.clear()


class DcpFiles:
    """The `.distcp` files that the threads of a conversion write. hashed: whether to compute the SHA-256 of
    each file. chunks: all chunks that were written."""

    def __init__(self, folder: Path, hashed: bool = True) -> None:
        self.chunks: Chunks = []
        self._folder, self._hashed = folder, hashed
        self._files: Files = {}
        self._free: SimpleQueue[tuple[DcpFile, HashedFile]] = SimpleQueue()
        self._created: list[HashedFile] = []
        self._lock = Lock()

    @contextmanager
    def append(self) -> Iterator[tuple[DcpFile, HashedFile]]:
        """Lends a file to the calling thread for the block, to append archives."""
        try:
            archives, file = self._free.get_nowait()
        except Empty:
            with self._lock:
                archives = DcpFile(f"__0_{len(self._created)}.distcp")
                file = HashedFile(self._folder / archives.name, self._hashed)
                self._created.append(file)
        yield archives, file
        if archives.num_bytes < _FILE_BYTES:
            self._free.put((archives, file))
        else:
            self._files[archives.name] = file.close()

    def close(self) -> Files:
        """Closes the files. Returns their sizes and digests."""
        while not self._free.empty():
            archives, file = self._free.get_nowait()
            self._files[archives.name] = file.close()
        return self._files

    def abandon(self) -> None:
        """Closes the files after an error."""
        for file in self._created:
            file.abandon()


class DcpTable:
    """The content of `.metadata`: tensors, their chunks, and objects."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def add(
        self,
        key: str,
        chunk: Chunk,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        path: tuple[str, ...] | None = None,
    ) -> None:
        """Adds a chunk of a tensor. shape: the shape of the whole tensor. path: the keys of the nested dict
        that torch makes of the checkpoint; None: only `key`."""
        if key not in self._tensors:
            self._tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            self._paths[key] = path or (key,)
        chunks = self._tensors[key].chunks
        self._places[MetadataIndex(key, chunk.offsets, len(chunks))] = _storage_info(chunk)
        chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)))

    def add_name(self, key: str, other: str) -> None:
        """Adds a tensor under `key` that shares the chunks of `other`. All chunks of `other` must be
        known."""
        self._tensors[key], self._paths[key] = self._tensors[other], (key,)
        for number, chunk in enumerate(self._tensors[other].chunks):
            place = self._places[MetadataIndex(other, chunk.offsets, number)]
            self._places[MetadataIndex(key, chunk.offsets, number)] = place

    def add_object(self, key: str, chunk: Chunk) -> None:
        """Adds an object that is not a tensor."""
        self._tensors[key], self._paths[key] = BytesStorageMetadata(), (key,)
        self._places[MetadataIndex(key)] = _storage_info(chunk)

    def write(self, folder: Path) -> Files:
        """Writes `.metadata`. Returns its size and digest."""
        metadata = Metadata(
            state_dict_metadata=dict(sorted(self._tensors.items())),
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        file = HashedFile(folder / METADATA_FILE)
        file.write(pickle.dumps(metadata))
        return {METADATA_FILE: file.close()}


def _storage_info(chunk: Chunk) -> _StorageInfo:
    return _StorageInfo(chunk.file, chunk.start, chunk.length)
