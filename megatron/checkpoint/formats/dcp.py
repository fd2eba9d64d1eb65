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

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import file_problems
from megatron.checkpoint.formats.dcp_storage import METADATA_FILE, DcpFolder
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.state import ReplicaMismatch, StateReader, check_shape
from megatron.checkpoint.record import Checkpoint
from megatron.files import expect_layout
from megatron.mpu.parameter_spec import Box, ParameterSpec
from megatron.mpu.pieces import Piece

# Prefix of what the optimizer holds.
OPTIMIZER = "optimizer."
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Bytes that `read_blocks` copies at a time.
_BLOCK_BYTES = 1 << 23


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

    def read_box(self, name: str, state_name: str, box: Box | None) -> Tensor:
        """Returns a box of a state, or all of it, in the stored dtype."""
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
        """See `StateReader`. Reads only the chunks that hold one of these elements."""
        self._checked_shape(piece.name, state_name, piece.spec)
        target = (
            torch.zeros(piece.stop - piece.start) if out is None else out.zero_()
        )  # padded rows are zeros
        for box in piece.boxes():
            place = target[box.first - piece.start : box.first - piece.start + box.numel]
            place.view(box.sizes).copy_(self.read_box(piece.name, state_name, box))
        return target

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
            sizes = (min(step, rows - start), *shape[1:])
            box = Box(0, (start, *(0 for _ in shape[1:])), sizes)
            yield self.read_box(name, state_name, box).float()
