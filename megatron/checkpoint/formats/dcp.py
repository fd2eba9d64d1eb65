"""Checkpoints of torch.distributed.checkpoint (DCP), which PyTorch opens without this program.

    .metadata               torch's table of tensors and chunks
    __<rank>_<N>.distcp     the chunks: archives of torch.save, one after the other
    run.json                as in a native checkpoint

    <parameter>                             fp32 values, without the padding of the vocabulary
    optimizer.state.<parameter>.<moment>    a moment of Adam or momentum SGD, fp32
    optimizer.state.<parameter>.step        the optimizer's step

torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict` makes such names, and torchtitan saves
them. `parameter` is a global name of this program.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

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

from megatron.checkpoint.files import Files, HashedFile, file_problems
from megatron.checkpoint.formats.dcp_storage import METADATA_FILE, DcpFolder, Region, overlap
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.staged_archive import save_archive
from megatron.checkpoint.formats.state import (
    ReplicaMismatch,
    ShardPart,
    StateBlocks,
    StateReader,
    check_shape,
)
from megatron.checkpoint.formats.writing import ParameterWriter, has_all_digests, rows_of
from megatron.checkpoint.record import Checkpoint
from megatron.files import expect_layout
from megatron.mpu.parameter_spec import Box, ParameterSpec, boxes

# Prefix of what the optimizer holds.
OPTIMIZER = "optimizer."
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# A chunk is in memory while it is written; a rank that loads reads only chunks that overlap with its shard.
CHUNK_BYTES = 1 << 26
# Bytes that `read_blocks` copies at a time.
_BLOCK_BYTES = 1 << 23
# A new file is begun after this many bytes.
_FILE_BYTES = 1 << 34
# torch aligns storages in an archive to this many bytes; archives are aligned, too.
_ALIGNMENT = 64


def key_of(name: str, state_name: str) -> str:
    """Returns the key of a parameter's state, or of its 'step'. torch makes a nested dict of the keys."""
    return name if state_name == VALUES else f"{OPTIMIZER}state.{name}.{state_name}"


def path_of(key: str) -> tuple[str, ...]:
    """Returns the keys of the nested dict that torch makes for a key."""
    return ("optimizer", key.removeprefix(OPTIMIZER)) if key.startswith(OPTIMIZER) else (key,)


