"""Compares the losses of all layouts of the full matrix with the losses of the single-process fp32 run.

    .venv/bin/python benchmarks/parity.py             # 408 fp32 rows and 51 in bf16, fp16 and FP8: 45 minutes
    .venv/bin/python benchmarks/parity.py --rows 40   # this many, spread evenly over the matrix

Each row trains the tiny model of tests/support/layouts.py for 20 steps, on gloo. At every step the relative
error must be at most 1e-5 in loss and grad norm for fp32 rows, and 2e-3 in loss for bf16 and fp16 rows. FP8
rows train a wider model with a lower learning rate. They are compared with a bf16 run of one process, and the
error in loss must be at most 1e-2. The exit code is 1 if a row exceeds its bound.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from functools import cache

from benchmarks.machine import benchmark_parser, describe_machine
from tests.support.layouts import (
    FP8_BOUND,
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    Row,
    covering_rows,
    full_matrix,
    relative_errors,
    train_layout,
)
from tests.support.pool import WorldError, run_world

ROW_TIMEOUT_S = 300.0


def all_rows() -> list[Row]:
    """Returns the fp32 matrix, sorted by number of processes, and each layout once in bf16, in fp16 and in
    FP8."""
    low = [
        dataclasses.replace(row, precision=precision)
        for precision in ("bf16", "fp16", "fp8")
        for row in covering_rows()
    ]
    return sorted(full_matrix(), key=lambda row: row.world_size) + low


def spread(rows: list[Row], count: int) -> list[Row]:
    """Returns about `count` rows at equal distances in the list, with its first and last row."""
    if count >= len(rows):
        return rows
    return [rows[round(i * (len(rows) - 1) / max(count - 1, 1))] for i in range(count)]


@cache
def reference(row: Row) -> list[tuple[float, float]]:
    """Returns (loss, grad norm) of each step of the single-process run with which a row is compared."""
    return run_world(1, train_layout, row)[0]


def check(row: Row) -> tuple[str, bool]:
    """Runs a row. Returns its line of the table, and whether it is within its bound."""
    started = time.perf_counter()
    try:
        ranks = run_world(row.world_size, train_layout, row, timeout=ROW_TIMEOUT_S)
    except WorldError as error:
        return f"{row!s:<54} failed: {error.__cause__ or error!r}\n{error}", False
    seconds = time.perf_counter() - started
    errors = [relative_errors(history, reference(row.reference)) for history in ranks]
    loss, norm = max(error[0] for error in errors), max(error[1] for error in errors)
    bound = {"fp32": FP32_BOUND, "fp8": FP8_BOUND}.get(row.precision, LOW_PRECISION_BOUND)
    kept = loss <= bound and (norm <= FP32_BOUND or row.precision != "fp32")
    mark = "" if kept else "  BEYOND ITS BOUND"
    return f"{row!s:<54} {loss:10.1e} {norm:10.1e} {seconds:6.1f}{mark}", kept


def main() -> int:
    """Runs the rows and prints the table. Returns the exit code."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, help="run only about this many rows")
    arguments = parser.parse_args()
    rows = all_rows()
    if arguments.rows is not None:
        rows = spread(rows, arguments.rows)
    print(describe_machine())
    print(
        f"{'row':<54} {'loss':>10} {'grad norm':>10} {'s':>6}   (largest relative error over 20 steps)",
        flush=True,
    )
    failed = []
    for row in rows:
        line, kept = check(row)
        print(line, flush=True)
        if not kept:
            failed.append(row)
    print(f"{len(rows) - len(failed)} of {len(rows)} rows within their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
