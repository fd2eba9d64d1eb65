"""How each parameter's moments are really kept, read off the tensors and held against the rule for 8 bits."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from megatron.cluster.exit_codes import RunStopped
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import moment_bits
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.quantized import BLOCK_SIZE, QuantizedMoment


@dataclass(frozen=True)
class MomentStorage:
    """expected: bits by the rule; found: bits per element of each kind of tensor that holds moments; whole:
    elements of the whole parameter; elements, state_bytes: of what the ranks hold, copies counted."""

    expected: int
    found: frozenset[int]
    whole: int
    elements: int
    state_bytes: int


def describe_moments(optimizer: MixedPrecisionOptimizer) -> str:
    """A table of all parameters by the bits of their moments, for an optimizer that has taken a step.

    Collective. RunStopped on every rank, with the name, if a parameter's moments are not what the rule says.
    """
    everywhere: list[dict[str, MomentStorage]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, local_moments(optimizer))
    merged: dict[str, MomentStorage] = {}
    for here in everywhere:
        for name, part in here.items():
            merged[name] = _sum(merged[name], part) if name in merged else part
    for name, moments in merged.items():
        if moments.found != {moments.expected}:
            found = " and ".join(str(bits) for bits in sorted(moments.found)) or "no"
            raise RunStopped(
                f"the moments of {name} have {found} bits per element, the rule of --use-bnb-optimizer says "
                f"{moments.expected}: this is a mistake in the program, train without the flag"
            )
    lines = ["moments, as the first step has left them:"]
    for bits in sorted({moments.expected for moments in merged.values()}):
        lines += _rows(bits, {name: m for name, m in merged.items() if m.expected == bits})
    return "\n".join(lines)


def local_moments(optimizer: MixedPrecisionOptimizer) -> dict[str, MomentStorage]:
    """By name, of the parameters of which this rank holds moments."""
    result = {}
    for flat in optimizer.flat:
        for parameter, start, length in flat.fragments():
            # Of each moment its elements, then, if they are quantised, the scales.
            moments = [_tensors(m, start, length) for m in optimizer.moments_of(flat).values()]
            name, spec = optimizer.names[parameter], spec_of(parameter)
            result[name] = MomentStorage(
                expected=moment_bits(name, spec),
                found=frozenset(8 * elements.element_size() for elements, *_ in moments),
                whole=math.prod(spec.global_shape),
                elements=length,
                state_bytes=sum(tensor.nbytes for moment in moments for tensor in moment),
            )
    return result


def _tensors(moment: Tensor | QuantizedMoment, start: int, length: int) -> tuple[Tensor, ...]:
    if isinstance(moment, QuantizedMoment):
        return moment.part(start, length)
    return (moment[start : start + length],)


def _sum(one: MomentStorage, other: MomentStorage) -> MomentStorage:
    return replace(
        one,
        found=one.found | other.found,
        elements=one.elements + other.elements,
        state_bytes=one.state_bytes + other.state_bytes,
    )


def _rows(bits: int, parameters: dict[str, MomentStorage]) -> list[str]:
    elements = sum(moments.whole for moments in parameters.values())
    held = sum(moments.elements for moments in parameters.values())
    per_element = sum(moments.state_bytes for moments in parameters.values()) / held
    blocks = f", in blocks of {BLOCK_SIZE}" if bits == 8 else ""
    head = (
        f"  {bits:2d} bits | {len(parameters):4,d} parameters | {elements:14,d} elements | "
        f"{per_element:.3f} bytes per element for both moments{blocks}"
    )
    names = textwrap.wrap(", ".join(_summarised(parameters)), width=100, break_on_hyphens=False)
    return [head, *(f"          {line}" for line in names)]


def _summarised(names: Iterable[str]) -> list[str]:
    """Names with the layer's number left out, and how many layers have one."""
    counts = Counter(re.sub(r"^\d+\.", "*.", name) for name in names)
    return [f"{name} x {count}" if count > 1 else name for name, count in counts.items()]
