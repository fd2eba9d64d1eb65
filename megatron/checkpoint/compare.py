"""How two checkpoints differ: in what they say of themselves, and parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.checkpoint.folders import Checkpoint
from megatron.checkpoint.weights import LayerFiles
from megatron.model.single_process import model_specs

ABSENT = "absent"


@dataclass(frozen=True)
class ParameterDifference:
    """largest: largest absolute difference; None where the two cannot be subtracted, and `note` says why."""

    name: str
    largest: float | None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """settings: dotted name in run.json -> the two values, for those that differ. parameters: all, in order;
    those that are equal have the difference 0."""

    folders: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    parameters: list[ParameterDifference]


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> Comparison:
    """The differences; weights are compared whole, so the two layouts may differ. A layer of each is in
    memory at a time. Raises ConfigError for files that cannot be read."""
    return Comparison(
        (str(one.folder), str(other.folder)),
        different_settings(one.run, other.run),
        list(_parameter_differences(one, other)),
    )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Leaves of two nested dicts that differ, by dotted name; what one lacks is 'absent' there."""
    first, second = dict(_leaves(one)), dict(_leaves(other))
    pairs = {name: (first.get(name, ABSENT), second.get(name, ABSENT)) for name in first | second}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parameter_differences(one: Checkpoint, other: Checkpoint) -> Iterator[ParameterDifference]:
    sides = [_Wholes(one), _Wholes(other)]
    for layer in sorted({*sides[0].layers, *sides[1].layers}):
        first, second = (side.read(layer) for side in sides)
        for name in first | second:
            if name in first and name in second:
                yield _difference(name, first[name], second[name])
            else:
                yield ParameterDifference(name, None, f"only in {(one if name in first else other).folder}")


class _Wholes:
    """Whole parameters of a checkpoint by layer, without the vocabulary's padding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._specs = model_specs(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)
        self._files = LayerFiles(checkpoint.folder)
        self.layers = self._files.layers

    def read(self, layer: int) -> dict[str, Tensor]:
        """Empty for a layer that this checkpoint does not have."""
        if layer not in self.layers:
            return {}
        wholes = self._files.wholes(layer, self._specs)
        return {name: whole[: self._specs[name].used_rows] for name, whole in wholes.items()}


def _difference(name: str, one: Tensor, other: Tensor) -> ParameterDifference:
    if one.shape != other.shape:
        return ParameterDifference(name, None, f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    largest = (one.float() - other.float()).abs().max().item()
    if largest != largest or largest == float("inf"):
        return ParameterDifference(name, None, "values that are not finite")
    return ParameterDifference(name, largest)
