"""Optimizer state out of a native checkpoint by parameter name, whichever stage and replica held it.

Every file of a (stage, tensor rank) pair, and with ZeRO-1 of a data-parallel rank, holds flat partitions and
says which parameter lies where in them; the fragments of a parameter in the order of the data-parallel ranks
are the whole of it (of its tensor-parallel shard).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron.config import ConfigError

_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")


class OptimizerFiles:
    """The optimizer files of one tensor rank in a checkpoint folder, opened without reading them whole."""

    def __init__(self, folder: Path, tensor_rank: int, tensor_size: int) -> None:
        """`tensor_size`: of the run that wrote them."""
        self.folder = folder
        self._states: dict[int, list[dict]] = {}
        for model_rank, path, key in _optimizer_files(folder):
            if model_rank % tensor_size == tensor_rank:
                self._states.setdefault(model_rank, []).append(_read(path)[key])
        if not self._states:
            raise ConfigError(f"{folder} holds no optimizer state of tensor rank {tensor_rank}")

    @property
    def loss_scaler(self) -> dict:
        """State of the loss scaler, the same on all ranks."""
        return next(iter(self._states.values()))[0]["loss_scaler"]

    def parameter(self, name: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """Of the parameter of this name, flat: fp32 master values, moments, and what else the optimizer
        keeps (the step). ConfigError if no file holds it."""
        for partitions in self._states.values():
            groups = len(partitions[0]["param_slice_mappings"])
            for group in range(groups):
                if any(name in state["param_slice_mappings"][group] for state in partitions):
                    return _join(partitions, group, name)
        raise ConfigError(f"{self.folder} holds no optimizer state of {name}")


def _optimizer_files(folder: Path) -> list[tuple[int, Path, str]]:
    """(model-parallel rank, path, key of the optimizer's state): ZeRO-1's files, else those of ZeRO-0."""
    zero = [(_ZERO_FILE.fullmatch(path.name), path) for path in folder.glob("*_optim_states.pt")]
    found = [(int(match["data"]), int(match["model"]), path) for match, path in zero if match]
    if found:
        return [(model, path, "optimizer_state_dict") for _, model, path in sorted(found)]
    plain = [(_MODEL_FILE.fullmatch(path.name), path) for path in folder.glob("mp_rank_*_model_states.pt")]
    return [(int(match["model"]), path, "optimizer") for match, path in plain if match]


def _read(path: Path) -> dict:
    try:
        with torch.serialization.safe_globals([fragment_address, OrderedDict]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside torch
        raise ConfigError(
            f"checkpoint file {path} cannot be read ({error}): take an older checkpoint"
        ) from error


def _join(partitions: list[dict], group: int, name: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    masters: list[Tensor] = []
    moments: dict[str, list[Tensor]] = {}
    others: dict[str, Any] = {}
    for state in partitions:
        address = state["param_slice_mappings"][group].get(name)
        if address is None:
            continue
        master = state["single_partition_of_fp32_groups"][group]
        masters.append(master[address.start : address.start + address.numel])
        for key, value in state["base_optimizer_state"]["state"].get(group, {}).items():
            if isinstance(value, Tensor) and value.numel() == master.numel() and value.dim():
                moments.setdefault(key, []).append(value[address.start : address.start + address.numel])
            else:
                others[key] = value
    return torch.cat(masters), {key: torch.cat(parts) for key, parts in moments.items()}, others
