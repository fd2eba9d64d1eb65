"""Weights of 4 bits in blocks with a common scale (MXFP4, OCP Microscaling Formats 1.0). The files of gpt-oss
store them as `NAME_blocks` and `NAME_scales` instead of `NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.checkpoint.huggingface.importer import StoredWeight

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = 16
"""Bytes of a block. Each byte has two values; the first value is in the lower four bits."""


def with_unpacked(stored: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Returns the weights, in which one matrix replaces each pair of blocks and scales."""
    found = dict(stored)
    for name, blocks in stored.items():
        scales = stored.get(f"{name.removesuffix('_blocks')}_scales")
        if name.endswith("_blocks") and scales is not None and _fit(blocks, scales):
            del found[name], found[f"{name.removesuffix('_blocks')}_scales"]
            experts, rows, groups, _ = blocks.shape

            def read(blocks: StoredWeight = blocks, scales: StoredWeight = scales) -> Tensor:
                pairs = zip(blocks.read(), scales.read(), strict=True)
                return torch.stack([_unpacked(*pair) for pair in pairs])

            shape = (experts, groups * 2 * _BYTES, rows)
            found[name.removesuffix("_blocks")] = replace(
                blocks, shape=shape, dtype=torch.bfloat16, read=read
            )
    return found


def _fit(blocks: StoredWeight, scales: StoredWeight) -> bool:
    is_packed = blocks.dtype == scales.dtype == torch.uint8 and len(blocks.shape) == 4
    return is_packed and blocks.shape[-1] == _BYTES and tuple(scales.shape) == tuple(blocks.shape[:-1])


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the values in bf16, [32 x groups, rows]. blocks: [rows, groups, 16] bytes. scales: [rows,
    groups] exponents of 2, plus 127."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    values = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return values.ldexp((scales.int() - 127).unsqueeze(-1)).flatten(-2).t()
