"""The write side of the checkpoint formats: `registry.FORMATS` lists a `CheckpointWriter` beside each
`StateReader`.

A run and a conversion feed the same writer with pieces (`megatron.mpu.pieces`). In a run every rank gives its
own pieces to `write`, and rank 0 calls `missing` and `finish` with what all ranks have written. In a
conversion the reader of a checkpoint of any format gives the pieces of full parameters to `write_parameter`.
Parameters are copied in blocks by several threads, so the memory does not grow with the model. While the
blocks pass, their digests are compared with the integrity record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.conversion.output_folder import temporary_folder
from megatron.checkpoint.files import Files, add_checksum
from megatron.checkpoint.formats.state import ReplicaMismatch, StateReader
from megatron.checkpoint.record import RUN_FILE
from megatron.errors import UserError
from megatron.files import rename_synced, sync_tree, write_json
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine

# Suffix of a conversion's folder while it is written.
PARTIAL = ".partial"
# Entries of `run.json` that describe the files of one format.
_OF_A_FORMAT = ("files", "index", "loss_scaler")


@dataclass(frozen=True)
class Content:
    """A part of a file, or the whole file.

    save: writes it to a file-like object. pieces: the pieces of parameters in it, whose memory `save` writes.
    """

    save: Callable[[Any], Any]
    pieces: Sequence[Piece] = ()


class RankFiles(ABC):
    """Writes the files of one rank of a run."""

    @abstractmethod
    def make_folder(self, folder: Path) -> None:
        """Creates the folder of the save, unless another rank has created it."""

    @abstractmethod
    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """Writes a file. file: None for contents that another rank writes: only their digests are computed,
        to compare the replicas."""


class CheckpointWriter(ABC):
    """Writes a checkpoint in one format.

    A format in which runs save defines `write`. A format of conversions defines `write_parameter`, which
    several threads call, and `close`. A table is what a rank of a run, or a conversion, says of the content
    of its files.
    """

    def __init__(self, folder: Path, source: StateReader | None = None) -> None:
        """folder: of the checkpoint, under its temporary name. source: what a conversion reads; None in a
        run."""
        self.folder, self._source = folder, source

    # --- a run ---

    def write(self, engine: GPTEngine, run: dict[str, Any], files: RankFiles) -> Any:
        """Writes this rank's files. Returns this rank's table. Collective.

        run: the content of `run.json` so far, see `run_record`.
        """
        raise NotImplementedError(f"runs do not save with {type(self).__name__}")

    def missing(self, run: dict[str, Any], files: Files, tables: Sequence[Any]) -> list[str]:
        """Returns what no rank has written. files: the files of all ranks. run: with the integrity record.
        tables: of all ranks, by rank."""
        return []

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """Returns the complete content of `run.json`, except for its checksum. In a run only rank 0 calls it.

        run: with the files of all ranks. tables: of all ranks, by rank; of a conversion the only one. Raises
        OSError for a file that cannot be written.
        """
        return run

    # --- a conversion ---

    @property
    def reader(self) -> StateReader:
        """The reader of the checkpoint that is converted."""
        assert self._source is not None
        return self._source

    @abstractmethod
    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        """Writes all states of a full parameter. pieces: see `StateReader.pieces`. Raises UserError for a
        state that the format cannot store."""

    def finish_parameter(self, name: str, mismatch: float = 0.0) -> None:
        """Completes a parameter that is written. mismatch: the largest difference between its replicas, whose
        mean was written. Raises UserError if they differ."""
        if mismatch:
            raise UserError(
                f"checkpoint {self.reader.folder}: the replicas of {name} on the TP ranks differ by up to "
                f"{mismatch:.2e}: convert an older checkpoint, or use their mean with "
                "tools/ds_to_universal.py --allow-replica-mismatch"
            )

    @abstractmethod
    def close(self) -> tuple[Files, Any]:
        """Writes what does not belong to a single parameter. Returns all files, and the table."""

    def complete(self) -> None:
        """Completes a conversion: writes `run.json` of the source with the files of this format."""
        files, table = self.close()
        run = {key: value for key, value in self.reader.checkpoint.run.items() if key not in _OF_A_FORMAT}
        write_json(self.folder / RUN_FILE, add_checksum(self.finish({**run, "files": files}, [table])))

    @classmethod
    def write_checkpoint(
        cls, reader: StateReader, target: Path, workers: int = 4, verify: bool = True
    ) -> Iterator[str]:
        """Writes the folder `target`, complete or not at all, and yields the name of each parameter that is
        written. Raises UserError for a source that is damaged or lacks what the format needs.

        workers: number of threads. verify: compare all states with the digests of the source.
        """
        sizes = state_bytes(reader)
        with temporary_folder(target, PARTIAL, sum(sizes.values())) as partial:
            writer = cls(partial, reader)
            if verify:
                verify_files(reader)
            pool = ThreadPoolExecutor(workers)
            try:
                yield from pool.map(lambda name: copy_parameter(writer, name, verify), largest_first(sizes))
            finally:
                pool.shutdown(cancel_futures=True)
            writer.complete()
            sync_tree(partial)
            rename_synced(partial, target)


def verify_files(reader: StateReader) -> None:
    """Compares the files of a checkpoint with their checksums, unless all states have digests, with which
    their blocks are compared. Raises UserError for a damaged file."""
    if not has_all_digests(reader) and (problems := reader.verify()[1]):
        raise UserError(f"checkpoint {reader.folder}: {'; '.join(problems[:3])}: convert an older one")


def has_all_digests(reader: StateReader) -> bool:
    """Returns whether the integrity record has a digest of every state of every parameter."""
    return all(
        name in reader.tensor_digests.get(state, {})
        for name in reader.specs
        for state in reader.state_names(name)
    )


def state_bytes(reader: StateReader) -> dict[str, int]:
    """Returns the bytes of all states of each parameter, without padding."""
    specs = reader.specs
    return {name: 4 * prod(specs[name].valid_shape) * len(reader.state_names(name)) for name in specs}


def largest_first(sizes: Mapping[str, int]) -> list[str]:
    """Returns the names in the order in which several threads take them, so that they end together."""
    return sorted(sizes, key=lambda name: sizes[name], reverse=True)


def copy_parameter(writer: CheckpointWriter, name: str, verify: bool) -> str:
    """Copies all states of a parameter from the writer's reader. Returns its name."""
    mismatch = ReplicaMismatch()
    writer.write_parameter(name, writer.reader.pieces(name, mismatch, verify))
    writer.finish_parameter(name, mismatch.largest)
    return name


def by_state(pieces: Iterable[Piece]) -> Iterator[tuple[str, Iterator[Piece]]]:
    """Yields (state name, its pieces) of `StateReader.pieces`."""
    return groupby(pieces, key=lambda piece: next(iter(piece.values)))


def in_rows(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """Yields the elements of `StateReader.pieces` in pieces of whole rows, about `max_bytes` large. The
    values are valid until the next piece."""
    for state_name, of_state in by_state(pieces):
        buffer, held, start = torch.empty(0), 0, 0
        for piece in of_state:
            shape, flat, first = piece.spec.valid_shape, piece.values[state_name], 0
            row = prod(shape[1:])
            limit = min(max(max_bytes // 4 // row, 1) * row, prod(shape))
            while first < flat.numel():
                length = min(limit - held, flat.numel() - first)
                values = flat[first : first + length]
                if length < limit:  # else without a copy
                    buffer = buffer if buffer.numel() else torch.empty(limit)
                    buffer[held : held + length].copy_(values)
                    values = buffer[: held + length]
                held, first = held + length, first + length
                if held == limit or start + held == prod(shape):
                    yield replace(piece, start=start, stop=start + held, values={state_name: values})
                    start, held = start + held, 0
