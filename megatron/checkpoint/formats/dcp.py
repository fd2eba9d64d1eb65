"""Checkpoints of torch.distributed.checkpoint (DCP), which PyTorch opens without this program.

    .metadata               torch's table of tensors and chunks
    __<rank>_<N>.distcp     the chunks: archives of torch.save, one after the other
    run.json                the same content as in a native checkpoint

    <parameter>                             fp32 values, without the padding of the vocabulary
    optimizer.state.<parameter>.<moment>    a moment of Adam or momentum SGD, fp32
    optimizer.state.<parameter>.step        the optimizer's step

torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict` makes such names, and torchtitan saves
them. `parameter` is a global name of this program.

`.metadata` is a pickle: the shape of each tensor, the chunks into which it is divided, and where each chunk
is. Its unpickler knows only the names of torch's metadata classes, and makes plain records of them, so no
code from the folder runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import read_with_retries
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import ReplicaMismatch, StateReader, check_shape, filled
from megatron.checkpoint.formats.torch_archive import Stub, read_file
from megatron.checkpoint.names import METADATA_FILE, check_plain, is_plain, shown
from megatron.checkpoint.record import Checkpoint
from megatron.errors import UserError
from megatron.files import HostileFileError, expect_layout, open_regular
from megatron.mapped_file import release_pages
from megatron.mpu.parameter_spec import Box, ParameterSpec
from megatron.mpu.parameters import narrowed
from megatron.mpu.pieces import Piece

# Prefix of the names of optimizer states.
OPTIMIZER = "optimizer."
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Number of bytes that `read_blocks` copies at a time.
_BLOCK_BYTES = 1 << 23
# The metadata file of a checkpoint of thousands of ranks has some hundred megabytes.
_MAX_METADATA_BYTES = 1 << 30
# Names of torch's metadata classes, by module. Before torch 2.3 TensorProperties was in a different module.
# Megatron-Core also stores the plan of the save.
_DCP, _PATHS = "torch.distributed.checkpoint", ("Path", "PosixPath", "PurePosixPath")
_CLASSES = {
    f"{_DCP}.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan", "MCoreMetadata"),
    "torch.serialization": ("_get_layout",),
}
_RECORDS = {f"{module}.{name}" for module, names in _CLASSES.items() for name in names}
# Number of chunks that stay mapped. Consecutive blocks of a tensor are in one chunk.
_OPEN_CHUNKS = 32


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor: the index where it begins, its shape, and the place of its archive in the
    files."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int

    @property
    def box(self) -> Box:
        """Returns the part of the tensor that the chunk contains, as a box."""
        return Box(0, self.offsets, self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """The shape, dtype and chunks of a tensor in a DCP folder."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class StoredObject(NamedTuple):
    """The place of the archive with an object that is not a tensor."""

    file: str
    start: int
    length: int


