"""Whole weights out of a checkpoint, native of any layout or universal, for one process."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.discovery import PARAMETER_FOLDER, is_universal
from megatron.checkpoint.formats.torch_archive import load_file
from megatron.checkpoint.formats.universal import fits, read_full_tensor
from megatron.checkpoint.integrity.names import check_parameter
from megatron.config import ConfigError
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER, TIED_EMBEDDING
from megatron.mpu.parameters import ParameterSpec, merge_shards, spec_of

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def full_weights(folder: Path, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter in a checkpoint's `folder`: a native one's layer files, in
    their type, or a universal one's values in fp32. Padding of the vocabulary is as it lies there.

    Raises ConfigError for files that cannot be read, and naming what is missing or of another shape.
    """
    return (
        _universal_tensors(folder, specs) if is_universal(folder) else LayerFiles(folder).all_tensors(specs)
    )


def _universal_tensors(folder: Path, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        yield name, read_full_tensor(folder / PARAMETER_FOLDER / name / "fp32.pt", spec)


class LayerFiles:
    """The weights in a native checkpoint's folder: DeepSpeed writes a file per layer and tensor rank. The
    layer's number does not depend on the stages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: dict[int, list[Path]] = {}
        for path in sorted(folder.glob("layer_*-model_states.pt")):
            match = _LAYER_FILE.fullmatch(path.name)
            if match and len(match.group(1)) < 10:
                self._paths.setdefault(int(match.group(1)), []).append(path)
        if not self._paths:
            raise ConfigError(
                f"{folder} holds no layer files (layer_XX-model_YY-model_states.pt): is it a checkpoint?"
            )

    @property
    def layers(self) -> list[int]:
        """The layers that have files, in order."""
        return sorted(self._paths)

    def shards(self, layer: int) -> dict[str, list[Tensor]]:
        """By parameter name in the whole model, the shards of all tensor ranks in order; read when used."""
        paths = self._paths[layer]
        states = [load_file(path) for path in paths]
        for path, state in zip(paths, states, strict=True):
            if not isinstance(state, dict) or not all(
                isinstance(tensor, Tensor) for tensor in state.values()
            ):
                raise ConfigError(f"{path} holds something other than a dict of tensors: it is damaged")
            if state.keys() != states[0].keys():
                raise ConfigError(f"{path} and {paths[0]} hold different parameters: they are of two runs")
        prefix = _parameter_prefix(layer)
        names = {name: check_parameter(prefix + str(name), paths[0]) for name in states[0]}
        return {full: [state[name] for state in states] for name, full in names.items()}

    def wholes(self, layer: int, specs: Mapping[str, ParameterSpec], meta: bool = False) -> dict[str, Tensor]:
        """The layer's parameters put together, in the type and with the vocabulary's padding of the files.

        meta: without values, on the meta device, which reads next to nothing from the files. Raises
        ConfigError for a parameter that is not in `specs`, or whose shape is another.
        """
        wholes = {}
        for name, shards in self.shards(layer).items():
            if name not in specs:
                raise ConfigError(f"{self._paths[layer][0]} holds {name}, which the model does not have")
            spec = specs[name]
            shards = [shard.to("meta") for shard in shards] if meta else shards
            try:
                wholes[name] = merge_shards(spec, shards)
                shape = tuple(wholes[name].shape)
            except (RuntimeError, IndexError):  # torch cannot join them
                shape = tuple(shards[0].shape)
            if not fits(shape, spec):
                raise ConfigError(
                    f"{self.folder}: the {len(shards)} files of layer {layer} make {name} a tensor of shape "
                    f"{shape}, expected {spec.global_shape}: they are not the files of one run"
                )
        return wholes

    def all_tensors(self, specs: Mapping[str, ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter, a layer at a time; ConfigError if any of `specs` is
        missing in the end."""
        missing = set(specs)
        for layer in self.layers:
            wholes = self.wholes(layer, specs)
            missing -= wholes.keys()
            yield from wholes.items()
        if missing:
            raise ConfigError(
                f"{self.folder} lacks {len(missing)} parameters, among them {sorted(missing)[0]}"
            )


def load_full_weights(module: nn.Module, folder: Path) -> None:
    """Fills `module`, a single-process model, from the `folder` of a checkpoint.

    The vocabulary's padding, which depends on the tensor-parallel size, is cut or filled with zeros. Raises
    ConfigError naming what is missing.
    """
    parameters = dict(module.named_parameters())
    specs = {name: spec_of(parameter) for name, parameter in parameters.items()}
    for name, whole in full_weights(folder, specs):
        _copy_rows(parameters[name], whole)


def _parameter_prefix(layer_index: int) -> str:
    """The embedding is the only layer before the transformer's first that has parameters."""
    return f"tied_modules.{TIED_EMBEDDING}." if layer_index < FIRST_TRANSFORMER_LAYER else f"{layer_index}."


@torch.no_grad()
def _copy_rows(target: Tensor, whole: Tensor) -> None:
    used = spec_of(target).num_valid_rows
    if used is None:
        target.copy_(whole)
    else:
        target.zero_()
        target[:used].copy_(whole[:used])
