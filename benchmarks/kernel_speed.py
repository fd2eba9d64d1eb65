#!/usr/bin/env python3
"""Checks the Triton kernels against fp64, times them, and searches the tiles of attention.

    python benchmarks/kernel_speed.py check     errors of each kernel and of PyTorch's operations in its dtype
    python benchmarks/kernel_speed.py time      each kernel, its reference and a library's function; attention
    python benchmarks/kernel_speed.py tiles     times of the attention kernels with other tiles

On a GPU, `check` takes a minute, and `time` and `tiles` take three minutes each. --small uses small tensors.
A row that the folder of --out already has is not computed again, so after an error of the device (exit code
3) the next start continues. On a machine without a GPU, Triton's interpreter computes small tensors:

    TRITON_INTERPRET=1 MEGATRON_KERNELS=interpreter python benchmarks/kernel_speed.py check --small

check: `error` is the largest ||found - exact|| / ||exact|| of outputs and gradients, where `exact` is the
reference in fp64 with equal inputs. It must be within the bound of the dtype, or within twice the error of
the reference in the kernel's dtype, but never above ten times the bound.

time: the tensors have the sizes of a layer of a 13B model in bf16: sequence 2048, hidden size 5120, 40 heads,
vocabulary 50,304. Times are medians of forward and backward pass together, by `triton.testing.do_bench`,
which clears the cache of the GPU between calls. `rate` counts the bytes that must be read and written once.
For attention it counts the FLOPs of the causal half, including FLOPs that document masks skip; the backward
pass counts 2.5 times the forward pass. A second table compares implementations of attention without dropout,
which compute equal values.

tiles: times of causal attention with dropout 0.1 in bf16, with heads of 64 and 128. A run never searches
tiles, because a different tile adds in a different order.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernel_cases import TILES, Case, Inputs, Sizes, cases
from benchmarks.machine import add_row, benchmark_parser, describe_machine, device_is_lost, read_rows
from megatron.cluster.launch import temporary_environment
from megatron.kernels import attention
from megatron.kernels.attention import AttentionMask, Tiles, flash_attention
from megatron.kernels.selection import forget_decisions, reason_against_kernels
from megatron.kernels.windowed_attention import windowed_attention
from megatron.model.position import AttentionMasks, alibi_slopes, document_ids_of

TIMED = Sizes(2048, 40, 128, 50304, 1024, (5120, 5120 * 5120, 4 * 5120 * 5120) * 8)
CHECKED = Sizes(1024, 8, 64, 50304, 512, (7, 5000, 3_000_001))
SMALL = Sizes(40, 2, 16, 100, 24, (7, 5000, 300))
HEAD_DIMS = (64, 128, 80, 96)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Dtype -> largest error of a correct kernel. 16-bit values are rounded to 8 or 11 bits.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMALL_TILES = {"forward": [(16, 16, 4, 1)], "query": [(32, 16, 4, 1)], "key": [(16, 32, 4, 1)]}
KINDS = ("causal", "causal, heads share keys", "window", "documents", "ALiBi")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of query [seq, 1, heads, head_dim], key and value [seq, 1, groups, head_dim] that returns the
output of attention in the shape of query."""