class _MetadataUnpickler(pickle.Unpickler):
    """Creates a `Stub` for every record in the pickle, and calls nothing else."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path
        # Each file has its own classes, because a pickle can set attributes of the classes that it names.
        self._classes: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name == "torch.Size":
            return tuple
        if full_name == "collections.OrderedDict":
            return dict
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if full_name == "builtins.getattr":  # Python 3.11.0 to 3.11.3 pickle enumerations so
            return lambda cls, member: cls(member)
        if full_name in _RECORDS:
            return self._classes.setdefault(full_name, type(name, (Stub,), {"__slots__": ()}))
        raise HostileFileError(
            f"checkpoint file {self._path} cannot be read: it names "
            f"{full_name if is_plain(full_name) else shown(full_name)}, which no metadata of "
            "torch.distributed.checkpoint uses. None of its code was run; it may be malicious: check where "
            "it comes from"
        )


def read_metadata(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredObject]]:
    """Returns the tensors of a DCP folder by name, and the objects that are not tensors by name.

    Raises UserError if `.metadata` is damaged, HostileFileError if it names code or a file outside the
    folder, and OSError if it cannot be read now.
    """
    path = folder / METADATA_FILE

    def load() -> Any:
        with open_regular(path) as file:
            if (size := file.seek(0, 2)) > _MAX_METADATA_BYTES:
                raise HostileFileError(f"{path} has {size:,} bytes, expected {_MAX_METADATA_BYTES:,} at most")
            file.seek(0)
            with expect_layout(path, "the metadata of torch.distributed.checkpoint"):
                try:
                    return _MetadataUnpickler(file, path).load()
                except (pickle.UnpicklingError, EOFError, ImportError, MemoryError, RecursionError) as error:
                    raise ValueError(str(error)) from error

    metadata = read_with_retries(path, load)
    with expect_layout(path, "the metadata of torch.distributed.checkpoint"):
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in metadata.storage_data.items():
            places[index.fqn, tuple(getattr(index, "offset", None) or ())] = info
        tensors = {
            str(name): _stored_tensor(str(name), entry, places, path)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
        objects = {
            str(name): StoredObject(*_place_of(info, path))
            for (name, _), info in places.items()
            if name not in tensors
        }
        return tensors, objects


def _stored_tensor(name: str, entry: Any, places: Mapping[Any, Any], path: Path) -> StoredTensor:
    """Returns the record of a tensor. Raises ValueError if the chunks do not fill the tensor exactly once."""
    shape = _sizes(entry.size)
    properties = entry.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{shown(name)} has no dtype")
    chunks = []
    for record in entry.chunks:
        offsets, sizes = _sizes(record.offsets), _sizes(record.sizes)
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        info = places.get((name, offsets))
        if not inside or info is None:
            raise ValueError(f"a chunk of {shown(name)} is outside of the tensor, or in no file")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{shown(name)} is stored compressed, which this program does not read")
        chunks.append(Chunk(offsets, sizes, *_place_of(info, path)))
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        raise ValueError(f"the chunks of {shown(name)} do not make the whole tensor")
    return StoredTensor(name, shape, dtype, tuple(chunks))


def _place_of(info: Any, path: Path) -> tuple[str, int, int]:
    """Returns (file, offset, length in bytes) of an archive."""
    start, length = _sizes((info.offset, info.length))
    return check_plain(info.relative_path, path), start, length


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise TypeError("a size is not a number")
    return tuple(values)


class DcpFolder:
    """The tensors of a DCP folder. Chunks are memory-mapped, so only the elements that are used are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = lru_cache(_OPEN_CHUNKS)(self._map_chunk)

    @cached_property
    def _table(self) -> tuple[dict[str, StoredTensor], dict[str, StoredObject]]:
        return read_metadata(self.folder)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name. Raises the errors of `read_metadata`."""
        return self._table[0]

    @property
    def objects(self) -> dict[str, StoredObject]:
        """All objects that are not tensors, by name."""
        return self._table[1]

    def read_object(self, name: str) -> Any:
        """Returns an object as `read_file` does. Raises UserError if the folder has no object of this
        name."""
        if name not in self.objects:
            raise UserError(f"checkpoint {self.folder} holds no object {name}: it is incomplete")
        file, start, length = self.objects[name]
        return read_file(self.folder / file, (start, length))

    def tensor(self, name: str) -> StoredTensor:
        """Returns the record of a tensor. Raises UserError if the folder has no tensor of this name."""
        if name not in self.tensors:
            raise UserError(f"checkpoint {self.folder} holds no tensor {name}: is it of another model?")
        return self.tensors[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a tensor, or a box of it, in the stored dtype. If a whole tensor is one chunk, the result
        shares memory with the file."""
        stored = self.tensor(name)
        if box is None and len(stored.chunks) == 1:
            whole = self._open(stored, stored.chunks[0])
            return whole if whole.data_ptr() % whole.element_size() == 0 else whole.clone()
        box = box or Box(0, (0,) * len(stored.shape), stored.shape)
        result = torch.empty(box.sizes, dtype=stored.dtype)
        for chunk in stored.chunks:
            if (common := box.intersection(chunk.box)) is None:
                continue
            source = narrowed(self._open(stored, chunk), common, chunk.offsets)
            narrowed(result, common, box.offsets).copy_(source)
            if source.is_contiguous():
                release_pages(source.data_ptr(), source.nbytes)
        return result

    def _map_chunk(self, stored: StoredTensor, chunk: Chunk) -> Tensor:
        path = self.folder / chunk.file
        tensor = read_file(path, (chunk.start, chunk.length))
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape:
            raise UserError(
                f"checkpoint file {path} holds another tensor than {METADATA_FILE} says, at byte "
                f"{chunk.start:,} for {stored.name}: it is damaged"
            )
        if tensor.dtype != stored.dtype:
            raise UserError(
                f"checkpoint file {path} holds {stored.name} in {tensor.dtype}, and {METADATA_FILE} says "
                f"{stored.dtype}: it is damaged"
            )
        return tensor


