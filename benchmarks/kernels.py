#!/usr/bin/env python3
"""Compiles the Triton kernels for each GPU architecture; prints registers, shared memory and spills.

    python benchmarks/kernels.py     no GPU needed; two minutes

Registers, stack and spills (bytes of local memory, which should be 0) are per thread. They are read from the
compiled code with cuobjdump and nvdisasm of the triton package. Shared memory is per block, from the
compiler's metadata. Nothing runs on a GPU.
"""

import os

# Kernels that were defined with triton's interpreter cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

from benchmarks.machine import benchmark_parser
from megatron.text_table import format_table
from tests.support.compiled_kernels import ARCHITECTURES, compile_variant, variants


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--compile-only", action="store_true", help="compile, run nothing: the only mode")
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES), metavar="SM")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose names begin with TEXT")
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = [("kernel", "GPU", "registers", "shared bytes", "stack", "spills")]
    for variant in variants():
        if not variant.name.startswith(arguments.only):
            continue
        for architecture in arguments.architectures:
            found = compile_variant(variant, architecture)
            numbers = (found.registers, found.shared, found.stack, found.spills)
            rows.append((variant.name, f"sm_{architecture}", *map(str, numbers)))
    print(format_table(rows))


if __name__ == "__main__":
    main()
