"""Updates the master weights with an optimizer, and state of the model with a rule.

Such a state, for example the experts' bias, consists of parameters without a gradient
(`ParameterSpec.has_gradient`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import boxes
from megatron.mpu.parameters import spec_of
from megatron.optimizer.adam import AdamW
from megatron.optimizer.flat_group import FlatGroup, wait_for_copies
from megatron.optimizer.matrix_optimizer import MatrixOptimizer
from megatron.optimizer.whole_matrices import WholeMatrices


class MasterUpdate:
    """Runs `optimizer` on master weights. Each group of the optimizer has one parameter, the master weights
    of a flat group."""

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[FlatGroup], mesh: Mesh) -> None:
        self._optimizer, self._flats = optimizer, flats
        self._whole_matrices: WholeMatrices | None = None
        if isinstance(optimizer, MatrixOptimizer):
            self._whole_matrices = WholeMatrices(flats, mesh, optimizer.matrix_update)

    def run(self, factor: float) -> None:
        """Updates the master weights from their gradients times `factor`, and rounds them into this rank's
        weights. It is a collective if the optimizer updates whole matrices.

        If the optimizer cannot update a group in one pass over memory, three passes scale the gradients,
        update the master weights, and copy them.
        """
        groups = zip(self._optimizer.param_groups, self._flats, strict=True)
        rest = [flat for group, flat in groups if not self._updates_in_one_pass(group, flat, factor)]
        for flat in rest:
            flat.set_master_grad(factor)
        wait_for_copies(rest)
        if self._whole_matrices is not None and isinstance(self._optimizer, MatrixOptimizer):
            self._optimizer.update_momentum()
            self._whole_matrices.run()
        self._optimizer.step()
        for flat in rest:
            flat.master.grad = None
            flat.copy_master_to_params()

    def _updates_in_one_pass(self, group: dict[str, Any], flat: FlatGroup, factor: float) -> bool:
        if flat.matrices or not isinstance(self._optimizer, AdamW):
            return False
        return self._optimizer.update_in_one_pass(
            group, flat.master, flat.local_gradients, factor, flat.rounded_weights
        )


class StateRule(Protocol):
    """Computes a change besides the optimizer's update: what each step adds to a state, or by which factors
    it multiplies rows of weights."""

    def begin_step(self) -> None:
        """Prepares for the passes of a step."""

    def end_step(self) -> Mapping[nn.Parameter, Tensor]:
        """Returns the values to add to the parameters (`change_state`), or the factors of their rows
        (`scale_rows`). They are fp32 and equal on all ranks that hold a parameter. It is called after the
        passes of each step, even if the update is skipped, and is a collective."""


def change_state(flats: Sequence[FlatGroup], changes: Mapping[nn.Parameter, Tensor]) -> set[FlatGroup]:
    """Adds the changes that a rule returned to the masters of parameters without a gradient. Returns the
    groups with such parameters."""
    changed = set()
    for flat in flats:
        for parameter, start, length in flat.fragments():
            if parameter in changes:
                first = flat.first_element(parameter)
                change = changes[parameter].view(-1)[first : first + length]
                flat.master.data[start : start + length] += change.to(flat.master.device)
                changed.add(flat)
    return changed


@torch.no_grad()
def scale_rows(
    flats: Sequence[FlatGroup], factors: Mapping[nn.Parameter, Tensor], mesh: Mesh
) -> set[FlatGroup]:
    """Multiplies rows of master weights by factors. factors: [rows of the full parameter] for each parameter.
    Returns the groups with such parameters."""
    scaled = set()
    for flat in flats:
        for parameter, start, length in flat.fragments():
            if parameter not in factors:
                continue
            spec, first = spec_of(parameter), flat.first_element(parameter)
            own, of_rows = flat.master[start : start + length], factors[parameter].to(flat.master.device)
            for box in boxes(spec, mesh.axes_of(spec), first, first + length):
                elements = own[box.first - first : box.first - first + box.numel]
                elements.view(box.sizes).mul_(of_rows[box.slices[0], None])
            scaled.add(flat)
    return scaled
