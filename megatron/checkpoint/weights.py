"""Whole weights out of a native checkpoint of any layout, for one process."""

import re
from pathlib import Path

import torch
from torch import nn

from megatron.config import ConfigError
from megatron.model.gpt_model import FIRST_TRANSFORMER_LAYER, TIED_EMBEDDING
from megatron.mpu.parameters import merge_shards, spec_of

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


def load_whole_weights(module: nn.Module, folder: Path) -> None:
    """Fills `module`, a single-process model, from the layer files of a checkpoint `folder`.

    DeepSpeed writes a file per layer and tensor rank; the layer's number does not depend on the stages, and
    each parameter's spec says how its shards form the whole. The vocabulary's padding, which depends on the
    tensor-parallel size, is cut or filled with zeros. Raises ConfigError naming what is missing.
    """
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = _LAYER_FILE.fullmatch(path.name)
        if match:
            files.setdefault(int(match.group(1)), []).append(path)
    if not files:
        raise ConfigError(
            f"{folder} holds no layer files (layer_XX-model_YY-model_states.pt): is it a checkpoint?"
        )
    parameters = dict(module.named_parameters())
    missing = set(parameters)
    for index, paths in files.items():
        shards = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
        prefix = _parameter_prefix(index)
        for name in shards[0]:
            target = parameters.get(prefix + name)
            if target is None:
                raise ConfigError(f"{paths[0]} holds {prefix + name}, which the model does not have")
            _copy_rows(target, merge_shards(spec_of(target), [shard[name] for shard in shards]))
            missing.discard(prefix + name)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} parameters, among them {sorted(missing)[0]}")


def _parameter_prefix(layer_index: int) -> str:
    """The embedding is the only layer before the transformer's first that has parameters."""
    return f"tied_modules.{TIED_EMBEDDING}." if layer_index < FIRST_TRANSFORMER_LAYER else f"{layer_index}."


@torch.no_grad()
def _copy_rows(target: torch.Tensor, whole: torch.Tensor) -> None:
    used = spec_of(target).used_rows
    if used is None:
        target.copy_(whole)
    else:
        target.zero_()
        target[:used].copy_(whole[:used])