class DcpReader(StateReader):
    """Reads a DCP checkpoint of this program on any layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.stored = DcpFolder(self.folder)

    @property
    def stored_names(self) -> Collection[str]:
        return {name for name in self.stored.tensors if not name.startswith(OPTIMIZER)}

    def state_names(self, name: str) -> list[str]:
        return [VALUES, *(moment for moment in MOMENTS if key_of(name, moment) in self.stored.tensors)]

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        return self.checkpoint.run.get("loss_scaler")

    def optimizer_scalars(self, name: str) -> dict[str, Any]:
        if (key := key_of(name, "step")) not in self.stored.tensors:
            return {}  # momentum SGD counts no steps
        with expect_layout(self.folder, "the optimizer's step"):
            return {"step": self.stored.read(key).float().reshape(()).clone()}

    def shape_of(self, name: str, state_name: str) -> tuple[int, ...]:
        """Returns the shape of a state as it is stored, with or without padding of the vocabulary."""
        return self.stored.tensor(key_of(name, state_name)).shape

    def region_of(self, name: str, state_name: str, region: Region | None) -> Tensor:
        """Returns a region of a state, or all of it, in the stored dtype."""
        return self.stored.read(key_of(name, state_name), region)

    def _checked_shape(self, name: str, state_name: str, spec: ParameterSpec | None) -> tuple[int, ...]:
        shape = self.shape_of(name, state_name)
        if spec is not None:
            check_shape(shape, spec, f"checkpoint {self.folder} stores for {state_name} of {name}")
        return shape

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        self._checked_shape(name, state_name, spec)
        return self.region_of(name, state_name, None).float()

    def read_part(self, name: str, state_name: str, part: ShardPart, out: Tensor | None = None) -> Tensor:
        """See `StateReader`. Reads only the chunks that hold one of these elements."""
        self._checked_shape(name, state_name, part.spec)
        target = torch.zeros(part.stop - part.start) if out is None else out.zero_()  # padded rows are zeros
        for box in boxes(*part):
            place = target[box.first - part.start : box.first - part.start + box.numel]
            place.view(box.sizes).copy_(self.region_of(name, state_name, _region(box)))
        return target

    def files_of_parts(self, parts: Iterable[tuple[str, ShardPart]]) -> set[str]:
        files = {METADATA_FILE}
        for name, part in parts:
            regions = [_region(box) for box in boxes(*part)]
            for state_name in self.state_names(name):
                tensor = self.stored.tensor(key_of(name, state_name))
                files |= {
                    chunk.file
                    for chunk in tensor.chunks
                    if any(overlap(region, chunk) is not None for region in regions)
                }
            if (step := self.stored.tensors.get(key_of(name, "step"))) is not None:
                files |= {chunk.file for chunk in step.chunks}
        return files

    def files_to_verify(self) -> list[str]:
        """See `StateReader`. Returns all files with a SHA-256: so a damaged one is named."""
        files = self.checkpoint.run.get("files", {})
        return sorted(name for name in files if "sha256" in files[name])

    def verify(self, weights_only: bool = False) -> tuple[int, list[str]]:
        """Compares all files with their SHA-256; all states if a file has none, or the weights."""
        if weights_only:
            return super().verify(weights_only)
        files = {name: self.checkpoint.run["files"][name] for name in self.files_to_verify()}
        problems = [problem for problem in file_problems(self.folder, files) if problem]
        if files and len(files) == len(self.checkpoint.run["files"]):
            return len(files), problems
        count, others = super().verify()
        return len(files) + count, problems + others

    def read_blocks(self, name: str, state_name: str, mismatch: ReplicaMismatch) -> Iterator[Tensor]:
        spec = self.specs.get(name)
        shape = self._checked_shape(name, state_name, spec)
        rows = spec.valid_shape[0] if spec is not None else shape[0]
        step = max(_BLOCK_BYTES // 4 // prod(shape[1:]), 1)
        for start in range(0, rows, step):
            region = [(start, min(start + step, rows)), *((0, size) for size in shape[1:])]
            yield self.region_of(name, state_name, region).float()


def _region(box: Box) -> Region:
    """Returns the region of a box of a parameter."""
    return [(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True)]


class DcpFiles:
    """The `.distcp` files of a folder that several threads write, and the table of their tensors. hashed:
    compute the SHA-256 of the files."""

    def __init__(self, folder: Path, hashed: bool = True) -> None:
        self.folder = folder
        self._hashed = hashed
        self.files: Files = {}
        self._free: SimpleQueue[tuple[str, HashedFile]] = SimpleQueue()
        self._num_files = 0
        self._lock = Lock()
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def declare(
        self,
        name: str,
        shape: Sequence[int],
        path: tuple[str, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Adds a tensor, once. path: the keys of the nested dict that torch makes of the checkpoint; None:
        the name alone."""
        with self._lock:
            if name not in self._tensors:
                properties = TensorProperties(dtype=dtype)
                self._tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), [])
                self._paths[name] = path or (name,)

    def write(self, name: str, chunks: Iterator[tuple[Sequence[int], Tensor]]) -> None:
        """Writes (offsets, values) of each chunk of a declared tensor into one file."""
        file_name, file = self._take_file()
        for offsets, values in chunks:
            is_view = values.untyped_storage().nbytes() > values.nbytes
            info = append_archive(file_name, file, values.clone() if is_view else values)
            self.add_chunk(name, offsets, values.shape, info)
        if file.tell() < _FILE_BYTES:
            self._free.put((file_name, file))
        else:
            self.files[file_name] = file.close()

    def add_chunk(self, name: str, offsets: Sequence[int], sizes: Sequence[int], place: _StorageInfo) -> None:
        """Adds a chunk of a declared tensor that is written. place: of its archive."""
        with self._lock:
            found = self._tensors[name].chunks
            self._places[MetadataIndex(name, offsets, len(found))] = place
            found.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))

    def add_name(self, name: str, other: str) -> None:
        """Adds a tensor that shares the chunks of `other`, which is written completely."""
        with self._lock:
            self._tensors[name], self._paths[name] = self._tensors[other], (name,)
            for number, chunk in enumerate(self._tensors[other].chunks):
                place = self._places[MetadataIndex(other, chunk.offsets, number)]
                self._places[MetadataIndex(name, chunk.offsets, number)] = place

    def write_object(self, name: str, value: Any) -> None:
        """Writes an object other than a tensor."""
        file_name, file = self._take_file()
        info = append_archive(file_name, file, value)
        with self._lock:
            self._tensors[name] = BytesStorageMetadata()
            self._paths[name] = (name,)
            self._places[MetadataIndex(name)] = info
        self._free.put((file_name, file))

    def _take_file(self) -> tuple[str, HashedFile]:
        try:
            return self._free.get_nowait()
        except Empty:
            with self._lock:
                number = self._num_files
                self._num_files += 1
            name = f"__0_{number}.distcp"
            return name, HashedFile(self.folder / name, self._hashed)

    def finish(self) -> Files:
        """Closes the files and writes `.metadata`. Returns the facts of all files."""
        while not self._free.empty():
            name, file = self._free.get_nowait()
            self.files[name] = file.close()
        metadata = Metadata(
            state_dict_metadata=dict(sorted(self._tensors.items())),
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        table = HashedFile(self.folder / METADATA_FILE)
        table.write(pickle.dumps(metadata))
        self.files[METADATA_FILE] = table.close()
        return self.files


def append_archive(file_name: str, file: Any, value: Any) -> _StorageInfo:
    """Writes an archive of torch.save at the end of a file-like object. Returns its place."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    start = file.tell()
    save_archive(value, file)
    return _StorageInfo(file_name, start, file.tell() - start)


class DcpWriter(ParameterWriter):
    """Writes a DCP checkpoint with the names of this program."""

    def __init__(self, folder: Path, reader: StateReader) -> None:
        super().__init__(folder, reader)
        # With digests of all states, a reader compares the states.
        self.distcp = DcpFiles(folder, hashed=not has_all_digests(reader))

    def write_parameter(self, name: str, states: StateBlocks, step: float | None) -> None:
        for state_name, blocks in states.items():
            self.write_state(name, state_name, self.reader.specs[name].valid_shape, blocks)
        if step is not None:
            self.write_state(name, "step", (), [torch.tensor(step, dtype=torch.float32)])

    def write_state(self, name: str, state_name: str, shape: Sequence[int], blocks: Iterable[Tensor]) -> None:
        """Writes one state of a parameter, or the optimizer's step, whose shape is ()."""
        key = key_of(name, state_name)
        self.distcp.declare(key, shape, path_of(key))
        if not shape:
            self.distcp.write(key, (((), block) for block in blocks))
            return
        zeros = (0,) * (len(shape) - 1)
        self.distcp.write(key, (((row, *zeros), rows) for row, rows in rows_of(blocks, shape, CHUNK_BYTES)))

    def finish(self) -> None:
        self.write_run_file(self.distcp.finish(), loss_scaler=self.reader.loss_scaler)