@dataclass(frozen=True)
class Target:
    """The folder of the rows, and the device and sizes with which they are computed."""

    folder: Path
    device: torch.device
    small: bool

    def inputs(self, sizes: Sizes, dtype: torch.dtype) -> Inputs:
        return Inputs(sizes, dtype, self.device, rounded_to=dtype)

    @property
    def low_dtype(self) -> torch.dtype:
        """Returns the 16-bit dtype of the checks: not bf16 in Triton's interpreter, which truncates to bf16
        instead of rounding."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("mode", choices=("check", "time", "tiles"))
    parser.add_argument("--small", action="store_true", help="small tensors")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="with check: only this dtype (default: all, at the same time)"
    )
    new = Path(f"runs/kernels/{time.strftime('%m%d-%H%M%S')}")
    parser.add_argument("--out", type=Path, default=new, help="folder of rows.jsonl (default: a new folder)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.small:
        parser.error("no GPU was found: --small computes on a CPU")
    reason = reason_against_kernels(device.type)
    if reason is not None:
        parser.error(f"the kernels are not used: {reason}")
    print(describe_machine(), flush=True)
    target = Target(arguments.out, device, arguments.small)
    if arguments.mode == "check":
        if arguments.dtype:
            sys.exit(check(target, DTYPES[arguments.dtype]))
        command = [sys.executable, *sys.argv, "--out", str(arguments.out), "--dtype"]
        names = [name for name in DTYPES if device.type != "cpu" or name != "bf16"]  # see `low_dtype`
        processes = [subprocess.Popen([*command, name]) for name in names]
        sys.exit(max(abs(process.wait()) for process in processes))
    sys.exit((compare_times if arguments.mode == "time" else compare_tiles)(target))


@contextmanager
def references() -> Iterator[None]:
    """Makes the operators compute with PyTorch within the block."""
    forget_decisions()
    try:
        with temporary_environment({"MEGATRON_KERNELS": "pytorch"}):
            yield
    finally:
        forget_decisions()


# --- Errors ---


def check(target: Target, dtype: torch.dtype) -> int:
    """Adds a row for each kernel and head size. Returns 1 if an error is above its bound."""
    right = True
    for head_dim in (SMALL.head_dim,) if target.small else HEAD_DIMS:
        inputs = target.inputs(SMALL if target.small else replace(CHECKED, head_dim=head_dim), dtype)
        exact = replace(inputs, dtype=torch.float64, rounded_to=dtype)
        for case, exact_case in zip(cases(inputs), cases(exact), strict=True):
            if (
                inputs.sizes is SMALL
                or head_dim == HEAD_DIMS[0]
                or case.name.startswith(("attention", "split"))
            ):
                name = {"kernel": case.name, "dtype": str(dtype).split(".")[-1], "head_dim": head_dim}
                right &= try_row(target, "kernels", name, partial(errors, case, exact_case, dtype))
    return int(not right)


def errors(case: Case, exact: Case, dtype: torch.dtype) -> dict[str, Any]:
    with references():
        reference, expected = outputs(case), outputs(exact)
    found = outputs(case)  # last, because some backward passes overwrite their inputs
    error, of_reference = largest_error(found, expected), largest_error(reference, expected)
    good = error <= max(BOUNDS[dtype], min(2 * of_reference, 10 * BOUNDS[dtype]))
    columns = {"error": error, "error_of_pytorch": of_reference, "bound": BOUNDS[dtype]}
    return columns | {"verdict": "ok" if good else "BAD"}


def try_row(target: Target, table: str, name: dict[str, Any], work: Callable[[], dict[str, Any]]) -> bool:
    """Adds a row with the columns that `work` returns, or with its error. Returns whether the row is right.
    After an error of the device, ends the process, because all later results would be wrong."""
    for row in read_rows(target.folder, table):
        if name.items() <= row.items():
            return row.get("verdict", "ok") == "ok"
    try:
        columns = work()
    except Exception as problem:
        traceback.print_exc()
        columns = {"verdict": f"FAILED: {problem!r}"[:150]}
    add_row(target.folder, table, **name, **columns)
    if columns.get("verdict", "ok") != "ok" and device_is_lost():
        sys.exit(3)
    return columns.get("verdict", "ok") == "ok"


def outputs(case: Case) -> list[Tensor]:
    return [value.detach().double() for value in case.work()]


def largest_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Returns the largest relative error of the outputs. For an output of zeros, the error is absolute."""
    errors = [
        float((a - b).norm() / (size if (size := b.norm()) else 1)) for a, b in zip(found, exact, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


# --- Times ---


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Returns the median seconds of a call; on a CPU the seconds of one call."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    from triton.testing import do_bench

    return statistics.median(do_bench(work, return_mode="all")) / 1000


def compare_times(target: Target) -> int:
    """Adds a row for each kernel, and for each kind of attention. After a case that fails, continues with the
    next case."""
    sizes, right = SMALL if target.small else TIMED, True
    for case in cases(target.inputs(sizes, target.low_dtype)):
        right &= try_row(target, "kernel times", {"kernel": case.name}, partial(times, case, target))
    for kind in KINDS:
        work = partial(compared_attention, kind, sizes, target)
        right &= try_row(target, "attention times", {"attention": kind}, work)
    return int(not right)


def times(case: Case, target: Target) -> dict[str, Any]:
    kernel = seconds_of(case.work, target.device)
    with references():
        reference = seconds_of(case.work, target.device)
    if case.flops:
        rate = f"{case.flops / kernel / 1e12:.0f} TFLOP/s"
    else:
        rate = f"{case.moved / kernel / 1e9:.0f} GB/s"
    library = seconds_of(case.library, target.device)
    return {
        "pytorch_ms": 1000 * reference,
        "kernel_ms": 1000 * kernel,
        "ratio": reference / kernel,
        "rate": rate,
        "library_ms": 1000 * library,
        "library": case.library_name,
    }


def compared_attention(kind: str, sizes: Sizes, target: Target) -> dict[str, Any]:
    """Returns the largest difference from SDPA, and the time of each implementation. On a CPU only outputs
    are computed: FlexAttention has no backward pass there."""
    groups = max(sizes.heads // 4, 1) if "share" in kind else sizes.heads
    inputs = target.inputs(sizes, target.low_dtype)
    shapes = [(sizes.seq, 1, count, sizes.head_dim) for count in (sizes.heads, groups, groups)]
    leaves = [inputs.some(shape, 3)[index] for index, shape in enumerate(shapes)]
    (grad,) = inputs.some(shapes[0], 1)
    on_cpu = target.device.type == "cpu"

    def work(attend: Attend) -> list[Tensor]:
        y = attend(*(x.detach() if on_cpu else x for x in leaves))
        return [y.detach(), *(() if on_cpu else torch.autograd.grad(y, leaves, grad))]

    found = implementations(kind, sizes.seq, sizes.heads, target.device)
    expected = [value.double() for value in work(found["sdpa"])]
    errors = [
        largest_error([value.double() for value in work(attend)], expected) for attend in found.values()
    ]
    measured = {
        f"{name}_ms": 1000 * seconds_of(partial(work, attend), target.device)
        for name, attend in found.items()
    }
    return {"difference": max(errors), **measured, "fastest": min(measured, key=measured.__getitem__)[:-3]}


def implementations(kind: str, seq: int, heads: int, device: torch.device) -> dict[str, Attend]:
    """Returns the implementations of one of `KINDS`: this repository's Triton kernels, and PyTorch's
    `scaled_dot_product_attention` and FlexAttention, for a window on a GPU also its flash kernel. Windows and
    documents have seq / 4 tokens. The implementations have no dropout, because the masks of PyTorch's kernels
    depend on rank and kernel."""
    document_ids = None
    if kind == "documents":
        tokens = torch.ones(1, seq, dtype=torch.int64, device=device)
        tokens[:, :: seq // 4] = 0
        document_ids = document_ids_of(tokens, 0)
    masks = AttentionMasks(
        alibi_slopes(heads) if kind == "ALiBi" else None,
        within_documents=document_ids is not None,
        window=seq // 4 if kind == "window" else None,
    )

    def triton(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = AttentionMask(masks.slopes_on(device), *masks.ranges(seq, 1, device, document_ids))
        return flash_attention(query, key, value, query.shape[-1] ** -0.5, mask)

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = masks.bias(seq, query.dtype, device, document_ids)
        heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shares = key.shape[2] < query.shape[2]
        output = F.scaled_dot_product_attention(*heads_first, bias, is_causal=bias is None, enable_gqa=shares)
        return output.permute(2, 0, 1, 3)

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return windowed_attention(query, key, value, query.shape[-1] ** -0.5, seq // 4)

    found = {"triton": triton, "sdpa": sdpa, "flex": flex(masks, document_ids, seq, device)}
    return {**found, "flash": flash} if kind == "window" and device.type == "cuda" else found


def flex(masks: AttentionMasks, document_ids: Tensor | None, seq: int, device: torch.device) -> Attend:
    """Returns FlexAttention, compiled on a GPU. The mask is given by the first visible token of each query,
    so that one compiled function serves windows and documents."""
    first_keys, _ = masks.ranges(seq, 1, device, document_ids)
    slopes = masks.slopes_on(device)

    def allowed(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        causal = column <= row
        return causal if first_keys is None else causal & (column >= first_keys[0, row])

    def biased(score: Tensor, _batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score if slopes is None else score + slopes[head] * (column - row)

    block_mask = create_block_mask(allowed, None, None, seq, seq, device)
    function = flex_attention if device.type == "cpu" else torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shares = key.shape[2] < query.shape[2]
        score_mod = None if slopes is None else biased
        output = function(*heads_first, score_mod=score_mod, block_mask=block_mask, enable_gqa=shares)
        return output.permute(2, 0, 1, 3)

    return attend


# --- Tiles ---


def compare_tiles(target: Target) -> int:
    """Adds a row for each tile of each attention kernel. A tile that does not compile, or needs too much
    shared memory, has a row with the error."""
    for head_dim in (SMALL.head_dim,) if target.small else (128, 64):
        sizes = SMALL if target.small else replace(TIMED, head_dim=head_dim)
        for kernel, call in attention_calls(target.inputs(sizes, target.low_dtype)).items():
            expected = [value.double() for value in call()]
            capability = attention.compute_capability(target.device)
            of_run = attention.tiles(kernel, target.low_dtype, head_dim, capability)
            others = [Tiles(*numbers) for numbers in (SMALL_TILES if target.small else TILES)[kernel]]
            for tile in (of_run, *(tile for tile in others if tile != of_run)):
                shown = f"{tile.queries} x {tile.keys}, {tile.num_warps} warps, {tile.num_stages} stages"
                name = {"kernel": kernel, "head_dim": head_dim, "tile": shown, "used": tile is of_run}
                try_row(target, "tiles", name, partial(time_of_tile, call, tile, expected, target))
    return 0


def time_of_tile(
    call: Callable[[], Sequence[Tensor]], tile: Tiles, expected: list[Tensor], target: Target
) -> dict[str, Any]:
    launch = attention._launch  # its cache ignores the tiles
    launch.cache_clear()
    try:
        with patch.object(attention, "tiles", lambda *_: tile):
            error = largest_error([value.double() for value in call()], expected)
            milliseconds = 1000 * seconds_of(call, target.device)
    finally:
        launch.cache_clear()
    if not error <= BOUNDS[target.low_dtype]:
        raise ValueError(f"the results differ by {error:.1e} from the results of the first tile")
    return {"ms": milliseconds, "difference": error}


def attention_calls(inputs: Inputs) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Returns the calls of the attention kernels, by their names in `attention.tiles`."""
    sizes = inputs.sizes
    shape = (sizes.seq, 1, sizes.heads, sizes.head_dim)
    query, key, value, grad = (x.detach() for x in inputs.some(shape, 4))
    sample_keys = torch.ones(1, dtype=torch.int64, device=inputs.device)
    scale, dropout = sizes.head_dim**-0.5, 0.1
    masks, numbers = (None, None), (scale, None, dropout, 0, sizes.seq, None)

    def forward() -> Sequence[Tensor]:
        return attention.attention_forward_op(query, key, value, *masks, sample_keys, None, *numbers)

    out, log_sums = forward()

    def backward_query() -> Sequence[Tensor]:
        tensors = (query, key, value, out, grad, log_sums)
        return attention.attention_backward_query_op(*tensors, *masks, sample_keys, *numbers)

    _, row_sums, row_keys = backward_query()

    def backward_key() -> Sequence[Tensor]:
        tensors = (query, key, value, grad, log_sums, row_sums)
        return attention.attention_backward_key_op(
            *tensors, *masks, row_keys, scale, None, dropout, sizes.seq, None
        )

    return {"forward": forward, "query": backward_query, "key": backward_key}


if __name__ == "__main__":
    main()
