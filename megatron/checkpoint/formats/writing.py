"""The write side of the checkpoint formats: `registry.FORMATS` lists a `CheckpointWriter` beside each
`StateReader`.

Runs and conversions feed the same writers with pieces (`megatron.mpu.pieces`). In a run every rank passes its
own pieces to `write`, and rank 0 calls `missing` and `finish` with what all ranks have written. In a
conversion the reader of a checkpoint passes the pieces of full parameters to `write_parameter`. Several
threads copy parameters in blocks, so the memory does not grow with the model. While blocks are copied, their
digests are compared with the integrity record.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.checkpoint.files import Files, add_checksum
from megatron.checkpoint.formats.state import ReplicaMismatch, StateReader
from megatron.checkpoint.record import RUN_FILE
from megatron.errors import UserError
from megatron.files import write_json
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine

# Entries of `run.json` that describe the files of one format only.
_OF_A_FORMAT = ("files", "index", "loss_scaler")


@dataclass(frozen=True)
class Content:
    """A part of a file, or the whole file.

    save: writes the content to a file-like object. pieces: the pieces of parameters that `save` writes.
    """

    save: Callable[[Any], Any]
    pieces: Sequence[Piece] = ()


class RankFiles(ABC):
    """Writes the files of one rank of a run."""

    @abstractmethod
    def make_folder(self, folder: Path) -> None:
        """Creates the folder of the save, unless another rank has already created it."""

    @abstractmethod
    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """Writes a file. file: its path; None for contents that another rank writes. Then only digests are
        computed, to compare the replicas."""


class CheckpointWriter(ABC):
    """Writes a checkpoint in one format.

    A format of --save-format defines `write`. A format that conversions write defines `write_parameter`,
    which several threads call, and `close`. A table is what a rank of a run, or a conversion, reports about
    the content of its files; its type depends on the format.
    """

    def __init__(self, folder: Path, source: StateReader | None = None) -> None:
        """folder: the checkpoint's folder under its temporary name. source: the reader of the checkpoint to
        convert; None in a run."""
        self.folder, self._source = folder, source

    # --- a run ---

    @classmethod
    def check_sharding(cls, specs: Mapping[str, ParameterSpec]) -> None:
        """Raises UserError for a parameter whose sharding the files cannot store. Called before training."""
        return

    def write(self, engine: GPTEngine, run: dict[str, Any], files: RankFiles) -> Any:
        """Writes this rank's files. Returns this rank's table. Collective.

        run: the content of `run.json` so far, see `run_record`.
        """
        raise NotImplementedError(f"runs do not save with {type(self).__name__}")

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        """Returns what no rank has written. run: includes the integrity record. files: the files of all
        ranks. tables: the tables of all ranks, by rank."""
        return []

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """Returns the complete content of `run.json`, except for its checksum. In a run only rank 0 calls it.

        run: includes the files of all ranks. tables: the tables of all ranks, by rank; one table in a
        conversion. Raises OSError for a file that cannot be written.
        """
        return run

    # --- a conversion: see `megatron.checkpoint.conversion.pipeline` ---

    keeps_parameters = False
    """Whether several processes may write into the folder at once, and an interrupted conversion continues.
    Each file and folder is complete and synced when it gets its name."""
    weights_only = False
    """Whether the format stores no moments. Then one thread writes the weights in the order of the model, and
    `pieces` verifies what it reads."""

    @classmethod
    def copied_files(cls, reader: StateReader) -> list[str]:
        """Returns the files with digests that a conversion copies unchanged."""
        return []

    @property
    def reader(self) -> StateReader:
        """The reader of the checkpoint that is converted."""
        assert self._source is not None
        return self._source

    def parameter_bytes(self) -> dict[str, int]:
        """Returns parameter -> bytes to write, without padding, in the order of the model."""
        reader, specs = self.reader, self.reader.specs
        return {name: 4 * prod(specs[name].valid_shape) * len(reader.state_names(name)) for name in specs}

    def unfinished_bytes(self) -> int:
        """Returns the bytes that parameters have which other processes are writing into the folder."""
        return 0

    @classmethod
    def has_parameters(cls, folder: Path) -> bool:
        """Returns whether a failed conversion into the folder can continue: the folder has a parameter."""
        return False

    def has_parameter(self, name: str) -> bool:
        """Returns whether an interrupted conversion has finished a parameter."""
        return False

    def pieces(self, name: str, verify: bool) -> Iterator[Piece]:
        """Yields the pieces that `write_parameter` takes. Raises UserError after the last piece if the
        replicas of the parameter differ. verify: see `StateReader.pieces`."""
        mismatch = ReplicaMismatch()
        yield from self.source_pieces(name, mismatch, verify)
        if mismatch.largest:
            self.check_mismatch(name, mismatch.largest)

    def source_pieces(self, name: str, mismatch: ReplicaMismatch, verify: bool) -> Iterator[Piece]:
        """Yields the pieces of the states that the format stores, see `StateReader.pieces`."""
        return self.reader.pieces(name, mismatch, verify)

    def check_mismatch(self, name: str, largest: float) -> None:
        """Raises UserError for replicas that differ, unless their mean may be written. largest: the largest
        difference between the replicas."""
        raise UserError(
            f"checkpoint {self.reader.folder}: the replicas of {name} on the TP ranks differ by up to "
            f"{largest:.2e}: convert an older checkpoint, or use their mean with "
            "tools/ds_to_universal.py --allow-replica-mismatch"
        )

    @abstractmethod
    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        """Writes a full parameter. Raises UserError for a state that the format cannot store."""

    @abstractmethod
    def close(self) -> tuple[Files, Any]:
        """Writes what does not belong to a single parameter. Returns all files, and this writer's table."""

    def abandon(self) -> None:
        """Closes all files after an error, because NFS cannot delete a folder that contains an open file."""
        return

    def complete(self) -> None:
        """Completes a conversion: writes the source's `run.json` with the files of this format."""
        files, table = self.close()
        run = {key: value for key, value in self.reader.checkpoint.run.items() if key not in _OF_A_FORMAT}
        with self.placed(RUN_FILE) as path:
            write_json(path, add_checksum(self.finish({**run, "files": files}, [table])))

    def placed(self, name: str) -> AbstractContextManager[Path]:
        """Returns a context with the path at which to write a file of the folder."""
        return nullcontext(self.folder / name)

    def result(self, target: Path) -> list[str]:
        """Returns lines about a conversion whose parameters are all written. target: the folder's final
        path."""
        return [f"{target}: {len(self.reader.specs)} parameters"]

    @staticmethod
    def announce(target: Path) -> None:
        """Completes the publication of the folder `target`, for example by writing a `latest` file beside it.
        It may be called more than once."""
        return


