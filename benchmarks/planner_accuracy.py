#!/usr/bin/env python3
"""The planner against published measurements: time of a step, memory, out-of-memory runs, row by row.

    python benchmarks/planner_accuracy.py          half a minute on one core
    python benchmarks/planner_accuracy.py --fit    also searches the two constants of each kind of GPU

The rows are BigScience's (benchmarks/published/). They were measured with other programs, whose kernels and
bytes per parameter are a named profile: `megatron.planner.timing.work.MEGATRON_2021`,
`published_rows.Memory`. Rows marked with * are those that the constants were fitted on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# The published programs have no such kernels.
os.environ["MEGATRON_KERNELS"] = "pytorch"

from benchmarks.published_rows import (  # noqa: E402
    DEEPSPEED_3D,
    MEGATRON,
    MIB,
    USABLE,
    Row,
    fullest_gb,
    stage_memory,
    stage_rows,
    throughput_rows,
)
from megatron.config import Config  # noqa: E402
from megatron.planner.stages import plan_stages  # noqa: E402
from megatron.planner.timing.hardware import find_gpu  # noqa: E402
from megatron.planner.timing.step_time import FITTED, Achieved, find_cluster, predict_step  # noqa: E402
from megatron.text_table import format_table  # noqa: E402

FITTED_ON = {
    "a100": tuple(
        f"chronicles-prequel.md:{line}" for line in (583, 585, 615, 635, 790, 802, 809, 832, 867, 907)
    ),
    "v100": tuple(f"tr3m-1B3.md:{line}" for line in (24, 26, 31, 45, 47)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="search the constants of each kind of GPU")
    arguments = parser.parse_args()
    rows = throughput_rows()
    for kind in FITTED_ON:
        of_kind = [row for row in rows if row.gpu.lower().startswith(kind)]
        if arguments.fit:
            print(f"{kind}: best constants {fit(of_kind, kind)}, in use {FITTED[kind]}")
        print(f"\n{kind}, time of a step; constants {FITTED[kind]}")
        print(time_report(of_kind, kind))
    print("\nmemory of the fullest GPU, GB")
    print(memory_report(rows))
    print("\nmemory per stage, MiB")
    print(stage_report())


def predicted_seconds(row: Row, achieved: Achieved | None = None) -> float:
    """The predicted time of a step of the row."""
    cluster = find_cluster(row.config)
    assert cluster is not None
    if achieved is not None:
        cluster = dataclasses.replace(cluster, achieved=achieved)
    return predict_step(row.config, row.plan, row.vocab_size, cluster, row.program).total


def fit(rows: Sequence[Row], kind: str) -> Achieved:
    """The constants with the least mean absolute error on the rows of FITTED_ON, to 0.02."""
    used = [row for row in rows if row.name in FITTED_ON[kind] and row.seconds]

    def mean_error(achieved: Achieved) -> float:
        return statistics.fmean(abs(predicted_seconds(row, achieved) / row.seconds - 1) for row in used)

    best = Achieved(0.7, 0.5)
    for step in (0.1, 0.02):
        around = [step * count for count in range(-4, 5)]
        best = min(
            (
                Achieved(best.matmul + m, best.memory + b)
                for m in around
                for b in around
                if best.matmul + m <= 1.0 and 0 < best.memory + b <= 1.0
            ),
            key=mean_error,
        )
    return best


def time_report(rows: Sequence[Row], kind: str) -> str:
    """A line per row, and the errors of the rows that the constants were not fitted on."""
    table, others, order = [["row", "layout", "measured s", "predicted s", "error %"]], [], []
    for row in rows:
        if row.seconds is None:
            continue
        predicted = predicted_seconds(row)
        error = predicted / row.seconds - 1
        used = row.name in FITTED_ON[kind]
        table.append([row.name + "*" * used, row.layout, f"{row.seconds:.1f}", f"{predicted:.1f}"])
        table[-1].append(f"{100 * error:+.1f}")
        order.append((row, predicted))
        others += [] if used else [error]
    lines = [format_table(table, left_align=(0, 1)), f"without the fitted rows: {_errors(others)}"]
    lines.append(f"order of all rows: Kendall's tau {kendall_tau([(r.seconds, p) for r, p in order]):.2f}")
    lines.append(_repeats_line(order))
    by_model: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for row, predicted in order:
        model, batch = row.config.model, row.config.batch.global_batch_size
        by_model.setdefault((model.num_layers, model.hidden_size, batch), []).append((row.seconds, predicted))
    for (layers, hidden, batch), pairs in by_model.items():
        if len(pairs) >= 4:
            lines.append(
                f"order of the {len(pairs)} layouts of {layers} x {hidden}, batch {batch}: "
                f"Kendall's tau {kendall_tau(pairs):.2f}"
            )
    return "\n".join(lines)


def _repeats_line(order: Sequence[tuple[Row, float]]) -> str:
    """The order of the different layouts, and what rows of one layout say of the measurements: their spread,
    and the order that a prediction gives which is exact but for it."""
    same: dict[Config, list[tuple[float, float]]] = {}
    for row, predicted in order:
        same.setdefault(row.config, []).append((row.seconds, predicted))
    medians = {config: statistics.median(s for s, _ in pairs) for config, pairs in same.items()}
    repeated = [[s for s, _ in pairs] for pairs in same.values() if len(pairs) > 1]
    layouts = kendall_tau([(medians[config], pairs[0][1]) for config, pairs in same.items()])
    line = f"order of the {len(same)} different layouts: Kendall's tau {layouts:.2f}"
    if not repeated:
        return line
    spread = max(max(seconds) / min(seconds) - 1 for seconds in repeated)
    exact = kendall_tau([(row.seconds, medians[row.config]) for row, _ in order])
    return (
        f"{line}; {len(repeated)} of them were measured several times, with up to {100 * spread:.0f} % "
        f"difference: their medians as predictions have Kendall's tau {exact:.2f} over all rows"
    )


def _errors(errors: Sequence[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    within = sum(size <= 0.1 for size in sizes)
    worst = ", ".join(f"{100 * size:.0f}" for size in sizes[-3:])
    return (
        f"{len(sizes)} rows, median {100 * statistics.median(sizes):.1f} %, 9 of 10 within "
        f"{100 * sizes[max(-(-9 * len(sizes) // 10) - 1, 0)]:.1f} %, worst {worst} %; {within} within 10 %"
    )


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of measured and predicted values: 1 if all pairs are in the same order."""
    agree = differ = tied_x = tied_y = 0
    for (x1, y1), (x2, y2) in combinations(pairs, 2):
        sign = (x1 - x2) * (y1 - y2)
        agree += sign > 0
        differ += sign < 0
        tied_x += x1 == x2
        tied_y += y1 == y2
    total = len(pairs) * (len(pairs) - 1) / 2
    return (agree - differ) / ((total - tied_x) * (total - tied_y)) ** 0.5 if total > tied_x else 0.0


