"""One optimizer around Adam or SGD for every precision and ZeRO stage, its state on the device or the host.

DeepSpeed wraps an optimizer in one of five classes, by precision and stage. They differ in how gradients
accumulate, in what the norm counts and in the first step (see `megatron.engine.workarounds`), so a run's
numbers would depend on its layout. Here is one path for all:

- gradients accumulate in one flat fp32 buffer per parameter group, whatever the parameters' precision;
- they are summed over all ranks in fp32, so that copies of a parameter stay equal (`gradient_reduction`);
- the norm counts each parameter of the model once;
- fp32 master weights and the moments are shared out over the data-parallel ranks (ZeRO-1), or each has all;
  so are the gradients of transformer layers with ZeRO-2, and with ZeRO-3 their weights (`sharded_units`).

The state it saves is laid out as DeepSpeed's ZeRO files are, so its tools read them. Moments of 8 bits are
saved in fp32: any optimizer of the Adam family opens them, on any layout.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import __version__ as deepspeed_version
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from megatron.config import ConfigError
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, is_norm_owner, spec_of
from megatron.optimizer.eight_bit import new_moment
from megatron.optimizer.flat_group import FlatGroup, is_host_memory
from megatron.optimizer.gradient_reduction import GradientReduction
from megatron.optimizer.loss_scale import LossScaler
from megatron.optimizer.quantized import QuantizedMoment, read_moment, write_moment
from megatron.optimizer.replicated import average_replicated
from megatron.optimizer.sharded_units import ShardedUnit

# For a parameter's global name, its spec and this rank's place: its shard's master values and moments, flat
# and in fp32, and what else the optimizer keeps. A moment may be read only when it is asked for.
SavedState = Callable[[str, ParameterSpec, TPGroup], tuple[Tensor, Mapping[str, Tensor], dict[str, Any]]]


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite; raised on every rank before the optimizer has moved."""


@dataclass(frozen=True)
class OptimizerProcessGroups:
    """The process groups that a step communicates over; None where there is one rank."""

    data: dist.ProcessGroup | None
    data_size: int
    dp_rank: int
    model: dist.ProcessGroup | None
    """All stages and tensor ranks of one data-parallel replica."""
    description: str
    """This rank in words, for error messages: rank, stage, tensor and data coordinates."""


@dataclass(frozen=True)
class LocalParamState:
    """The elements of one parameter that a rank owns."""

    name: str
    spec: ParameterSpec
    tp_group: TPGroup
    start: int
    """Place of the first of them in the rank's flat shard."""
    values: dict[str, Tensor]
    """'fp32': the values themselves; by the optimizer's names, the moments. Flat, of one length, fp32."""
    step: float | None
    """Updates that the optimizer has counted, if it does."""
    quantized: bool
    """Whether the moments have 8 bits."""


@dataclass(frozen=True)
class ZeroConfig:
    """What the replicas share out among them, and where the optimizer's state lies."""

    zero_stage: int
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """From ZeRO-2 on, where there are replicas: by the name that parameter groups have under 'unit', the
    modules whose gradients, and with ZeRO-3 weights, are shared out."""
    cpu_offload: bool = False
    """Whether master weights and moments are kept, and stepped, in the host's memory."""


