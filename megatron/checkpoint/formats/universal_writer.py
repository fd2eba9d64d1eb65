"""Writes universal checkpoints from a checkpoint of any format."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.files import Files, file_sizes
from megatron.checkpoint.formats.archive_writer import write_archive
from megatron.checkpoint.formats.deepspeed_files import model_file
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.torch_archive import is_intact
from megatron.checkpoint.formats.universal import LOSS_SCALE_KEY, OPTIMIZER_STATE_FILE, STATE_FILES, STEP_FILE
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state, derive_info
from megatron.checkpoint.formats.writing import CheckpointWriter, by_state
from megatron.errors import UserError
from megatron.files import rename_synced, sync_tree, write_atomically
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

# In an unfinished checkpoint: the folder of parameters that are being written.
UNFINISHED_FOLDER = "unfinished"


class UniversalWriter(CheckpointWriter):
    """Writes a universal checkpoint, and its name into `latest_universal` beside it. The folder of each
    parameter is complete and synced, or it does not exist.

    zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": global tensor, "cat_dim": ...}
    zero/<parameter name>/step.pt                               the optimizer's step

    The folder must exist. Several processes may write into it at once, even the same parameter.
    """

    def __init__(self, folder: Path, source: StateReader) -> None:
        super().__init__(folder, source)
        self._token = secrets.token_hex(8)

    @classmethod
    def write_checkpoint(
        cls, reader: StateReader, target: Path, workers: int = 4, verify: bool = True
    ) -> Iterator[str]:
        """See `CheckpointWriter`. Writes the name of the checkpoint into `latest_universal`, too."""
        yield from super().write_checkpoint(reader, target, workers, verify)
        write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        """See `CheckpointWriter`. Writes each piece as it arrives."""
        self._remove(self.folder / UNFINISHED_FOLDER / name)  # of a process that has ended
        # Not with parents: once another process has published the folder, nothing may create it again.
        (self.folder / UNFINISHED_FOLDER).mkdir(exist_ok=True)
        unfinished, spec = self._unfinished(name), self.reader.specs[name]
        unfinished.mkdir(parents=True)
        for state_name, of_state in by_state(pieces):
            if state_name not in STATE_FILES:
                raise UserError(
                    f"the optimizer's {state_name} of {name} cannot be stored in a universal checkpoint: "
                    f"expected {', '.join(STATE_FILES)}"
                )
            blocks = (piece.values[state_name].contiguous().numpy() for piece in of_state)
            content = {**_merge_entry(spec), "param": torch.empty(spec.valid_shape, device="meta")}
            write_archive(unfinished / STATE_FILES[state_name], content, blocks)
        if (step := self.reader.step_of(name)) is not None:
            write_archive(unfinished / STEP_FILE, torch.empty((), device="meta"), [np.float32(step)])

    def finish_parameter(self, name: str, mismatch: float = 0.0) -> None:
        """See `CheckpointWriter`. Syncs and renames the folder: it is complete even after a power failure."""
        super().finish_parameter(name, mismatch)
        (self.folder / PARAMETER_FOLDER).mkdir(exist_ok=True)
        sync_tree(self._unfinished(name))
        try:
            rename_synced(self._unfinished(name), self.folder / PARAMETER_FOLDER / name)
        except OSError as error:
            # A process without this one's locks was faster: its files hold equal bytes.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        self._remove(self.folder / UNFINISHED_FOLDER / name)

    def _unfinished(self, name: str) -> Path:
        """Returns a folder that no other process writes to."""
        return self.folder / UNFINISHED_FOLDER / name / self._token

    def _remove(self, folder: Path) -> None:
        """Removes a folder after a rename: another process finds all of it, or nothing."""
        removed = self.folder / UNFINISHED_FOLDER / f"removed-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def has_parameter(self, name: str) -> bool:
        """Returns whether an interrupted conversion has finished the parameter: all of its files exist, have
        the right shape and match their checksums. Otherwise its folder is removed."""
        folder = self.folder / PARAMETER_FOLDER / name
        if not folder.exists():
            return False
        shape, states = self.reader.specs[name].valid_shape, self.reader.state_names(name)
        shapes = {STATE_FILES[state]: shape for state in states if state in STATE_FILES}
        shapes |= {} if self.reader.step_of(name) is None else {STEP_FILE: ()}
        try:
            complete = {path.name for path in folder.iterdir()} == shapes.keys() and all(
                is_intact(folder / file, shape) for file, shape in shapes.items()
            )
        except (OSError, UserError):
            complete = False
        if not complete:
            (self.folder / UNFINISHED_FOLDER).mkdir(exist_ok=True)
            self._remove(folder)
        return complete

    def close(self) -> tuple[Files, Any]:
        """See `CheckpointWriter`. Writes the first rank's mp_rank file, which DeepSpeed's loader reads."""
        (self.folder / UNFINISHED_FOLDER).rmdir()
        checkpoint = self.reader.checkpoint
        write_archive(
            self.folder / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE, {LOSS_SCALE_KEY: self.reader.loss_scaler}
        )
        info = checkpoint.run.get(INFO_KEY) or derive_info(self.reader.specs, checkpoint.vocab_size)
        content = client_state(info, checkpoint.config, checkpoint.run["state"])
        write_archive(self.folder / model_file(0), content)
        sizes = file_sizes(self.folder, "*.pt")
        return {name: {"bytes": size} for name, size in sizes.items()}, None


def _merge_entry(spec: ParameterSpec) -> dict[str, Any]:
    """Returns the entries beside the tensor in DeepSpeed's file of the parameter."""
    entry: dict[str, Any] = {}
    for dim, _, parts in spec.sharding:
        entry |= {"cat_dim": dim} | ({"param_n_sub_params": parts} if parts > 1 else {})
    if spec.num_valid_rows is not None:
        entry["vocab_tensor"] = True
    return entry