# --- checkpoints of this program ---


def key_of(name: str, state_name: str) -> str:
    """Returns the key of a parameter's state or 'step' in the flat table of tensors, which torch turns into a
    nested dict (`path_of`)."""
    return name if state_name == VALUES else f"{OPTIMIZER}state.{name}.{state_name}"


def path_of(key: str) -> tuple[str, ...]:
    """Returns where a key is in torch's nested dict: the keys of each level."""
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
            return {}  # momentum SGD does not count steps
        with expect_layout(self.folder, "the optimizer's step"):
            return {"step": self.stored.read(key).float().reshape(()).clone()}

    def shape_of(self, name: str, state_name: str) -> tuple[int, ...]:
        """Returns the shape of a state as it is stored: it may include the padding of the vocabulary."""
        return self.stored.tensor(key_of(name, state_name)).shape

    def read_box(self, name: str, state_name: str, box: Box | None) -> Tensor:
        """Returns a box of a state (None: the whole state) in the stored dtype."""
        return self.stored.read(key_of(name, state_name), box)

    def _checked_shape(self, name: str, state_name: str, spec: ParameterSpec | None) -> tuple[int, ...]:
        shape = self.shape_of(name, state_name)
        if spec is not None:
            check_shape(shape, spec, f"checkpoint {self.folder} stores for {state_name} of {name}")
        return shape

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        self._checked_shape(name, state_name, spec)
        return self.read_box(name, state_name, None).float()

    def read_piece(self, piece: Piece, state_name: str, out: Tensor | None = None) -> Tensor:
        """See `StateReader`. Reads only the chunks that contain elements of the piece."""
        self._checked_shape(piece.name, state_name, piece.spec)
        return filled(piece, partial(self.read_box, piece.name, state_name), out)

    def files_of_pieces(self, pieces: Iterable[Piece]) -> set[str]:
        files = {METADATA_FILE}
        for piece in pieces:
            boxes = list(piece.boxes())
            for state_name in self.state_names(piece.name):
                tensor = self.stored.tensor(key_of(piece.name, state_name))
                files |= {
                    chunk.file
                    for chunk in tensor.chunks
                    if any(box.intersection(chunk.box) is not None for box in boxes)
                }
            if (step := self.stored.tensors.get(key_of(piece.name, "step"))) is not None:
                files |= {chunk.file for chunk in step.chunks}
        return files

    def compared_files(self, weights_only: bool = False) -> list[str]:
        """See `StateReader`. Returns all files with a SHA-256: each may hold weights and moments."""
        files = {} if weights_only else self.checkpoint.run.get("files", {})
        return sorted(name for name in files if "sha256" in files[name])

    def read_blocks(self, name: str, state_name: str, mismatch: ReplicaMismatch) -> Iterator[Tensor]:
        spec = self.specs.get(name)
        shape = self._checked_shape(name, state_name, spec)
        rows = spec.valid_shape[0] if spec is not None else shape[0]
        step = max(_BLOCK_BYTES // 4 // prod(shape[1:]), 1)
        for start in range(0, rows, step):
            sizes = (min(step, rows - start), *shape[1:])
            box = Box(0, (start, *(0 for _ in shape[1:])), sizes)
            yield self.read_box(name, state_name, box).float()
