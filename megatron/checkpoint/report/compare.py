"""The differences between two checkpoints: settings in `run.json`, and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.record import Checkpoint

ABSENT = "absent"


@dataclass(frozen=True)
class ParameterDifference:
    """largest: kind ('fp32', 'exp_avg', ...) -> largest absolute difference; None if the two cannot be
    subtracted, with the reason in `note`."""

    name: str
    largest: dict[str, float | None]
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.note and not any(self.largest.values())


@dataclass(frozen=True)
class Comparison:
    """settings: dotted name in run.json -> the two values, for those that differ. parameters: all, in order;
    equal ones have differences of 0."""

    folders: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    parameters: list[ParameterDifference]


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> Comparison:
    """Compares two checkpoints by their global fp32 values and moments: layout, precision and format may
    differ. One parameter of each is in memory at a time. Raises ConfigError for files that cannot be read."""
    return Comparison(
        (str(one.folder), str(other.folder)),
        different_settings(one.run, other.run),
        list(_parameter_differences(one, other)),
    )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Leaves of two nested dicts that differ, by dotted name; 'absent' stands for a missing one."""
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
    sides = [open_reader(one), open_reader(other)]
    # The padding of another program's checkpoint is only known from the other checkpoint of the two.
    rows = {name: spec.num_valid_rows for side in sides for name, spec in side.specs.items()}
    for name in dict.fromkeys([*sides[0].names, *sides[1].names]):
        if not all(name in side.names for side in sides):
            yield ParameterDifference(
                name, {}, f"only in {(one if name in sides[0].names else other).folder}"
            )
            continue
        kinds = [side.kinds(name) for side in sides]
        largest: dict[str, float | None] = {}
        notes = []
        for kind in dict.fromkeys([*kinds[0], *kinds[1]]):
            if not all(kind in held for held in kinds):
                where = (one if kind in kinds[0] else other).folder
                largest[kind], note = None, f"{kind} only in {where}"
            else:
                largest[kind], note = _difference(
                    *(side.read_unpadded(name, kind)[: rows.get(name)] for side in sides)
                )
            notes += [note] if note else []
        yield ParameterDifference(name, largest, "; ".join(dict.fromkeys(notes)))


def _difference(one: Tensor, other: Tensor) -> tuple[float | None, str]:
    if one.shape != other.shape:
        return None, f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    largest = (one.float() - other.float()).abs().max().item()
    return (largest, "") if math.isfinite(largest) else (None, "non-finite values")