def memory_report(rows: Sequence[Row]) -> str:
    """A line per row with a measured memory, and the out-of-memory rows."""
    table, errors, verdicts = [["row", "layout", "measured", "predicted", "error %"]], {}, []
    wrong: list[str] = []
    for row in rows:
        predicted = fullest_gb(row)
        gpu = find_gpu(row.config)
        assert gpu is not None
        limit = USABLE * gpu.memory_bytes / 1e9
        if row.out_of_memory:
            verdicts.append(f"{row.name} {row.layout}: {predicted:.0f} GB of {limit:.0f}")
            wrong += [] if predicted > limit else [f"{row.name} ran out of memory and is said to fit"]
            continue
        wrong += [f"{row.name} ran and is said not to fit ({predicted:.0f} GB)"] if predicted > limit else []
        if row.memory_gb is None:
            continue
        error = predicted / row.memory_gb - 1
        errors.setdefault(row.gpu, []).append(error)
        table.append(
            [row.name, row.layout, f"{row.memory_gb:.0f}", f"{predicted:.1f}", f"{100 * error:+.1f}"]
        )
    lines = [format_table(table, left_align=(0, 1))]
    lines += [f"{gpu}: {_errors(of_gpu)}" for gpu, of_gpu in errors.items()]
    lines += ["out of memory: " + "; ".join(verdicts)]
    lines += [f"wrong verdicts: {len(wrong)}" + "".join(f"\n  {text}" for text in wrong)]
    return "\n".join(lines)


def stage_report() -> str:
    """A line per stage of published/stage_memory.csv."""
    table = [["engine", "layout", "stage", "parameters", "static", "error %", "peak", "error %"]]
    static_errors, peak_errors, exact = [], [], 0
    for row in stage_rows():
        plan = plan_stages(row.config, row.vocab_size)
        memory = MEGATRON if row.engine == "megatron" else DEEPSPEED_3D
        predicted = stage_memory(row.config, plan, row.vocab_size, memory, row.stage)
        exact += plan.stage_parameters(row.stage) == row.parameters
        static_errors.append(predicted.static / MIB / row.allocated_mib - 1)
        peak_errors.append(predicted.peak / MIB / row.peak_mib - 1)
        model, parallel = row.config.model, row.config.parallel
        layout = f"{model.num_layers}x{model.hidden_size} PP{parallel.pipeline_model_parallel_size}"
        table.append(
            [row.engine, layout, str(row.stage), f"{plan.stage_parameters(row.stage) - row.parameters:+d}"]
        )
        table[-1] += [f"{row.allocated_mib:.0f}", f"{100 * static_errors[-1]:+.2f}"]
        table[-1] += [f"{row.peak_mib:.0f}", f"{100 * peak_errors[-1]:+.1f}"]
    worst_static, worst_peak = (max(map(abs, errors)) for errors in (static_errors, peak_errors))
    return (
        format_table(table, left_align=(0, 1))
        + f"\nparameters exact in {exact} of {len(static_errors)} rows; static: worst "
        f"{100 * worst_static:.2f} % (goal 1 %); peak: worst {100 * worst_peak:.1f} % (goal 5 %)"
    )


if __name__ == "__main__":
    main()
