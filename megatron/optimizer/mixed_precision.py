"""Mixed-precision optimizer with ZeRO, around Adam or SGD.

DeepSpeed has five optimizer wrappers, which it chooses by precision and ZeRO stage. They differ in how they
accumulate gradients, compute the gradient norm and take the first step (see `megatron.engine.workarounds`),
so a run's numbers would depend on its layout. This module replaces them with one code path:

- gradients accumulate in one flat fp32 buffer per parameter group, for any precision of the parameters;
- gradients are summed over ranks in fp32, so that all replicas of a parameter stay equal
  (`gradient_reduction`);
- the gradient norm counts each parameter of the model once;
- master weights and optimizer state are sharded over the data-parallel ranks (ZeRO-1) or replicated (ZeRO-0).
  ZeRO-2 also shards the gradients of transformer layers, ZeRO-3 also their weights (`overlap`).

Checkpoints receive the state as `pieces` of parameters. 8-bit moments are saved in fp32, so any optimizer of
the Adam family can load them, on any layout.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.mpu.mesh import Mesh
from megatron.mpu.parameters import is_norm_owner, main_grad_of, own_storage, spec_of
from megatron.mpu.pieces import Piece
from megatron.mpu.world import max_over_ranks
from megatron.optimizer.flat_group import (
    FlatGroup,
    add_to_main_grad,
    average_replicated,
    is_host_memory,
    wait_for_copies,
)
from megatron.optimizer.gradient_norm import gradient_norms, where_not_finite
from megatron.optimizer.gradient_reduction import GradientReduction
from megatron.optimizer.loaded_group import LoadedGroup, in_host_memory
from megatron.optimizer.loss_scale import LossScaler
from megatron.optimizer.master_update import MasterUpdate, StateRule, change_state, scale_rows
from megatron.optimizer.overlap import Bucket, ShardedUnit, UnitOverlap, ZeroConfig
from megatron.optimizer.quantized import QuantizedMoment, read_moment

# A function that reads the saved state of a piece. Arguments: the piece without values, and a tensor in host
# memory for the master weights, or None. Results: the master weights (flat, fp32); for each moment, a
# function that reads it into such a tensor, or with None into a new one; and other state such as the step.
SavedState = Callable[
    [Piece, Tensor | None],
    tuple[Tensor, Mapping[str, Callable[[Tensor | None], Tensor]], dict[str, Any]],
]


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite. Every rank raises this error before the weights are updated."""