class MixedPrecisionOptimizer:
    """Wraps `optimizer` (its groups hold the model's parameters, which become views of flat buffers)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        groups: OptimizerProcessGroups,
        tp_group: TPGroup,
        tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        scaler: LossScaler,
        zero: ZeroConfig,
        clip_grad: float,
    ) -> None:
        """`names`: global name per parameter; `tied`: parameters with copies on other stages, and the group
        of those stages; `clip_grad`: largest global gradient norm, 0 for no clipping."""
        self.optimizer = optimizer
        self.names = names
        self.groups = groups
        self.tp_group = tp_group
        self.scaler = scaler
        self.clip_grad = clip_grad
        self.partition_count = groups.data_size if zero.zero_stage >= 1 else 1
        if zero.zero_stage >= 1:
            # By this name DeepSpeed's engine knows that each data-parallel rank has a part to save.
            self.dp_process_group = groups.data
        # NVIDIA apex's Adam counts its updates in the groups, torch's in the state.
        self._steps_in_groups = type(optimizer).__module__.startswith("apex.")
        self.overflow = False
        self.grad_norm = 0.0
        # Whether a step that is not finite is skipped; None: where a smaller loss scale may help.
        self.skips_non_finite: bool | None = None
        # What a skipped step says of its gradient, where no loss scale explains it.
        self.diagnosis = ""
        # Asked with the grad norm before an update is made, and answered alike on all ranks: is it dropped?
        self.skip_update_fn: Callable[[float], bool] | None = None
        self.update_skipped = False
        # Whether parameters that tensor ranks hold alike get the mean of their values after each step.
        self.averages_replicated = False
        self._norms_before_reduction: Tensor | None = None
        self._loss: Tensor | None = None

        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        self.flat = [self._flat_group(group, zero) for group in optimizer.param_groups]
        for group, flat in zip(optimizer.param_groups, self.flat, strict=True):
            group["params"] = [flat.master]
        self.parameters = [p for flat in self.flat for p in flat.parameters]
        dp_group = groups.data if groups.data_size > 1 else None
        self._reduction = GradientReduction(self.flat, dp_group, tied, tp_group)
        counted = [is_norm_owner(p, tp_group) for p in self.parameters]
        self._counted = torch.tensor(counted, dtype=torch.bool, device=self._device())
        sharded = [flat.shards_gradients for flat in self.flat for _ in flat.parameters]
        self._sharded = torch.tensor(sharded, dtype=torch.bool, device=self._device())
        self._units = [
            ShardedUnit(module, [flat for flat in self.flat if flat.unit == unit], groups.data)
            for unit, module in zero.units.items()
        ]
        for parameter in (p for flat in self.flat if not flat.shards_gradients for p in flat.parameters):
            if parameter.dtype == torch.float32:
                parameter.grad = parameter.main_grad  # autograd accumulates straight into the flat buffer
            else:
                parameter.register_post_accumulate_grad_hook(_accumulate_in_fp32)

    def _flat_group(self, group: dict[str, Any], zero: ZeroConfig) -> FlatGroup:
        in_unit = group.get("unit") in zero.units
        return FlatGroup(
            group,
            self.partition_count,
            self.groups.dp_rank if self.partition_count > 1 else 0,
            shards_gradients=in_unit,
            shards_weights=in_unit and zero.zero_stage == 3,
            master_on_host=zero.cpu_offload and not is_host_memory(group["params"][0].device),
        )

    # --- what DeepSpeed's engine asks of an optimizer ---

    @property
    def param_groups(self) -> list[dict]:
        """The wrapped optimizer's groups: learning rates live here."""
        return self.optimizer.param_groups

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters per group, under the name by which DeepSpeed records their shapes."""
        return [flat.parameters for flat in self.flat]

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Nothing to do: gradients always accumulate until `reduce_gradients`."""

    def zero_grad(self) -> None:
        """Empties the accumulated gradients."""
        for flat in self.flat:
            flat.zero_gradients()

    # --- the step ---

    def register_loss(self, loss: Tensor) -> None:
        """Lets a loss that is not finite stop the step on every rank, even where its gradients are finite.

        loss * 0 is 0 or NaN: as part of a gradient it reaches all replicas without a message of its own.
        """
        self._loss = loss
        if self.flat:
            # The first group is of no unit: its gradients are whole, and summed after this.
            self.flat[0].gradients[:1].add_(loss * 0.0)

    def reduce_gradients(self) -> None:
        """Sums the gradients over all ranks that have parts of them. Called once all micro-batches are
        through, on every stage: what each rank has computed by itself is measured here, to name a culprit
        later."""
        self._norms_before_reduction = self._stacked(
            [n for flat in self.flat for n in flat.unreduced_grad_norms()]
        )
        self._reduction.run()

    @torch.no_grad()
    def step(self) -> None:
        """Clips, steps and spreads the new weights; if the step is `skipped` only the loss scale moves.

        Sets `grad_norm` (of the mean loss, before clipping; inf after an overflow), `overflow` and `refused`.
        Raises NonFiniteError on all ranks when a gradient is not finite and the step must not be skipped.
        """
        # Gradients are sums over data-parallel ranks of the scaled loss: one factor makes them its mean.
        factor = 1.0 / (self.scaler.scale * self.groups.data_size)
        self.grad_norm = self._global_norm() * factor
        self.overflow = not math.isfinite(self.grad_norm)
        self.diagnosis = ""
        if self.overflow:
            scale_helps = self.scaler.can_shrink
            skips = scale_helps if self.skips_non_finite is None else self.skips_non_finite
            if not (skips and scale_helps):
                self.diagnosis = self._diagnosis()
            if not skips:
                raise NonFiniteError(self.diagnosis)
        if self.scaler.dynamic:
            self.scaler.update(self.overflow)
        self.update_skipped = (
            not self.overflow and self.skip_update_fn is not None and self.skip_update_fn(self.grad_norm)
        )
        if self.skipped:
            return
        if self.clip_grad > 0 and self.grad_norm > self.clip_grad:
            factor *= self.clip_grad / (self.grad_norm + 1.0e-6)
        for flat in self.flat:
            flat.set_master_grad(factor)
        self.optimizer.step()
        for flat in self.flat:
            flat.master.grad = None
        if self.averages_replicated:
            average_replicated(self.flat, self.tp_group)
        self._all_gather_params()

    @property
    def skipped(self) -> bool:
        """The last step has left the weights as they were."""
        return self.overflow or self.update_skipped

    def _all_gather_params(self) -> None:
        """Copies this rank's master weights into the model and gathers the other partitions', unless each
        layer does so before it runs."""
        for flat in self.flat:
            flat.copy_master_to_params()
            if self.partition_count > 1 and not flat.shards_weights:
                flat.all_gather_params(self.groups.data).wait()

    @property
    def shards_weights(self) -> bool:
        """Whether between steps some weights are on no rank as a whole."""
        return any(flat.shards_weights for flat in self.flat)

    @contextmanager
    def gathered_params(self, module: nn.Module | None = None) -> Iterator[None]:
        """Within this context the weights of `module` can be read on this rank, by default those of all
        modules. Collective."""
        with ExitStack() as stack:
            for unit in self._units:
                if module is None or unit.module is module:
                    stack.enter_context(unit.gathered_params())
            yield

    def _stacked(self, norms: list[Tensor]) -> Tensor:
        return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=self._device())

    def _global_norm(self) -> float:
        """Norm over the whole model, each parameter counted once; the same bits on all ranks."""
        norms = self._norms_before_reduction
        if self._reduction.exchanges:
            norms = self._stacked([norm for flat in self.flat for norm in flat.local_grad_norms()])
        squares = norms.square()
        if self._units:
            shard_squares = squares * self._sharded
            dist.all_reduce(shard_squares, group=self.groups.data)
            squares = torch.where(self._sharded, shard_squares, squares)
        # Copies that do not count must be finite all the same.
        square = torch.where(self._counted, squares, squares * 0.0).sum()
        if self.groups.model is not None:
            dist.all_reduce(square, group=self.groups.model)
        if self.groups.data_size > 1:
            # Another group may sum in another order, and all copies have to be clipped by one factor.
            dist.broadcast(square, group=self.groups.data, group_src=0)
        total = square.item()  # the step's one wait for the device
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def _device(self) -> torch.device:
        return torch.device(get_accelerator().current_device_name())

    def _diagnosis(self) -> str:
        """Who first had a gradient that is not finite: the same sentence on every rank."""
        finite = self._norms_before_reduction.isfinite().tolist()
        bad = [self.names[p] for p, is_finite in zip(self.parameters, finite, strict=True) if not is_finite]
        report = f"{self.groups.description}: {bad[0]} (and {len(bad) - 1} more)" if bad else None
        if report and self._loss is not None and not self._loss.isfinite():
            report += f", with a loss of {self._loss.item()}"
        reports = [report]
        if dist.is_initialized() and dist.get_world_size() > 1:
            reports = [None] * dist.get_world_size()
            dist.all_gather_object(reports, report)
        culprits = [r for r in reports if r]
        where = "; ".join(culprits[:4]) or "in the sum over ranks only, which overflowed fp32"
        more = f"; and on {len(culprits) - 4} more ranks" if len(culprits) > 4 else ""
        return f"the gradient is not finite, the step was not taken. First bad parameter: {where}{more}"

    # --- moments ---

    def moments_of(self, flat: FlatGroup) -> dict[str, Tensor | QuantizedMoment]:
        """What is kept per element of the group's partition, by the optimizer's names; {} before a step."""
        return {
            key: value
            for key, value in self.optimizer.state.get(flat.master, {}).items()
            if isinstance(value, QuantizedMoment) or (isinstance(value, Tensor) and value.dim() == 1)
        }

    def moment_fragments(self, flat: FlatGroup, parameter: nn.Parameter) -> dict[str, Tensor]:
        """fp32 moments, by the optimizer's names, of what this rank owns of a parameter of the group: flat,
        as long as `flat.fragment(parameter)`. {} where it owns nothing and before the first step.

        Views of the state, or if `flat.quantized` copies, dequantised.
        """
        fragment = flat.fragment(parameter)
        if fragment is None:
            return {}
        return {key: read_moment(moment, *fragment) for key, moment in self.moments_of(flat).items()}

    # --- checkpoints: the layout of DeepSpeed's ZeRO files ---

    def local_param_states(self) -> Iterator[LocalParamState]:
        """What this rank's partitions hold, a parameter at a time."""
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            step = self.optimizer.state.get(flat.master, {}).get("step", group.get("step"))
            for parameter, start, length in flat.fragments():
                values = {"fp32": flat.master.detach()[start : start + length]}
                values |= self.moment_fragments(flat, parameter)
                yield self._local_state(flat, parameter, values, None if step is None else float(step))

    def _local_state(
        self, flat: FlatGroup, parameter: nn.Parameter, values: dict[str, Tensor], step: float | None = None
    ) -> LocalParamState:
        return LocalParamState(
            name=self.names[parameter],
            spec=spec_of(parameter),
            tp_group=self.tp_group,
            start=max(flat.start - parameter.flat_offset, 0),
            values=values,
            step=step,
            quantized=flat.quantized,
        )

    def state_dict(self) -> dict:
        """Moments, fp32 master weights of this rank's partition and where each parameter lies in them."""
        base = self.optimizer.state_dict()
        mappings, masters = [], []
        for index, flat in enumerate(self.flat):
            addresses = OrderedDict()
            packed = 0
            for parameter, _, length in flat.fragments():
                # Without gaps and padding, which DeepSpeed's tools would expect to be others.
                addresses[self.names[parameter]] = fragment_address(start=packed, numel=length)
                packed += length
            if self._steps_in_groups and index in base["state"]:
                base["state"][index] = {**base["state"][index], "step": self.param_groups[index]["step"]}
            moments = self.moments_of(flat)
            if moments:
                packed_moments = {key: flat.without_padding(moment) for key, moment in moments.items()}
                base["state"][index] = {**base["state"][index], **packed_moments}
            mappings.append(addresses)
            masters.append(flat.without_padding(flat.master.detach()))
        return {
            "clip_grad": self.clip_grad,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [0] * len(self.flat),
            "partition_count": [self.partition_count] * len(self.flat),
            "ds_version": deepspeed_version,
            "param_slice_mappings": mappings,
            "loss_scaler": self.scaler.state_dict(),
        }

    def _load_moment(
        self,
        flat: FlatGroup,
        parameter: nn.Parameter,
        key: str,
        elements: Tensor,
        before_rounding: Callable[[LocalParamState], None],
    ) -> None:
        state = self.optimizer.state[flat.master]
        if key not in state:
            state[key] = new_moment(key, flat.master, flat.moment_bits)
        if flat.quantized:
            before_rounding(self._local_state(flat, parameter, {key: elements}))
        (start, _) = flat.fragment(parameter)
        if not write_moment(state[key], start, elements):
            raise RuntimeError(f"{key} of {self.names[parameter]} was not quantised to within one step")

    def _load_others(self, flat: FlatGroup, index: int, name: str, others: dict[str, Any]) -> None:
        """What is kept once for the whole group: the step, wherever the optimizer looks for it."""
        group = self.param_groups[index]
        kept = group if self._steps_in_groups else self.optimizer.state[flat.master]
        # A fused kernel reads its step on the device, others on the CPU.
        device = flat.master.device if group.get("fused") else "cpu"
        for key, value in others.items():
            if self._steps_in_groups and key == "step":
                value = int(value)
            elif isinstance(value, Tensor):
                value = value.to(device, copy=True)
            first = self._first_others.setdefault((index, key), value)
            if float(value) != float(first):
                raise ConfigError(
                    f"the checkpoint says that {name} has made {float(value):g} updates and others "
                    f"beside it {float(first):g}: it is not of one step"
                )
            kept[key] = value

    @torch.no_grad()
    def load_by_name(
        self,
        saved: SavedState,
        loss_scaler: dict | None,
        with_moments: bool,
        before_rounding: Callable[[LocalParamState], None] = lambda part: None,
    ) -> None:
        """Restores values and moments from a checkpoint of any layout, and spreads the weights. Collective.

        loss_scaler: its state, None to begin anew. Without `with_moments` the optimizer begins anew as well.
        before_rounding: gets each moment that will have 8 bits, as it was read. Raises ConfigError where the
        checkpoint's parameters have made unequal numbers of updates.
        """
        self.optimizer.state.clear()
        self._first_others: dict[tuple[int, str], Any] = {}
        for index, flat in enumerate(self.flat):
            for parameter, start, length in flat.fragments():
                offset = max(flat.start - parameter.flat_offset, 0)
                values, moments, others = saved(self.names[parameter], spec_of(parameter), self.tp_group)
                flat.master.data[start : start + length].copy_(values[offset : offset + length])
                del values  # a moment is read when it is asked for: one at a time is in memory
                if with_moments:
                    for key in moments:
                        self._load_moment(
                            flat, parameter, key, moments[key][offset : offset + length], before_rounding
                        )
                    self._load_others(flat, index, self.names[parameter], others)
        if loss_scaler is not None:
            self.scaler.load_state_dict(loss_scaler)
        self._all_gather_params()


def _accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Hook: adds a micro-batch's 16-bit gradient to the fp32 sum and lets go of it.

    There is none where all of it has come in fp32 already: the head's, from the fused loss.
    """
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