def check_space(folder: Path, needed: int, name: str) -> None:
    """Raises UserError, which begins with `name`, if the folder's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{name}: {folder.parent} has {free / 1e9:,.1f} GB free and {needed / 1e9:,.1f} GB are needed: "
            "free space, or pass another folder"
        )


def has_all_digests(reader: StateReader) -> bool:
    """Returns whether the integrity record has a digest of every state of every parameter."""
    return all(
        name in reader.tensor_digests.get(state, {})
        for name in reader.specs
        for state in reader.state_names(name)
    )


def full_state(pieces: Iterable[Piece]) -> Tensor:
    """Returns the full tensor of one state in the dtype of its pieces, which may come in any order. If there
    is only one piece, the result shares its memory."""
    full: Tensor | None = None
    for piece in pieces:
        ((state_name, flat),) = piece.values.items()
        for box in piece.boxes():
            values = piece.values_in(box, state_name)
            if box.sizes == piece.spec.valid_shape:
                full = values
                continue
            if full is None:
                full = torch.empty(piece.spec.valid_shape, dtype=flat.dtype)
            full[box.slices] = values
    assert full is not None
    return full


def by_state(pieces: Iterable[Piece]) -> Iterator[tuple[str, Iterator[Piece]]]:
    """Yields (state name, the pieces of this state) from the result of `StateReader.pieces`."""
    return groupby(pieces, key=lambda piece: next(iter(piece.values)))


def in_rows(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """Yields the elements of `StateReader.pieces` in pieces of whole rows with about `max_bytes` bytes. The
    values of a piece are valid until the next piece."""
    for state_name, of_state in by_state(pieces):
        buffer, held, start = torch.empty(0), 0, 0
        for piece in of_state:
            shape, flat, first = piece.spec.valid_shape, piece.values[state_name], 0
            row = prod(shape[1:])
            limit = min(max(max_bytes // 4 // row, 1) * row, prod(shape))
            while first < flat.numel():
                length = min(limit - held, flat.numel() - first)
                values = flat[first : first + length]
                if length < limit:  # otherwise without a copy
                    buffer = buffer if buffer.numel() else torch.empty(limit)
                    buffer[held : held + length].copy_(values)
                    values = buffer[: held + length]
                held, first = held + length, first + length
                if held == limit or start + held == prod(shape):
                    yield replace(piece, start=start, stop=start + held, values={state_name: values})
                    start, held = start + held, 0
