"""Writes universal checkpoints, in DeepSpeed's layout (`formats.universal`), from a checkpoint of any format.

    global_step5_universal/
        zero/                           one folder per parameter
        zero/optimizer_state.pt         optimizer state that is not per parameter
        mp_rank_XX_model_states.pt      a native source's files, otherwise what DeepSpeed's loader reads
        run.json                        the source's, if it has one
    latest_universal                    the name of the folder

The vocabulary is stored without padding. This format serves the exchange with other Megatron programs;
`--load` opens native checkpoints on any layout without a conversion.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.files import Files, file_sizes
from megatron.checkpoint.formats.archive_writer import write_archive
from megatron.checkpoint.formats.deepspeed_files import model_file, model_files
from megatron.checkpoint.formats.native import NativeReader
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateReader
from megatron.checkpoint.formats.torch_archive import Stub, is_intact, read_file
from megatron.checkpoint.formats.universal import LOSS_SCALE_KEY, OPTIMIZER_STATE_FILE, STATE_FILES, STEP_FILE
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state, derive_info
from megatron.checkpoint.formats.writing import CheckpointWriter, by_state
from megatron.checkpoint.names import CANARY_KEY, INTEGRITY_KEY
from megatron.errors import UserError
from megatron.files import (
    open_regular,
    read_small,
    rename_synced,
    sync_file,
    sync_tree,
    write_atomically,
)
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

# Folder in an unfinished checkpoint for the parameters that are being written.
UNFINISHED_FOLDER = "unfinished"


# Folder with a file for each parameter whose replicas differed and were averaged: the largest difference.
AVERAGED_FOLDER = "averaged"
# Folder with an empty file for each parameter that an earlier, interrupted conversion wrote.
KEPT_FOLDER = "kept"
# Entries that optimizer_state.pt lacks, because the files of the parameters hold them.
_PER_PARAMETER = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


class UniversalWriter(CheckpointWriter):
    """Writes a universal checkpoint, and its name into `latest_universal` beside it. At any time the folder
    of a parameter is complete and synced, or it does not exist.

    zero/<parameter name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": global tensor, "cat_dim": ...}
    zero/<parameter name>/step.pt                               the optimizer's step

    The checkpoint's folder must exist. Several processes may write into it at once, even the same parameter.
    """

    keeps_parameters = True

    def __init__(self, folder: Path, source: StateReader, allow_replica_mismatch: bool = False) -> None:
        """allow_replica_mismatch: whether the mean is written for replicas of a parameter that differ."""
        super().__init__(folder, source)
        self._allow_replica_mismatch = allow_replica_mismatch

    @classmethod
    def copied_files(cls, reader: StateReader) -> list[str]:
        files = reader.checkpoint.run.get("files", {}) if isinstance(reader, NativeReader) else {}
        return [path.name for path in model_files(reader.folder) if path.name in files]

    def parameter_bytes(self) -> dict[str, int]:
        """See `CheckpointWriter`. Leaves out parameters that are finished."""
        parameters, sizes = self.folder / PARAMETER_FOLDER, super().parameter_bytes()
        return {name: 0 if (parameters / name).exists() else size for name, size in sizes.items()}

    def unfinished_bytes(self) -> int:
        # Other processes may remove files at the same time.
        total = 0
        for parent, _, names in os.walk(self.folder / UNFINISHED_FOLDER):
            for name in names:
                with suppress(FileNotFoundError):
                    total += Path(parent, name).stat().st_size
        return total

    @classmethod
    def has_parameters(cls, folder: Path) -> bool:
        return any((folder / PARAMETER_FOLDER).glob("*"))

    def check_mismatch(self, name: str, largest: float) -> None:
        if not self._allow_replica_mismatch:
            super().check_mismatch(name, largest)
        # This file is written before the parameter is finished, because a resumed conversion does not compare
        # the parameter's replicas again.
        _mark(self.folder / AVERAGED_FOLDER, name, str(largest))

    def write_parameter(self, name: str, pieces: Iterator[Piece]) -> None:
        spec = self.reader.specs[name]
        with self.placed(f"{PARAMETER_FOLDER}/{name}") as folder:
            folder.mkdir()
            for state_name, of_state in by_state(pieces):
                if state_name not in STATE_FILES:
                    raise UserError(
                        f"the optimizer's {state_name} of {name} cannot be stored in a universal checkpoint: "
                        f"expected {', '.join(STATE_FILES)}"
                    )
                blocks = (piece.values[state_name].contiguous().numpy() for piece in of_state)
                content = {**_merge_entry(spec), "param": torch.empty(spec.valid_shape, device="meta")}
                write_archive(folder / STATE_FILES[state_name], content, blocks)
            if (step := self.reader.step_of(name)) is not None:
                write_archive(folder / STEP_FILE, torch.empty((), device="meta"), [np.float32(step)])

    @contextmanager
    def placed(self, name: str) -> Iterator[Path]:
        """See `CheckpointWriter`. The file or folder gets its name once it is complete and synced, so it is
        complete even after a power failure."""
        target = self.folder / name
        unfinished = self.folder / UNFINISHED_FOLDER / target.name
        self._remove(unfinished)  # files of a process that has ended
        for parent in (unfinished.parent, unfinished):
            # No parent is created: once another process has published the folder, nothing may create
            # it again.
            parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=unfinished) as folder:
            written = Path(folder, target.name)
            yield written
            if written.is_dir():
                sync_tree(written)
            else:
                sync_file(written)
            target.parent.mkdir(exist_ok=True)
            try:
                rename_synced(written, target)
            except OSError as error:
                # Another process was faster (its locks are not visible to this one): its files hold equal
                # bytes.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _remove(self, folder: Path) -> None:
        """Renames a folder and removes it, so that another process finds all of it, or nothing."""
        removed = self.folder / UNFINISHED_FOLDER / f"removed-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def has_parameter(self, name: str) -> bool:
        """Returns whether an interrupted conversion has finished the parameter: all of its files exist, have
        the right shape and match their checksums. If not, removes the parameter's folder."""
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
        if complete:
            _mark(self.folder / KEPT_FOLDER, name)
        else:
            (self.folder / UNFINISHED_FOLDER).mkdir(exist_ok=True)
            self._remove(folder)
        return complete

    def result(self, target: Path) -> list[str]:
        lines = []
        for path in sorted((self.folder / AVERAGED_FOLDER).glob("*")):
            difference = float(path.read_text() or "nan")  # an earlier version wrote empty files
            lines.append(
                f"{path.name}: replicas on TP ranks differed by up to {difference:.2e}; their mean is used"
            )
        kept = len(list((self.folder / KEPT_FOLDER).glob("*")))
        before = f", {kept} of them by an earlier, interrupted conversion" if kept else ""
        return [*lines, f"{target}: {len(self.reader.specs)} parameters{before}"]

    def close(self) -> tuple[Files, Any]:
        reader = self.reader
        if isinstance(reader, NativeReader):
            self._copy_common_files(reader)
        else:
            checkpoint = reader.checkpoint
            with self.placed(f"{PARAMETER_FOLDER}/{OPTIMIZER_STATE_FILE}") as path:
                write_archive(path, {LOSS_SCALE_KEY: reader.loss_scaler})
            info = checkpoint.run.get(INFO_KEY) or derive_info(reader.specs, checkpoint.vocab_size)
            with self.placed(model_file(0)) as path:
                write_archive(path, client_state(info, checkpoint.config, checkpoint.run["state"]))
        sizes = file_sizes(self.folder, "*.pt")
        # Other processes may remove unfinished files.
        names = [name for name in sizes if UNFINISHED_FOLDER not in Path(name).parts]
        return {name: {"bytes": sizes[name]} for name in names}, None

    def _copy_common_files(self, reader: NativeReader) -> None:
        """Writes what does not belong to a single parameter, in the form of DeepSpeed's converter."""
        common = {key: value for key, value in reader.files.common.items() if key not in _PER_PARAMETER}
        common["param_groups"] = reader.files.common["base_optimizer_state"].get("param_groups")
        common[LOSS_SCALE_KEY] = common.pop("loss_scaler", None)
        with self.placed(f"{PARAMETER_FOLDER}/{OPTIMIZER_STATE_FILE}") as path:
            write_archive(path, _plain_types(common))
        for source in model_files(reader.folder):
            with self.placed(source.name) as path:
                if reader.files.stage == 0:  # then this file also holds the optimizer state
                    write_archive(path, _plain_types({**read_file(source), "optimizer": None}))
                else:
                    with open_regular(source) as file, open(path, "wb") as copy:
                        shutil.copyfileobj(file, copy)

    def finish(self, run: dict[str, Any], tables: Sequence[Any]) -> dict[str, Any]:
        """See `CheckpointWriter`. If parameters were averaged, removes their digests and the canary loss from
        the integrity record."""
        averaged = {path.name for path in (self.folder / AVERAGED_FOLDER).glob("*")}
        if not averaged or INTEGRITY_KEY not in run:
            return run
        digests = {
            state_name: {name: digest for name, digest in by_parameter.items() if name not in averaged}
            for state_name, by_parameter in run[INTEGRITY_KEY]["digests"].items()
        }
        return {**run, INTEGRITY_KEY: {**run[INTEGRITY_KEY], "digests": digests, CANARY_KEY: None}}

    def complete(self) -> None:
        """See `CheckpointWriter`. If the source has no `run.json` (of another framework), none is written."""
        if self.reader.checkpoint.is_external:
            self.close()
        else:
            super().complete()
        shutil.rmtree(self.folder / UNFINISHED_FOLDER, ignore_errors=True)

    @staticmethod
    def announce(target: Path) -> None:
        """Writes the checkpoint's name into `latest_universal`, then removes what only the conversion
        needed."""
        latest = target.parent / LATEST_UNIVERSAL_FILE
        if not latest.is_file() or read_small(latest) != target.name.encode():
            write_atomically(latest, target.name)
        for name in (AVERAGED_FOLDER, KEPT_FOLDER):
            shutil.rmtree(target / name, ignore_errors=True)
        sync_file(target)


def _mark(folder: Path, name: str, text: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    for path in (folder / name, folder, folder.parent):
        sync_file(path)


def _plain_types(value: Any) -> Any:
    """Returns the value in types that any program can read. Tensors and objects of other frameworks' classes
    become None. The arguments remain an `argparse.Namespace`, which Megatron programs expect."""
    if isinstance(value, dict):
        return {key: _plain_types(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain_types(entry) for entry in value)
    if isinstance(value, Namespace):
        return Namespace(**{key: _plain_types(entry) for key, entry in vars(value).items()})
    return None if isinstance(value, (Stub, torch.Tensor)) else value


def _merge_entry(spec: ParameterSpec) -> dict[str, Any]:
    """Returns the entries that DeepSpeed's file of the parameter has beside the tensor."""
    entry: dict[str, Any] = {}
    for dim, _, parts in spec.sharding:
        entry |= {"cat_dim": dim} | ({"param_n_sub_params": parts} if parts > 1 else {})
    if spec.num_valid_rows is not None:
        entry["vocab_tensor"] = True
    return entry
