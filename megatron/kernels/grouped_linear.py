"""Products of groups of rows with the matrix of each group's expert.

Rows [N, n] are sorted by expert; expert e has `counts[e]` rows, possibly none. A linear layer of experts
needs three products. `multiply_groups` computes the output and, with transposed matrices, the gradient of the
input. `multiply_within_groups` computes the gradient of the matrices. `sum_groups` computes the gradient of
the biases.

`implementation` chooses one of three, by the device, the dtype and the addresses:

    mm          a loop over the experts: the reference, and always used for fp32
    grouped_mm  torch's grouped product, for bf16 and fp16 if no kernel runs
    triton      kernels, for bf16 and fp16. They can also add the gradient of the matrices to an fp32 sum

No implementation makes the host wait for the device: the host has the counts, the device their cumulative
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.kernels.operators import Launch, is_in_torch_dispatch_mode, operator
from megatron.kernels.selection import uses_kernels

BLOCK_ROWS = 128
# Tiles for inner sizes that are multiples of 16, and for other sizes, whose elements are loaded one by one.
# With these tiles no kernel, compiled for sm_80 or sm_90, spills a register.
TILES = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLUMNS": 128, "BLOCK_INNER": 64}
UNALIGNED_TILES = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLUMNS": 32, "BLOCK_INNER": 32}
OPTIONS = {"num_warps": 8, "num_stages": 3}
SUM_TILES = {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 64}

# torch's grouped product needs addresses and row sizes that are multiples of this number of bytes.
_ALIGNMENT = 16


@dataclass
class Groups:
    """The number of rows of each expert, on the host. The rows are stored in the order of the experts."""

    counts: tuple[int, ...]
    _offsets: Tensor | None = None

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Yields (expert, its rows) for each expert that has rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    def row_tiles(self) -> int:
        """Returns the number of row tiles that the kernels compute."""
        return sum(-(-count // BLOCK_ROWS) for count in self.counts)

    def offsets(self, device: torch.device) -> Tensor:
        """Returns the end of each expert's rows, int32 [experts]. The first call copies the ends to the
        device asynchronously from pinned memory."""
        if self._offsets is None or self._offsets.device.type != device.type:
            ends = torch.tensor(self.counts, dtype=torch.int64).cumsum(0).int()
            self._offsets = get_accelerator().pin_memory(ends).to(device, non_blocking=True)
        return self._offsets


def multiply_groups(
    x: Tensor, matrices: Tensor, bias: Tensor | None, groups: Groups, transposed: bool = False
) -> Tensor:
    """Returns x_e @ matrices[e].T + bias[e] for the rows x_e of each expert e; with transposed, x_e @
    matrices[e].

    x: [N, k]. matrices: [experts, n, k], or with transposed [experts, k, n]. bias: [experts, n]. All are
    contiguous.
    """
    chosen = implementation(x, matrices)
    if chosen == "triton":
        offsets = groups.offsets(x.device)
        return multiply_groups_op(x, matrices, bias, offsets, groups.row_tiles(), transposed)
    factors = matrices if transposed else matrices.transpose(1, 2)
    if chosen == "grouped_mm" and bias is None:  # F.grouped_mm supports no bias
        return F.grouped_mm(x, factors, offs=groups.offsets(x.device))
    out = _product(x, matrices, transposed)
    for expert, rows in groups.rows():
        if bias is None:
            torch.mm(x[rows], factors[expert], out=out[rows])
        else:
            torch.addmm(bias[expert], x[rows], factors[expert], out=out[rows])
    return out


def adds_products(a: Tensor, b: Tensor) -> bool:
    """Returns whether `add_products_within_groups` supports these contiguous tensors."""
    return implementation(a, b) == "triton"


def add_products_within_groups(total: Tensor, a: Tensor, b: Tensor, groups: Groups, beta: float) -> None:
    """Computes total = beta total + `multiply_within_groups`, without rounding the product. total: fp32
    [experts, n, k], contiguous. beta: 0 or 1; with 0 `total` is not read."""
    add_products_within_groups_op(total, a, b, groups.offsets(a.device), beta=beta)


def multiply_within_groups(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """Returns a_e.T @ b_e, [experts, n, k], for the rows a_e and b_e of each expert e. It is zero for experts
    without rows.

    a: [N, n]. b: [N, k]. Both are contiguous.
    """
    chosen, offsets = implementation(a, b), groups.offsets
    if chosen == "triton":
        return multiply_within_groups_op(a, b, offsets(a.device))
    if chosen == "grouped_mm":
        return F.grouped_mm(a.t(), b, offs=offsets(a.device))
    out = a.new_zeros(len(groups.counts), a.shape[1], b.shape[1])
    for expert, rows in groups.rows():
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def sum_groups(x: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the rows of each expert, [experts, n]; zero for experts without rows. x: [N, n],
    contiguous."""
    if implementation(x) == "triton":
        return sum_groups_op(x, groups.offsets(x.device))
    out = x.new_zeros(len(groups.counts), x.shape[1])
    for expert, rows in groups.rows():
        torch.sum(x[rows], 0, out=out[expert])
    return out


# --- Selection ---


