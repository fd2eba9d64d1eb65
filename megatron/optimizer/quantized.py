"""Block-wise 8-bit quantization of optimizer moments, in bitsandbytes' format (arXiv 2110.02861).

A block of 256 elements is stored as one fp32 scale, which is the largest magnitude in the block, and one
8-bit code per element. A code is an index into a map of 256 values in [-1, 1]. An element is its map value
times the scale.

bitsandbytes is imported on first use, because its import takes seconds.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

# Elements per block. bitsandbytes' optimizer kernels support only this number.
BLOCK_SIZE = 256
# The map of each moment. The second moment is a mean of squares, so its map has no negative values.
MAPS = {"exp_avg": "dynamic, signed", "exp_avg_sq": "dynamic, unsigned"}
# On load, moments are quantized this many blocks at a time, which bounds the memory.
_BLOCKS_AT_ONCE = 2**14


@cache
def kernels() -> ModuleType:
    """Returns `bitsandbytes.functional`. Raises ImportError if it is not installed."""
    # This hides a warning about the speed of 4-bit products, which training does not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def code_values(moment: str, device: torch.device) -> Tensor:
    """Returns the map of 'exp_avg' or 'exp_avg_sq': 256 ascending values in [-1, 1]."""
    values: Tensor = kernels().create_dynamic_map(signed=MAPS[moment] == "dynamic, signed")
    return values.to(device)


class QuantizedMoment:
    """An 8-bit moment of a flat partition, in which parameters start at multiples of BLOCK_SIZE.

    codes: uint8 [elements]. scales: fp32 [blocks]. values: the map, fp32 [256].
    """

    def __init__(self, moment: str, elements: int, device: torch.device) -> None:
        """Makes a moment of zeros. moment: 'exp_avg' or 'exp_avg_sq'; it selects the map."""
        self.codes = torch.zeros(elements, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(-(-elements // BLOCK_SIZE), dtype=torch.float32, device=device)
        self.values = code_values(moment, device)

    def read(self, start: int, length: int) -> Tensor:
        """Returns the elements start to start + length - 1 in fp32. start: a multiple of BLOCK_SIZE."""
        codes, scales = self.part(start, length)
        restored: Tensor = kernels().dequantize_blockwise(
            codes, absmax=scales, code=self.values, blocksize=BLOCK_SIZE
        )
        return restored

    def write(self, start: int, elements: Tensor) -> None:
        """Quantizes fp32 `elements`, and stores them from `start` on, which is a multiple of BLOCK_SIZE. The
        rest of the last block, which is padding before the next parameter, becomes zero."""
        codes, scales = self.part(start, -(-elements.numel() // BLOCK_SIZE) * BLOCK_SIZE)
        padded = elements.new_zeros(codes.numel(), device=codes.device)
        padded[: elements.numel()] = elements
        new_codes, new_scales = quantize(padded, self.values)
        codes.copy_(new_codes)
        scales.copy_(new_scales)

    def is_within_one_step(self, start: int, elements: Tensor) -> bool:
        """Returns whether the stored elements from `start` on are within one quantization step of `elements`
        (fp32). The step of a code is the larger distance to its two neighbors in the map, times the scale."""
        gaps = self.values.diff()
        steps = torch.maximum(torch.cat((gaps[:1], gaps)), torch.cat((gaps, gaps[-1:])))
        codes, scales = self.part(start, elements.numel())
        bound = steps[codes.int()] * scales.repeat_interleave(BLOCK_SIZE)[: codes.numel()]
        return bool(((self.read(start, elements.numel()) - elements.to(codes.device)).abs() <= bound).all())

    def part(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns views of the codes of these elements and of the scales of their blocks."""
        first, last = start // BLOCK_SIZE, -(-(start + length) // BLOCK_SIZE)
        return self.codes[start : start + length], self.scales[first:last]


def quantize(elements: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of complete blocks of fp32 elements.

    Invariant: elements that were dequantized give their original codes and scales, so a save and a load
    change nothing. bitsandbytes' function does not guarantee this. On CPUs it does not always find the
    nearest value close to zero. Also, the signed map ends at 1.0 and at -0.993: if the element of the largest
    magnitude in a block is negative, its dequantized value is 0.7 % smaller than the scale. If this value
    became the new scale, the block would shrink at every save and load. `_find_negative_scales` recovers the
    original scale.
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
    """Returns int32 codes [blocks, elements] for rows [blocks, elements] and scales [blocks]."""
    thresholds = (values[1:] + values[:-1]) / 2
    ratios = (rows / scales[:, None]).nan_to_num_(0.0)  # a block of zeros has a scale of zero
    return torch.bucketize(ratios, thresholds, out_int32=True)


def _find_negative_scales(rows: Tensor, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Recovers the scale of blocks whose element of the largest magnitude is the negative end of the map.

    If a scale near largest / 0.993 reproduces all elements of a block exactly, its codes [blocks, BLOCK_SIZE]
    and its scale [blocks] are replaced in place.
    """

    def exact(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return (values[codes.int()] * scales[:, None] == rows).all(dim=1)

    blocks = (~exact(rows, codes, scales) & (rows.amin(dim=1) == -scales)).nonzero().squeeze(1)
    guesses = scales[blocks] / -values[0]
    # The element is the rounded product of the scale and the end of the map. So the quotient is the scale, to
    # within two units in the last place.
    for units in (0, -1, 1, -2, 2):
        candidates = (guesses.view(torch.int32) + units).view(torch.float32)
        # First a few elements of each block are compared. They exclude most blocks that were never quantized.
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
    """Returns fp32 elements of a moment: a view if it is 32-bit, a dequantized copy if it is 8-bit."""
    if isinstance(moment, QuantizedMoment):
        return moment.read(start, length)
    return moment[start : start + length]


def write_moment(moment: Tensor | QuantizedMoment, start: int, elements: Tensor) -> bool:
    """Writes `elements` into the moment. Returns False if quantization changed an element by more than one
    step."""
    if isinstance(moment, QuantizedMoment):
        moment.write(start, elements)
        return moment.is_within_one_step(start, elements)
    moment[start : start + elements.numel()].copy_(elements)
    return True
