#!/usr/bin/env python3
"""Compiles the Triton kernels for each GPU architecture, and prints registers, shared memory and spills.

    python benchmarks/kernels.py                  no GPU needed; three minutes
    python benchmarks/kernels.py --sweep-tiles    the attention kernels with each tile that a GPU should time

Registers, stack and spills (bytes of local memory, which should be 0) are per thread, and are read from the
compiled code with cuobjdump and nvdisasm of the triton package. Shared memory is per block, and is read from
the compiler's metadata. `wasted` is the part of an attention kernel's matrix products that its tiles do not
need, and `narrowest` the smallest product of an instruction: rows x columns x inner length. Nothing runs on a
GPU. `kernel_speed.py tiles` measures the times of the tiles.
"""

import os

# Kernels that were defined for Triton's interpreter cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

from benchmarks.kernel_cases import TILES
from benchmarks.machine import benchmark_parser
from megatron.kernels import attention
from megatron.kernels.attention import Tiles
from megatron.text_table import format_table
from tests.support.compiled_kernels import (
    ARCHITECTURES,
    ATTENTION_PRODUCTS,
    Variant,
    attention_work,
    compile_variant,
    launches_of,
    variants,
    wasted_part,
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--sweep-tiles", action="store_true", help="compile the attention kernels with all tiles"
    )
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES), metavar="SM")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose names begin with TEXT")
    arguments = parser.parse_args()
    columns = ("wasted", "narrowest", "registers", "shared bytes", "stack", "spills")
    rows: list[tuple[str, ...]] = [("kernel", "GPU", *columns)]
    for architecture in arguments.architectures:
        for variant in (tile_variants if arguments.sweep_tiles else variants)(architecture):
            if variant.name.startswith(arguments.only) and architecture >= variant.least_architecture:
                rows.append((variant.name, f"sm_{architecture}", *resources(variant, architecture)))
    print(format_table(rows))


def resources(variant: Variant, architecture: int) -> tuple[str, ...]:
    """Returns the columns of a row."""
    found = compile_variant(variant, architecture)
    wasted = wasted_part(variant.launch, found)
    products = ("-", "-")
    if wasted is not None:
        narrowest = min(found.products, key=lambda shape: shape[1])
        products = (f"{wasted:.1%}", "x".join(map(str, narrowest)))
    return *products, *map(str, (found.registers, found.shared, found.stack, found.spills))


def tile_variants(architecture: int) -> Iterator[Variant]:
    """Returns the attention kernels in bf16 with ALiBi, documents and dropout, which need the most registers,
    with each tile of `TILES`."""
    for place, kernel in enumerate(ATTENTION_PRODUCTS):
        for head_dim in (128, 64):
            for numbers in TILES[kernel.removeprefix("backward_")]:
                attention._launch.cache_clear()  # the cache ignores the tiles
                with patch.object(attention, "tiles", lambda *_, numbers=numbers: Tiles(*numbers)):
                    work = partial(attention_work, "bf16", head_dim, "adr")
                    launch, dtypes, grid = launches_of(work, architecture)[place]
                queries, keys, warps, stages = numbers
                tile = f"{queries} x {keys}, {warps} warps, {stages} stages"
                yield Variant(f"attention bf16 {head_dim}, {tile}: {kernel}", launch, dtypes, grid)
    attention._launch.cache_clear()


if __name__ == "__main__":
    main()
