"""Moments of 8 bits an element: bitsandbytes' codes, and one fp32 scale per block.

A block of 256 elements is stored as its largest magnitude (the scale) and for each element the nearest of the
256 values of a map, times that scale (Dettmers et al., 2021, "8-bit Optimizers via Block-wise Quantization").
bitsandbytes is loaded by the runs that use it, on first use: that takes seconds.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

# Elements per block: bitsandbytes' kernels for the optimizer know no other number.
BLOCK_SIZE = 256
# By the moment's name. The second moment is a mean of squares, so that its codes need no sign.
MAPS = {"exp_avg": "dynamic, signed", "exp_avg_sq": "dynamic, unsigned"}
# What is quantised anew on load is looked at this many blocks at a time, which bounds the memory it takes.
_BLOCKS_AT_ONCE = 2**14


@cache
def kernels() -> ModuleType:
    """`bitsandbytes.functional`; ImportError where it is not installed."""
    # It warns that a 4-bit product could be faster, which training does not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def code_values(moment: str, device: torch.device) -> Tensor:
    """The 256 ascending values in [-1, 1] that the codes of 'exp_avg' or 'exp_avg_sq' stand for."""
    values: Tensor = kernels().create_dynamic_map(signed=MAPS[moment] == "dynamic, signed")
    return values.to(device)


class QuantizedMoment:
    """One moment of a flat partition, whose parameters begin at multiples of BLOCK_SIZE.

    codes: uint8 [elements]; scales: fp32 [blocks]; values: what the codes stand for, fp32 [256].
    """

    def __init__(self, moment: str, elements: int, device: torch.device) -> None:
        """All zeros. moment: 'exp_avg' or 'exp_avg_sq', which decides on the map."""
        self.codes = torch.zeros(elements, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(-(-elements // BLOCK_SIZE), dtype=torch.float32, device=device)
        self.values = code_values(moment, device)

    def read(self, start: int, length: int) -> Tensor:
        """Elements start to start + length - 1 in fp32. start: a multiple of BLOCK_SIZE."""
        codes, scales = self.part(start, length)
        restored: Tensor = kernels().dequantize_blockwise(
            codes, absmax=scales, code=self.values, blocksize=BLOCK_SIZE
        )
        return restored

    def write(self, start: int, elements: Tensor) -> None:
        """Quantises fp32 `elements` into those from `start`, a multiple of BLOCK_SIZE. What is left of the
        last block becomes zero: it is the gap before the next parameter."""
        codes, scales = self.part(start, -(-elements.numel() // BLOCK_SIZE) * BLOCK_SIZE)
        padded = elements.new_zeros(codes.numel(), device=codes.device)
        padded[: elements.numel()] = elements
        new_codes, new_scales = quantize(padded, self.values)
        codes.copy_(new_codes)
        scales.copy_(new_scales)

    def is_within_one_step(self, start: int, elements: Tensor) -> bool:
        """Whether each of the elements from `start` is as near to `elements` (fp32) as the map allows: no
        farther than its code's larger distance to a neighbour, times the scale."""
        gaps = self.values.diff()
        steps = torch.maximum(torch.cat((gaps[:1], gaps)), torch.cat((gaps, gaps[-1:])))
        codes, scales = self.part(start, elements.numel())
        bound = steps[codes.int()] * scales.repeat_interleave(BLOCK_SIZE)[: codes.numel()]
        return bool(((self.read(start, elements.numel()) - elements.to(codes.device)).abs() <= bound).all())

    def part(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """The codes of these elements and the scales of their blocks, as views."""
        first, last = start // BLOCK_SIZE, -(-(start + length) // BLOCK_SIZE)
        return self.codes[start : start + length], self.scales[first:last]


def quantize(elements: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of whole blocks of fp32 elements; those that were quantised before come back exactly.

    bitsandbytes' own function does not promise that. On CPUs it misses the nearest value close to zero. And
    the signed map ends at 1.0 and at -0.993, so of a block whose largest magnitude is negative that element
    comes back 0.7 % smaller, and would be taken for the scale: each save and load would shrink half of the
    blocks. Here the scale is found again from the element.
    """
    rows = elements.view(-1, BLOCK_SIZE)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    for first in range(0, len(rows), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        scales[part] = rows[part].abs().amax(dim=1)
        codes[part] = _nearest(rows[part], scales[part], values)
        if values[0] < 0:
            _find_negative_scales(rows[part], codes[part], scales[part], values)
    return codes.view(-1), scales


def _nearest(rows: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """int32 codes [blocks, elements] of rows [blocks, elements] for scales [blocks]."""
    thresholds = (values[1:] + values[:-1]) / 2
    ratios = (rows / scales[:, None]).nan_to_num_(0.0)  # blocks of zeros have a scale of zero
    return torch.bucketize(ratios, thresholds, out_int32=True)


def _find_negative_scales(rows: Tensor, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Replaces codes [blocks, BLOCK_SIZE] and scales [blocks], in place, for those blocks whose elements, to
    the last bit, are multiples of another scale: one of which the largest magnitude is the map's negative
    end."""

    def exact(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return (values[codes.int()] * scales[:, None] == rows).all(dim=1)

    blocks = (~exact(rows, codes, scales) & (rows.amin(dim=1) == -scales)).nonzero().squeeze(1)
    guesses = scales[blocks] / -values[0]
    # The element is the scale times the map's end, rounded: so the scale is known to two units in the last
    # place.
    for units in (0, -1, 1, -2, 2):
        candidates = (guesses.view(torch.int32) + units).view(torch.float32)
        # A few elements first: they rule out the blocks that never were quantised.
        few = rows[blocks, ::16]
        likely = exact(few, _nearest(few, candidates, values), candidates)
        tried, candidates = blocks[likely], candidates[likely]
        found_codes = _nearest(rows[tried], candidates, values)
        found = exact(rows[tried], found_codes, candidates)
        codes[tried[found]] = found_codes[found].to(torch.uint8)
        scales[tried[found]] = candidates[found]
        left = torch.isin(blocks, tried[found], invert=True)
        blocks, guesses = blocks[left], guesses[left]


def read_moment(moment: Tensor | QuantizedMoment, start: int, length: int) -> Tensor:
    """fp32 elements of a moment, kept in 32 bits (a view) or in 8 (a copy)."""
    if isinstance(moment, QuantizedMoment):
        return moment.read(start, length)
    return moment[start : start + length]


def write_moment(moment: Tensor | QuantizedMoment, start: int, elements: Tensor) -> bool:
    """Whether the elements are there now, as exactly as the moment is kept."""
    if isinstance(moment, QuantizedMoment):
        moment.write(start, elements)
        return moment.is_within_one_step(start, elements)
    moment[start : start + elements.numel()].copy_(elements)
    return True