class MixedPrecisionOptimizer:
    """Wraps `optimizer`, whose groups hold the model's parameters. The parameters become views of flat
    buffers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        mesh: Mesh,
        tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        scaler: LossScaler,
        zero: ZeroConfig,
        clip_grad: float,
        averages_replicated: bool = False,
        overwrites_gradients: bool = True,
        state_rule: StateRule | None = None,
        row_scaling: StateRule | None = None,
        weights_changed_fn: Callable[[], None] | None = None,
    ) -> None:
        """names: global name of each parameter. tied: parameters with a replica on another stage, and the
        process group of these stages. clip_grad: largest global gradient norm; 0: no clipping.
        averages_replicated: whether to average parameters that are replicated over tensor-parallel ranks
        after each step. overwrites_gradients: whether the first micro-batch of a step may overwrite the sums
        of gradients; false for passes that always add: compiled ones, and replays of CUDA graphs. state_rule:
        the rule for parameters without a gradient. row_scaling: the rule that scales rows after each update.
        weights_changed_fn: is called after each change of the weights; the new weights may arrive later."""
        self.optimizer = optimizer
        self.names = names
        self.mesh = mesh
        self.scaler = scaler
        self.clip_grad = clip_grad
        self.averages_replicated = averages_replicated
        self.overwrites_gradients = overwrites_gradients
        self._state_rule, self._row_scaling = state_rule, row_scaling
        self._weights_changed_fn = weights_changed_fn
        self.is_partitioned = zero.zero_stage >= 1
        """Whether the ranks that reduce a gradient share one replica of the optimizer state (ZeRO)."""
        # NVIDIA apex's Adam keeps its step count in the groups, torch's Adam in the state.
        self._steps_in_groups = type(optimizer).__module__.startswith("apex.")
        self.found_nonfinite = False
        self.grad_norm = 0.0
        # A text that says which gradients were not finite in the last step, unless the loss scale was lowered
        # instead.
        self.diagnosis = ""
        self.skipped_by_fn = False
        # The largest exit code of all ranks in the last step, read with the gradient norm; None without
        # `exit_code_fn`.
        self.exit_code: int | None = None
        self.buckets: list[Bucket] = []
        self._not_gathered: deque[Bucket] = deque()
        self.begin_step()
        self._loss: Tensor | None = None
        self._loading: list[LoadedGroup] = []

        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        self.flat = [self._flat_group(group, zero) for group in optimizer.param_groups]
        for group, flat in zip(optimizer.param_groups, self.flat, strict=True):
            group["params"] = [flat.master]
        self.parameters = [p for flat in self.flat for p in flat.parameters]
        self.master_update = MasterUpdate(optimizer, self.flat, mesh)
        self._reduction = GradientReduction(self.flat, tied, mesh.tp)
        counted = [is_norm_owner(p, mesh, self.is_partitioned) for p in self.parameters]
        self._counted = torch.tensor(counted, dtype=torch.bool, device=self._device())
        self.unit_overlap = UnitOverlap(zero.overlap_param_gather, zero.overlap_grad_reduce)
        self._units = [
            ShardedUnit(module, self._flats_of(unit), self.unit_overlap)
            for unit, module in zero.units.items()
        ]
        self._overlaps_gather, self._chains_gathers = zero.overlap_param_gather, zero.chains_param_gathers
        for parameter in (p for flat in self.flat if not flat.shards_gradients for p in flat.parameters):
            if parameter.dtype == torch.float32:
                parameter.grad = main_grad_of(parameter)  # autograd accumulates into the flat buffer
            else:
                parameter.register_post_accumulate_grad_hook(add_to_main_grad)
        start = self._reduction.start if zero.overlap_grad_reduce else None
        self.buckets = [
            Bucket(modules, self._flats_of(unit), start, self._not_gathered)
            for unit, modules in zero.buckets.items()
        ]

    def _flat_group(self, group: dict[str, Any], zero: ZeroConfig) -> FlatGroup:
        in_unit = group.get("unit") in zero.units
        values_of = zero.initial_values if in_unit else None
        return FlatGroup(
            group,
            self.mesh.reduced_over(spec_of(group["params"][0])),
            self.is_partitioned,
            shards_gradients=in_unit,
            initial_values=None if values_of is None else lambda p, part: values_of(self.names[p], part),
            master_on_host=zero.cpu_offload and not is_host_memory(group["params"][0].device),
        )

    def _flats_of(self, unit: str) -> list[FlatGroup]:
        return [flat for flat in self.flat if flat.unit == unit]

    # --- the interface of an optimizer that DeepSpeed's engine expects ---

    @property
    def param_groups(self) -> list[dict]:
        """The wrapped optimizer's groups, which contain the learning rates."""
        return self.optimizer.param_groups

    @property
    def overflow(self) -> bool:
        """Whether a gradient of the last step was not finite. DeepSpeed reads this name."""
        return self.found_nonfinite

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Does nothing, because gradients always accumulate until `reduce_gradients`."""

    def zero_grad(self) -> None:
        """Starts new sums of gradients. With `overwrites_gradients` each parameter's first gradient
        overwrites its sum; otherwise the sums are set to zero."""
        for flat in self.flat:
            flat.forget_gradients() if self.overwrites_gradients else flat.zero_gradients()

    # --- the step ---

    def begin_step(
        self,
        skips_non_finite: bool | None = None,
        skip_update_fn: Callable[[float], bool] | None = None,
        exit_code_fn: Callable[[], int] | None = None,
        micro_batches: int = 0,
    ) -> None:
        """Sets the options of the next steps.

        skips_non_finite: whether a step with a non-finite gradient is skipped; None: only if the loss scale
        can be lowered. skip_update_fn: called with the gradient norm before the update; returns whether to
        skip it, with the same result on all ranks. exit_code_fn: called after the backward pass; the largest
        result of all ranks is `exit_code` after the step, read from the device together with the gradient
        norm. micro_batches: number of micro-batches in the next step; if 0 (unknown), gradients are reduced
        after the backward passes.
        """
        self._skips_non_finite = skips_non_finite
        self._skip_update_fn = skip_update_fn
        self._exit_code_fn = exit_code_fn
        for rule in filter(None, (self._state_rule, self._row_scaling)):
            rule.begin_step()
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def register_loss(self, loss: Tensor) -> None:
        """Makes a non-finite loss stop the step on every rank, even if all gradients are finite.

        loss * 0 is 0 or NaN. This product is added to a gradient, so the gradient reduction sends it to all
        ranks.
        """
        self._loss = loss
        if self.flat:
            # The first group is not in a sharded unit, so its full gradients are allocated, and are reduced
            # later.
            gradient = main_grad_of(self.flat[0].parameters[0])
            assert gradient is not None
            gradient.view(-1)[:1].add_(loss * 0.0)

    def reduce_gradients(self) -> None:
        """Reduces the gradients over ranks. Every stage calls it once per step, after its last micro-batch.
        It records the norms before the reduction, to name the rank of a non-finite gradient."""
        self.unit_overlap.finish_reduction()
        self._reduction.run()

    @torch.no_grad()
    def step(self) -> None:
        """Clips the gradient, updates the master weights and all-gathers the model's weights. A `skipped`
        step changes only the loss scale.

        Sets `grad_norm` (the norm for the mean loss, before clipping; inf if a gradient is not finite),
        `found_nonfinite` and `skipped_by_fn`. Raises NonFiniteError on all ranks if a gradient is not finite,
        unless `begin_step` or the loss scale allows to skip the step.
        """
        # The gradients belong to the scaled loss, summed over data-parallel ranks. This factor makes them the
        # gradients of the mean loss.
        factor = 1.0 / (self.scaler.scale * self.mesh.dp_cp.size)
        state_changes = self._state_rule.end_step() if self._state_rule is not None else {}
        row_factors = self._row_scaling.end_step() if self._row_scaling is not None else {}
        self.grad_norm = self._global_norm() * factor
        self.found_nonfinite = not math.isfinite(self.grad_norm)
        self.diagnosis = ""
        if self.found_nonfinite:
            scale_helps = self.scaler.can_shrink
            skips = scale_helps if self._skips_non_finite is None else self._skips_non_finite
            if not (skips and scale_helps):
                self.diagnosis = self._diagnosis()
            if not skips:
                raise NonFiniteError(self.diagnosis)
        if self.scaler.dynamic:
            self.scaler.update(self.found_nonfinite)
        self.skipped_by_fn = (
            not self.found_nonfinite
            and self._skip_update_fn is not None
            and self._skip_update_fn(self.grad_norm)
        )
        if self.skipped:
            return
        if self.clip_grad > 0 and self.grad_norm > self.clip_grad:
            factor *= self.clip_grad / (self.grad_norm + 1.0e-6)
        self.unit_overlap.free_prefetched()
        self.master_update.run(factor)
        changed = change_state(self.flat, state_changes) | scale_rows(self.flat, row_factors, self.mesh)
        if self.averages_replicated:
            changed |= average_replicated(self.flat, self.mesh.tp)
        for flat in self.flat:
            if flat in changed:
                flat.copy_master_to_params()
        self._all_gather_params()

    @property
    def skipped(self) -> bool:
        """Whether the last step did not update the weights."""
        return self.found_nonfinite or self.skipped_by_fn

    def _all_gather_params(self) -> None:
        """All-gathers the partitions of the weights. Sharded weights (ZeRO-3) are gathered later, before each
        layer runs. The weights of a bucket may arrive as late as the next forward pass of the bucket's first
        layer."""
        if self._weights_changed_fn is not None:
            self._weights_changed_fn()
        if self.is_partitioned:
            in_buckets = {id(flat) for bucket in self.buckets for flat in bucket.flats}
            rest = [flat for flat in self.flat if flat.partitions > 1 and not flat.shards_weights]
            rest = [flat for flat in rest if id(flat) not in in_buckets]
            pending = [flat.all_gather_params() for flat in rest]
            for work in pending:
                work.wait()
        at_once = 1 if self._chains_gathers else len(self.buckets)
        self._not_gathered.clear()
        self._not_gathered.extend(self.buckets[at_once:])
        for bucket in self.buckets[:at_once]:
            bucket.start_gather()
        if not self._overlaps_gather:
            self.wait_for_params()

    def wait_for_params(self) -> None:
        """Waits until all weights of the last step have arrived. It must be called before weights are read,
        and is a collective."""
        for bucket in reversed(self.buckets):  # the last bucket starts all all-gathers
            bucket.wait_for_gather()

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded between steps (ZeRO-3)."""
        return any(flat.shards_weights for flat in self.flat)

    @contextmanager
    def gathered_params(self, module: nn.Module | None = None) -> Iterator[None]:
        """Returns a context in which the full weights of `module` (default: all) are allocated. It is a
        collective."""
        self.wait_for_params()
        with ExitStack() as stack:
            for unit in self._units:
                if module is None or unit.module is module:
                    stack.enter_context(unit.gathered_params())
            yield

    def _global_norm(self) -> float:
        """Returns the model's gradient norm, which counts each parameter once and is bitwise equal on all
        ranks. Sets `exit_code`."""
        codes = []
        if self._exit_code_fn is not None:
            codes = [max_over_ranks(self._exit_code_fn(), self._device(), torch.float64)]
        norms = self._norms_before_reduction()
        if self._reduction.exchanges:
            owned = [flat.owned_grad(parameter) for flat in self.flat for parameter in flat.parameters]
            norms = gradient_norms(owned, self._device())
        squares = norms.square()
        # Replicas that do not count must be finite, too: 0 * inf and 0 * NaN are NaN.
        square = torch.where(self._counted, squares, squares * 0.0).sum()
        if self.mesh.world_size > 1:
            dist.all_reduce(square)  # over all ranks, which count different elements
        # This is the only synchronization with the device in a step.
        total, *exit_code = torch.stack([square, *codes]).tolist()
        self.exit_code = int(exit_code[0]) if exit_code else None
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def _norms_before_reduction(self) -> Tensor:
        """Returns the norm of this rank's gradient of each parameter, fp64. For sharded gradients (ZeRO-2,
        ZeRO-3) it shows only whether they are finite: see `FlatGroup.reduced_grad_norms`."""
        none = torch.zeros(0, dtype=torch.float64, device=self._device())
        return torch.cat([none, *(flat.reduced_grad_norms for flat in self.flat)])

    def _device(self) -> torch.device:
        return torch.device(get_accelerator().current_device_name())

    def _diagnosis(self) -> str:
        """Returns one text for all ranks that names the non-finite gradients (rank, parameter). It is a
        collective."""
        finite = self._norms_before_reduction().isfinite().tolist()
        bad = [self.names[p] for p, is_finite in zip(self.parameters, finite, strict=True) if not is_finite]
        where = where_not_finite(bad, self.mesh, self._loss)
        return "the gradient is non-finite, the step was not taken; first non-finite parameter: " + where

    # --- moments ---

    def moments_of(self, flat: FlatGroup) -> dict[str, Tensor | QuantizedMoment]:
        """Returns the moments of the group's partition, by the optimizer's names for them; {} before the
        first step."""
        return {
            key: value
            for key, value in self.optimizer.state.get(flat.master, {}).items()
            if isinstance(value, QuantizedMoment) or (isinstance(value, Tensor) and value.dim() == 1)
        }

    def moment_fragments(self, flat: FlatGroup, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the fp32 moments of the parameter's elements in this partition, flat, by the optimizer's
        names for them. Returns {} if there are no elements, and before the first step.

        They are views of the optimizer state, or dequantized copies if `flat.quantized`.
        """
        fragment = flat.fragment(parameter)
        if fragment is None:
            return {}
        return {key: read_moment(moment, *fragment) for key, moment in self.moments_of(flat).items()}

    # --- checkpoints ---

    def pieces(self, names: Collection[str] | None = None, with_values: bool = True) -> Iterator[Piece]:
        """Yields the elements of each parameter in this rank's partitions. names: if given, only these
        parameters. with_values: if false, the pieces have no tensors and cost nothing."""
        self.wait_for_params()
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            for parameter, start, length in flat.fragments():
                if names is not None and self.names[parameter] not in names:
                    continue
                values: dict[str, Tensor] = {}
                if with_values:
                    values = {"fp32": flat.master.detach()[start : start + length]}
                    values |= self.moment_fragments(flat, parameter)
                yield self._piece(group, flat, parameter, flat.first_element(parameter), length, values)

    def packed_groups(self) -> Iterator[tuple[dict[str, Tensor], list[Piece]]]:
        """Yields, for each group, the tensors of this rank's partition by state (flat, fp32, without padding)
        and the pieces, which are consecutive views of these tensors."""
        self.wait_for_params()
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            master = flat.without_padding(flat.master.detach())
            # In fp32 the master weights are a part of the buffer with the weights of all partitions.
            is_view_of_weights = flat.weights_are_master and flat.partitions > 1
            packed = {"fp32": own_storage(master) if is_view_of_weights else master}
            packed |= {key: flat.without_padding(moment) for key, moment in self.moments_of(flat).items()}
            pieces, first = [], 0
            for parameter, _, length in flat.fragments():
                values = {key: tensor[first : first + length] for key, tensor in packed.items()}
                offset = flat.first_element(parameter)
                pieces.append(self._piece(group, flat, parameter, offset, length, values))
                first += length
            yield packed, pieces

    def _piece(
        self,
        group: dict[str, Any],
        flat: FlatGroup,
        parameter: nn.Parameter,
        first: int,
        length: int,
        values: dict[str, Tensor],
    ) -> Piece:
        spec = spec_of(parameter)
        step = self.optimizer.state.get(flat.master, {}).get("step", group.get("step"))
        return Piece(
            self.names[parameter],
            spec,
            self.mesh.axes_of(spec),
            first,
            first + length,
            values,
            step=None if step is None else float(step),
            quantized=flat.quantized,
            owned=is_norm_owner(parameter, self.mesh),
        )

    def optimizer_record(self) -> dict[str, Any]:
        """Returns torch's state dict of the wrapped optimizer: its groups, and the state of each
        partition."""
        record = self.optimizer.state_dict()
        if self._steps_in_groups:
            for index, state in record["state"].items():
                record["state"][index] = {**state, "step": self.param_groups[index]["step"]}
        return record

    @torch.no_grad()
    def read_by_name(
        self,
        saved: SavedState,
        loss_scaler: dict | None,
        with_moments: bool,
        before_rounding: Callable[[Piece], None] = lambda piece: None,
    ) -> None:
        """Reads this rank's part of the master weights and moments from a checkpoint of any layout. It is not
        a collective. After all ranks have read, `exchange_loaded` completes the load.

        loss_scaler: state of the loss scale; None keeps the initial one. with_moments: if false, the
        optimizer state is reset. before_rounding: is called with each fp32 moment that will be stored in 8
        bits. Raises UserError if the checkpoint's parameters have different numbers of updates.
        """
        self.wait_for_params()
        self.unit_overlap.free_prefetched()
        wait_for_copies(self.flat)
        self.optimizer.state.clear()
        self._loading = []
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            loading = LoadedGroup(flat, self.optimizer.state, group, self._steps_in_groups)
            for parameter, start, length in loading.fragments():
                piece = self._piece(group, flat, parameter, flat.first_element(parameter, start), length, {})
                master = flat.master.data[start : start + length]
                values, moments, others = saved(piece, in_host_memory(master))
                if in_host_memory(master) is None:
                    master.copy_(values)
                del values  # moments are read one by one, so that only one tensor is in memory
                if with_moments:
                    for key, read in moments.items():
                        elements = read(loading.host_moment(key, start, length))
                        if flat.quantized:
                            before_rounding(replace(piece, values={key: elements}))
                        loading.store_moment(piece.name, key, start, elements)
                    loading.add_others(piece.name, others)
            self._loading.append(loading)
        if loss_scaler is not None:
            self.scaler.load_state_dict(loss_scaler)

    @torch.no_grad()
    def exchange_loaded(self) -> None:
        """Completes `read_by_name`: exchanges the shares of the replicas and all-gathers the weights. It is a
        collective. Raises UserError if the checkpoint's parameters have different numbers of updates."""
        for loading in self._loading:
            loading.exchange()
        self._loading = []
        for flat in self.flat:
            flat.copy_master_to_params()
        self._all_gather_params()
        self.wait_for_params()