def implementation(*factors: Tensor) -> Literal["mm", "grouped_mm", "triton"]:
    """Returns the implementation that multiplies these contiguous tensors."""
    first = factors[0]
    if first.dtype not in (torch.bfloat16, torch.float16):
        return "mm"
    if uses_kernels(first):
        return "triton"
    if is_in_torch_dispatch_mode():  # torch's grouped product has no FLOP formula
        return "mm"
    addresses_and_rows = [n for x in factors for n in (x.data_ptr(), x.shape[-1] * x.element_size())]
    is_aligned = not any(n % _ALIGNMENT for n in addresses_and_rows)
    return "grouped_mm" if len(first) and is_aligned and _has_grouped_mm(first.device, first.dtype) else "mm"


@lru_cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch's grouped product runs on the device. Its documentation promises only bf16, on
    GPUs of compute capability 8.0 or newer."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    offsets = torch.tensor([16], dtype=torch.int32, device=device)
    try:
        product = F.grouped_mm(ones, ones[None], offs=offsets)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):
        return False
    return bool((product == 16).all())


# --- Operators that launch the kernels of `grouped_triton`. offsets: see `Groups`. ---


@operator("multiply_groups")
def multiply_groups_op(
    x: Tensor, matrices: Tensor, bias: Tensor | None, offsets: Tensor, row_tiles: int, transposed: bool
) -> Tensor:
    """Runs `multiply_groups` in a Triton kernel. row_tiles: see `Groups`."""
    out = _product(x, matrices, transposed)
    launch = _multiply_launch(len(offsets), out.shape[1], x.shape[1], transposed)
    grid = (row_tiles * -(-out.shape[1] // launch.numbers["BLOCK_COLUMNS"]), 1)
    launch(x, matrices, bias, out, offsets, grid=grid)
    return out


def _product(x: Tensor, matrices: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(len(x), matrices.shape[2 if transposed else 1])


@operator("multiply_within_groups")
def multiply_within_groups_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Runs `multiply_within_groups` in a Triton kernel."""
    out = a.new_empty(len(offsets), a.shape[1], b.shape[1])
    _within_launch(len(offsets), *out.shape[1:], ADD=False)(a, b, out, offsets)
    return out


@operator("add_products_within_groups", mutates_args=("total",))
def add_products_within_groups_op(
    total: Tensor, a: Tensor, b: Tensor, offsets: Tensor, *, beta: float
) -> None:
    """Runs `add_products_within_groups` in a Triton kernel."""
    _within_launch(*total.shape, ADD=beta != 0.0)(a, b, total, offsets)


@operator("sum_groups")
def sum_groups_op(x: Tensor, offsets: Tensor) -> Tensor:
    """Runs `sum_groups` in a Triton kernel."""
    out = x.new_empty(len(offsets), x.shape[1])
    _sum_launch(*out.shape)(x, out, offsets)
    return out


@lru_cache(maxsize=1024)
def _multiply_launch(experts: int, columns: int, inner: int, transposed: bool) -> Launch:
    """Returns a launch without a grid, since the number of row tiles differs from step to step."""
    tiles = _tiles(columns, inner)
    return Launch(
        "grouped_triton.multiply_groups_kernel",
        None,
        OPTIONS,
        experts=experts,
        columns=columns,
        inner=inner,
        TRANSPOSED=transposed,
        EVEN=inner % tiles["BLOCK_INNER"] == 0,
        BLOCK_EXPERTS=max(1 << (experts - 1).bit_length(), 16),
        **tiles,
    )


@lru_cache
def _within_launch(experts: int, rows: int, columns: int, ADD: bool) -> Launch:
    tiles = _tiles(rows, columns)
    grid = (experts * -(-rows // tiles["BLOCK_ROWS"]) * -(-columns // tiles["BLOCK_COLUMNS"]), 1)
    numbers = {"rows": rows, "columns": columns, "ADD": ADD, **tiles}
    return Launch("grouped_triton.multiply_within_groups_kernel", grid, OPTIONS, **numbers)


def _tiles(*lengths: int) -> dict[str, int]:
    return UNALIGNED_TILES if any(length % 16 for length in lengths) else TILES


@lru_cache
def _sum_launch(experts: int, columns: int) -> Launch:
    grid = (-(-columns // SUM_TILES["BLOCK_COLUMNS"]), experts)
    return Launch("grouped_triton.sum_groups_kernel", grid, {"num_warps": 4}, columns=columns, **SUM_TILES)


@register_flop_formula(torch.ops.megatron.multiply_groups)
def _multiply_flops(x_shape: torch.Size, matrices_shape: torch.Size, *_others: Any, **_: Any) -> int:
    return 2 * x_shape[0] * matrices_shape[1] * matrices_shape[2]


@register_flop_formula(torch.ops.megatron.multiply_within_groups)
def _within_flops(a_shape: torch.Size, b_shape: torch.Size, *_others: Any, **_: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


@register_flop_formula(torch.ops.megatron.add_products_within_groups)
def _add_flops(total_shape: torch.Size, a_shape: torch.Size, *_others: Any, **_: Any) -> int:
    return 2 * a_shape[0] * total_shape[1] * total_shape[2]
