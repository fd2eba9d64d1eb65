"""State of the model that a rule changes after each step, such as the bias of experts: parameters without a
gradient (`ParameterSpec.has_gradient`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from megatron.optimizer.flat_group import FlatGroup


class StateRule(Protocol):
    """Decides what each step adds to the state."""

    def begin_step(self) -> None:
        """Called before the passes of a step."""

    def end_step(self) -> Mapping[nn.Parameter, Tensor]:
        """Returns what to add to the parameters, fp32, equal on all ranks that hold one. Called after the
        passes, also if the update is skipped. Collective."""


def change_state(flats: Sequence[FlatGroup], changes: Mapping[nn.Parameter, Tensor]) -> set[FlatGroup]:
    """Adds to the masters of parameters without a gradient what their rule returned. Returns the groups with
    such parameters."""
    changed = set()
    for flat in flats:
        for parameter, start, length in flat.fragments():
            if parameter in changes:
                first = flat.first_element(parameter)
                change = changes[parameter].view(-1)[first : first + length]
                flat.master.data[start : start + length] += change.to(flat.master.device)
                changed.add(flat)
    return changed
