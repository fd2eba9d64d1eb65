"""Writes universal checkpoints from a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.checkpoint.formats.native import NativeReader
from megatron.checkpoint.formats.registry import LATEST_UNIVERSAL_FILE, PARAMETER_FOLDER
from megatron.checkpoint.formats.state import StateBlocks, StateReader
from megatron.checkpoint.formats.torch_archive import write_plain
from megatron.checkpoint.formats.universal import (
    LOSS_SCALE_KEY,
    OPTIMIZER_STATE_FILE,
    UNFINISHED_FOLDER,
    UniversalWriter,
)
from megatron.checkpoint.formats.universal_info import INFO_KEY, client_state, derive_info
from megatron.checkpoint.formats.writing import ParameterWriter, WriteOptions, verify_files
from megatron.files import write_atomically
from megatron.mpu.parameters import ParameterSpec


class UniversalCheckpointWriter(ParameterWriter):
    """Writes a universal checkpoint, and its name into `latest_universal` beside it."""

    def __init__(self, folder: Path, reader: StateReader) -> None:
        super().__init__(folder, reader)
        self._parameters = UniversalWriter(folder)

    @classmethod
    def write_checkpoint(cls, reader: StateReader, target: Path, options: WriteOptions) -> Iterator[str]:
        """See `CheckpointWriter`. Native checkpoints are converted as by tools/ds_to_universal.py."""
        # Imported only here: `to_universal` imports this package.
        from megatron.checkpoint.conversion.source import Source
        from megatron.checkpoint.conversion.to_universal import convert

        if isinstance(reader, NativeReader):
            if options.verify:
                verify_files(reader)
            for parameter in convert(Source(reader), target, options.workers, verify_digests=options.verify):
                yield parameter.name
            return
        yield from super().write_checkpoint(reader, target, options)
        write_atomically(target.parent / LATEST_UNIVERSAL_FILE, target.name)

    def write_parameter(
        self, name: str, spec: ParameterSpec, states: StateBlocks, step: float | None = None
    ) -> None:
        self._parameters.write_parameter(name, spec, states, step)
        self._parameters.finish_parameter(name)

    def finish(self) -> None:
        """See `ParameterWriter`. Writes the first rank's mp_rank file, which DeepSpeed's loader reads."""
        (self.folder / UNFINISHED_FOLDER).rmdir()
        checkpoint = self.reader.checkpoint
        write_plain(
            self.folder / PARAMETER_FOLDER / OPTIMIZER_STATE_FILE, {LOSS_SCALE_KEY: self.reader.loss_scaler}
        )
        info = checkpoint.run.get(INFO_KEY) or derive_info(self.reader.specs, checkpoint.vocab_size)
        content = client_state(info, checkpoint.config, checkpoint.run["state"])
        torch.save(content, self.folder / "mp_rank_00_model_states.pt")
        paths = sorted(self.folder.rglob("*.pt"))
        self.write_run_file(
            {str(path.relative_to(self.folder)): {"bytes": path.stat().st_size} for path in paths}
        )
