"""Whole fp32 values and moments out of a checkpoint, native of any layout or universal, for one process.

Of a native checkpoint they come from the optimizer's files: its layer files have the precision of the run.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import Tensor

from megatron.checkpoint.convert.to_universal import MOMENT_FILES
from megatron.checkpoint.discovery import PARAMETER_FOLDER, RUN_FILE, Checkpoint, is_universal
from megatron.checkpoint.formats.native import VALUES, OptimizerFiles
from megatron.checkpoint.formats.torch_archive import concat_pieces
from megatron.checkpoint.formats.universal import check_parameters, read_full_tensor
from megatron.checkpoint.integrity.files import expect_layout
from megatron.config import ConfigError
from megatron.config.vocab import padded_vocab_size
from megatron.model.single_process import model_specs
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, merge_shards


def specs_of(checkpoint: Checkpoint) -> dict[str, ParameterSpec]:
    """The parameters of the model that a checkpoint of this repo holds; of another program's, none."""
    if checkpoint.is_external:
        return {}
    with expect_layout(checkpoint.folder / RUN_FILE, "the record of a model that can be built"):
        return model_specs(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)


class UniversalStates:
    """The tensors of a universal checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder / PARAMETER_FOLDER
        self._specs = specs_of(checkpoint)
        check_parameters(checkpoint.folder)
        held = sorted(path.name for path in self._folder.iterdir() if path.is_dir())
        self.names = [*(n for n in self._specs if n in held), *(n for n in held if n not in self._specs)]

    def kinds(self, name: str) -> list[str]:
        """VALUES, and the optimizer's names of the moments."""
        folder = self._folder / name
        return [VALUES, *(kind for kind, file in MOMENT_FILES.items() if (folder / file).is_file())]

    def read(self, name: str, kind: str) -> Tensor:
        """A whole tensor. The vocabulary has no padding, unless another program wrote it."""
        spec = self._specs.get(name)
        file = MOMENT_FILES.get(kind, "fp32.pt")
        return read_full_tensor(self._folder / name / file, spec)[: spec.num_valid_rows if spec else None]


class NativeStates:
    """The tensors in the optimizer's files of a native checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """ConfigError names a file that is damaged."""
        self._folder = checkpoint.folder
        self._tensor_size = checkpoint.config.parallel.tensor_model_parallel_size
        self._rows = padded_vocab_size(checkpoint.vocab_size, checkpoint.config.model, self._tensor_size)
        self._files = OptimizerFiles(checkpoint.folder, self._tensor_size)
        self._specs = specs_of(checkpoint)
        missing = [name for name in self._specs if name not in self._files.names]
        if missing:
            raise ConfigError(
                f"checkpoint {self._folder}: the optimizer files hold no state of {missing[0]} "
                f"({len(missing)} such parameters): take another one"
            )
        self.names = list(self._specs)

    def kinds(self, name: str) -> list[str]:
        """As `UniversalStates.kinds`."""
        return [VALUES, *self._files.moments(name)]

    def read(self, name: str, kind: str) -> Tensor:
        """A whole tensor, the vocabulary without padding. ConfigError if the files are of another model."""
        spec = self._specs[name]
        saved = spec
        if spec.num_valid_rows is not None:
            saved = replace(spec, global_shape=(self._rows, *spec.global_shape[1:]))
        shards = []
        # Of what is not cut the first copy is read, as a run reads it that loads the checkpoint.
        for rank in range(1 if spec.shard_dim is None else self._tensor_size):
            flat = concat_pieces(self._files.pieces(rank, name, kind))
            shape = local_shape(saved, TPGroup(rank, self._tensor_size))
            if flat.numel() != prod(shape):
                raise ConfigError(
                    f"checkpoint {self._folder}: tensor rank {rank} holds {flat.numel():,} elements of "
                    f"{name}, expected {prod(shape):,}: the files are not of one checkpoint"
                )
            shards.append(flat.view(shape))
        return merge_shards(saved, shards)[: spec.num_valid_rows]


def open_states(checkpoint: Checkpoint) -> NativeStates | UniversalStates:
    """What the checkpoint holds. Raises ConfigError for files that cannot be read."""
    return UniversalStates(checkpoint) if is_universal(checkpoint.folder) else NativeStates(checkpoint)
