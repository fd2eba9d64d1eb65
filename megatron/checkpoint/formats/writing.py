"""The write side of the checkpoint formats: `registry.FORMATS` lists a `ParameterWriter` beside each
`StateReader`.

A writer gets the reader of a checkpoint of any format. Parameters are copied in blocks by several threads, so
the memory does not grow with the model. While the blocks pass, their digests are compared with the integrity
record.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.conversion.output_folder import temporary_folder
from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import Files, add_checksum, digest_differs
from megatron.checkpoint.formats.state import ReplicaMismatch, StateBlocks, StateReader
from megatron.checkpoint.record import RUN_FILE
from megatron.errors import UserError
from megatron.files import expect_layout, rename_synced, sync_tree, write_json
from megatron.mpu.parameter_spec import ParameterSpec

# Suffix of a conversion's folder while it is written.
PARTIAL = ".partial"
# Entries of `run.json` that describe the files of one format.
_OF_A_FORMAT = ("files", "index", "loss_scaler")


def save_object(path: Path, value: Any) -> None:
    """Runs torch.save for a small object. A full disk is an OSError, which torch.save(value, path) hides."""
    archive = io.BytesIO()
    torch.save(value, archive)
    path.write_bytes(archive.getbuffer())


class ParameterWriter(ABC):
    """Writes a checkpoint parameter by parameter, in several threads. A format defines `write_parameter`,
    which several threads call, and `finish`."""

    def __init__(self, folder: Path, reader: StateReader) -> None:
        self.folder, self.reader = folder, reader

    @abstractmethod
    def write_parameter(self, name: str, states: StateBlocks, step: float | None) -> None:
        """Writes all states of a global parameter. step: the optimizer's. Raises UserError for a state that
        the format cannot store."""

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
    def finish(self) -> None:
        """Writes what does not belong to a single parameter, `run.json` last."""

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
            writer.finish()
            sync_tree(partial)
            rename_synced(partial, target)

    def write_run_file(self, files: Files, **more: Any) -> None:
        """Writes `run.json` of the source with these files. more: further entries."""
        run = {key: value for key, value in self.reader.checkpoint.run.items() if key not in _OF_A_FORMAT}
        write_json(self.folder / RUN_FILE, add_checksum({**run, "files": files, **more}))


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


def step_of_optimizer(reader: StateReader, name: str) -> float | None:
    """Returns the optimizer's step of a parameter; None if it has none."""
    step = reader.optimizer_scalars(name).get("step")
    with expect_layout(reader.folder, "the optimizer's step"):
        return None if step is None else float(step)


def state_bytes(reader: StateReader) -> dict[str, int]:
    """Returns the bytes of all states of each parameter, without padding."""
    specs = reader.specs
    return {name: 4 * prod(specs[name].valid_shape) * len(reader.state_names(name)) for name in specs}


def largest_first(sizes: Mapping[str, int]) -> list[str]:
    """Returns the names in the order in which several threads take them, so that they end together."""
    return sorted(sizes, key=lambda name: sizes[name], reverse=True)


def copy_parameter(writer: ParameterWriter, name: str, verify: bool) -> str:
    """Copies all states of a parameter from the writer's reader. Returns its name."""
    reader, mismatch = writer.reader, ReplicaMismatch()
    states = state_blocks(reader, name, mismatch, verify)
    writer.write_parameter(name, states, step_of_optimizer(reader, name))
    writer.finish_parameter(name, mismatch.largest)
    return name


def state_blocks(reader: StateReader, name: str, mismatch: ReplicaMismatch, verify: bool) -> StateBlocks:
    """Returns the blocks of all states of a parameter. verify: compare them with the reader's digests, if it
    has any; the iteration raises UserError after the last block of a state that differs."""
    digests = reader.tensor_digests if verify else {}
    return {
        state: _verified(reader, name, state, mismatch, digests.get(state, {}).get(name))
        for state in reader.state_names(name)
    }


def _verified(
    reader: StateReader, name: str, state: str, mismatch: ReplicaMismatch, digest: str | None
) -> Iterator[Tensor]:
    """Yields the blocks of a state. Raises UserError after the last one if their digest differs."""
    spec, start, total = reader.specs[name], 0, 0
    plain = ParameterSpec(spec.valid_shape)
    for block in reader.read_blocks(name, state, mismatch):
        if digest is not None:
            total += fragment_digests(plain, (), start, {"": block.reshape(-1)})[""]
            start += block.numel()
        yield block
    if digest is not None and not mismatch.largest and f"{total % (1 << 64):016x}" != digest:
        problem = digest_differs(f"{state} of {name}")
        raise UserError(f"checkpoint {reader.folder}: {problem}; convert an older checkpoint")


def rows_of(blocks: Iterable[Tensor], shape: Sequence[int], max_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first row, rows [rows, *shape[1:]]) of a tensor, about `max_bytes` at a time. The
    rows are valid until the next ones. blocks: consecutive elements of the tensor, of any length, fp32."""
    row_shape = shape[1:]
    row_elements = prod(row_shape)
    limit = min(max(max_bytes // 4 // row_elements, 1) * row_elements, prod(shape))
    buffer, held, row = torch.empty(0), 0, 0
    for block in blocks:
        flat, first = block.reshape(-1), 0
        while first < flat.numel():
            length = min(limit - held, flat.numel() - first)
            if length == limit:  # without a copy
                yield row, flat[first : first + limit].view(-1, *row_shape)
                row += limit // row_elements
            else:
                buffer = torch.empty(limit) if not buffer.numel() else buffer
                buffer[held : held + length].copy_(flat[first : first + length])
                held += length
            if held == limit:
                yield row, buffer.view(-1, *row_shape)
                held, row = 0, row + limit // row_elements
            first += length
    if held:
        yield row, buffer[:held].view(-1, *row_shape)
