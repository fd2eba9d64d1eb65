"""The classes of programs, and the constants that describe them.

A class stands for all versions of its programs. `benchmarks/planner_accuracy.py --fit` fits the constants
that `benchmarks.published_programs.fitting` lists; the others are what the programs' sources say, or
assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_programs.layer_passes import ATTENTION, EVERY_SECOND_PRODUCT, OTHERS
from benchmarks.published_programs.shapes import HostTime, MemoryUse, Program
from megatron.planner.rates import RATES, Rates

MEGATRON_2021 = Program(
    name="megatron 2021",
    attention=None,
    memory=MemoryUse(weight=2, optimizer=12, logit=14),
    traffic=1.13,
    launch_s=12e-6,
    gradient=2,
    reduced=2,
    all_reduces=True,
    data_rate=0.52,
    tensor_latency_s=1.1e-3,
)
"""BigScience's Megatron-DeepSpeed: a fused kernel for the masked softmax, none for attention; all collectives
are exposed. `benchmarks.published_rows` describes its memory."""

TRANSFORMER_ENGINE = Program(
    name="transformer engine",
    attention=("flash", "cudnn"),
    memory=MemoryUse(weight=2, optimizer=12, logit=10),
    traffic=1.62,
    fused=True,
    logit=20,
    selective=frozenset({ATTENTION}),
    adds_gradients=True,
    overlaps_reduction=True,
    hides_input_gradient=True,
)
"""Megatron-Core, NeMo and Megatron-Bridge: fused kernels, cuDNN attention from Hopper on, a distributed
optimizer whose collectives overlap. Context parallelism exchanges keys and values during attention, which is
assumed to hide the exchange."""

XLA = Program(
    name="xla",
    attention=("flash", "cudnn"),
    memory=MemoryUse(weight=0, optimizer=12, logit=6),
    traffic=1.62,
    fused=True,
    logit=12,
    launch_s=1e-6,
    selective=frozenset({OTHERS}),
    reduced=2,
    shards_weights=True,
)
"""MaxText and Pax with sharded weights: compiled steps, Transformer Engine's attention."""

FSDP_EAGER = Program(
    name="fsdp eager",
    attention=("triton", "triton"),
    memory=MemoryUse(weight=0, optimizer=12, logit=14),
    traffic=1.55,
    attention_rate=(0.71, 0.56),
    selective=frozenset({OTHERS}),
    reduced=2,
    shards_weights=True,
)
"""MosaicML's llm-foundry: eager PyTorch 2, FSDP, the first Triton kernel of FlashAttention."""

FSDP_COMPILED = Program(
    name="fsdp compiled",
    attention=("flash", "flash"),
    memory=MemoryUse(weight=0, optimizer=12, logit=14),
    traffic=1.62,
    fused=True,
    logit=20,
    selective=frozenset({OTHERS, EVERY_SECOND_PRODUCT}),
    shards_weights=True,
    hides_input_gradient=True,
)
"""torchtitan: FSDP2, layers that torch.compile has compiled, PyTorch's FlashAttention; selective
recomputation keeps every second product. Its eager runs have norms and rotations of fp32 operations."""

NANOTRON = Program(
    name="nanotron",
    attention=("flash", "flash"),
    memory=MemoryUse(weight=3, optimizer=13, logit=14, inner=12),
    traffic=1.62,
    launch_s=5e-6,
    hides_input_gradient=True,
    host=HostTime(layer_s=4.2e-3, tensor_s=1.4e-5, pipeline_s=2.5e-3, update_s=8.2e-3, stall_s=1.2),
)
"""nanotron: eager PyTorch, FlashAttention, tensor parallelism with sequence parallelism, 1F1B, ZeRO-1. Its
host times describe one sweep on one cluster."""

PROGRAMS = {
    program.name: program
    for program in (MEGATRON_2021, TRANSFORMER_ENGINE, XLA, FSDP_EAGER, FSDP_COMPILED, NANOTRON)
}


@dataclass(frozen=True)
class Constants:
    """The constants of a prediction.

    limited_products: the fraction of `Rates.products` that an H100 reaches at 500 W instead of 700 W.
    """

    rates: dict[str, Rates]
    programs: dict[str, Program]
    limited_products: float

    def get(self, name: str) -> float:
        """Returns the constant 'GPU.FIELD', 'PROGRAM.FIELD', 'PROGRAM.FIELD.INDEX', 'PROGRAM.host.FIELD' or
        'constants.FIELD'; of 'h100+h200.FIELD' the first."""
        owner, _, path = name.partition(".")
        first = owner.partition("+")[0]
        value: Any = self if owner == "constants" else (self.rates | self.programs)[first]
        for part in path.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        return float(value)

    def with_value(self, name: str, value: float) -> Constants:
        """Returns these constants with a new value of one of them. 'h100+h200.FIELD' sets it for both."""
        owners, _, path = name.partition(".")
        if owners == "constants":
            return replace(self, limited_products=value)
        changed = {
            owner: _changed((self.rates | self.programs)[owner], path, value) for owner in owners.split("+")
        }
        rates = self.rates | {key: new for key, new in changed.items() if isinstance(new, Rates)}
        programs = self.programs | {key: new for key, new in changed.items() if isinstance(new, Program)}
        return replace(self, rates=rates, programs=programs)


def _changed(owner: Any, path: str, value: float) -> Any:
    field, _, rest = path.partition(".")
    old = getattr(owner, field)
    if rest.isdigit():
        new: Any = (*old[: int(rest)], value, *old[int(rest) + 1 :])
    else:
        new = _changed(old, rest, value) if rest else value
    return replace(owner, **{field: new})


IN_USE = Constants(RATES, PROGRAMS, limited_products=0.76)
