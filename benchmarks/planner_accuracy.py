#!/usr/bin/env python3
"""Compares the planner's predictions with measurements: with published runs, and with processes on CPUs.

    python benchmarks/planner_accuracy.py               published runs of other programs: two minutes
    python benchmarks/planner_accuracy.py --rows FILE   rows of a file like benchmarks/published/rows.csv
    python benchmarks/planner_accuracy.py --fit         also fits the constants
    python benchmarks/planner_accuracy.py --cpu         eight layouts on this machine: some minutes

Published runs. Each row has the flags of a run of this program with the published model and layout. The
planner predicts the step time and the memory from layers of this program. For the program that was measured,
it uses that program's attention kernel, bytes per parameter, and a factor for the bytes of all other kernels
(benchmarks/published/programs.json). The comparison therefore tests the predicted times of kernels and
collectives, the simulation of schedules, and the memory plan. The rows marked with * were used to fit the
constants.

For CPUs, see benchmarks/cpu_steps.py.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, groupby
from pathlib import Path

from benchmarks import cpu_steps
from benchmarks.machine import benchmark_parser, describe_machine
from benchmarks.published_runs import (
    FOLDER,
    IN_USE,
    Constants,
    Row,
    planned_of,
    read_rows,
    read_stages,
    stage_memory,
)
from megatron.cluster.devices import find_gpu
from megatron.text_table import format_table

MIB = 2**20
# Assumed fraction of the memory that a run can use. Fragmentation takes the rest.
USABLE = 0.95
_ALL_GPUS = "v100+a100+h100+h200+b200+gb200"
_2021 = "megatron 2021+megatron 2021 bf16"
FITTED = {
    "v100.products": 0.80,
    "a100.products": 0.80,
    "h100+h200.products": 0.70,
    "b200+gb200.products": 0.60,
    f"{_ALL_GPUS}.tile_s": 4e-6,
    f"{_ALL_GPUS}.contention": 0.2,
    f"{_2021}.traffic": 1.5,
    f"{_2021}.tensor_latency_us": 300.0,
    "transformer engine.traffic": 1.2,
    "xla.traffic": 1.2,
    "fsdp eager.traffic": 1.5,
}
"""Constants that --fit fits -> initial values, which are from measurements of kernels or are guesses."""
_OUTLIER = 0.4
"""Maximum log error of a row in the fit. A row with a larger error counts as this one, because its run
probably differed from what the row states."""
_PRIOR = 0.005
"""Cost of a constant that differs from its initial value by a factor of e, relative to the cost of an error
of 100 %."""


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="file of rows to compare, instead of the published rows"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants")
    parser.add_argument("--cpu", action="store_true", help="measure on this machine")
    arguments = parser.parse_args()
    if arguments.cpu:
        print(describe_machine(), flush=True)
        cpu_steps.compare()
        return
    rows = read_rows(arguments.rows or FOLDER / "rows.csv")
    print(time_report(rows))
    if arguments.rows is None:
        print("\nmemory of the most loaded GPU, GB")
        print(memory_report(rows))
        print("\nmemory per stage, MiB")
        print(stage_report())
    if arguments.fit:
        print(fit_report(rows))


# --- Time ---


def predict(rows: Sequence[Row], constants: Constants = IN_USE) -> list[float]:
    """Returns the predicted seconds of a step of each row."""
    with ThreadPoolExecutor() as pool:  # threads wait for processes that record layers
        return list(pool.map(lambda row: row.step_seconds(constants), rows))


def time_report(rows: Sequence[Row]) -> str:
    """Returns a text with a line per row, and the errors by program and GPU."""
    timed = [row for row in rows if row.seconds]
    pairs = [(row, seconds, row.seconds or 0.0) for row, seconds in zip(timed, predict(timed), strict=True)]
    table = [["row", "program", "GPU", "layout", "measured s", "predicted s", "error %"]]
    table += [
        [
            row.name + "*" * row.is_fitted,
            row.program,
            row.gpu_kind,
            row.layout,
            f"{measured:.3g}",
            f"{predicted:.3g}",
            f"{100 * (predicted / measured - 1):+.1f}",
        ]
        for row, predicted, measured in pairs
    ]
    summary = [["rows", "program", "GPU", "number", "median %", "9 of 10 %", "worst %", "order, tau"]]

    def kind(pair: tuple[Row, float, float]) -> tuple[bool, str, str]:
        return pair[0].is_fitted, pair[0].program, pair[0].gpu_kind

    for (is_fitted, program, gpu), group in groupby(sorted(pairs, key=kind), kind):
        summary.append(["fitted on" if is_fitted else "unseen", program, gpu, *_cells(list(group))])
    for is_fitted in (False, True):
        group_of_all = [pair for pair in pairs if pair[0].is_fitted == is_fitted]
        if group_of_all:
            summary.append(["fitted on" if is_fitted else "unseen", "all", "all", *_cells(group_of_all)])
    return f"{format_table(table, (0, 1, 2, 3))}\n\n{format_table(summary, (0, 1, 2))}"


def _cells(pairs: Sequence[tuple[Row, float, float]]) -> list[str]:
    tau = order_of_layouts(pairs)
    errors = [predicted / measured - 1 for _, predicted, measured in pairs]
    return [str(len(pairs)), *_quantiles(errors), "" if tau is None else f"{tau:.2f}"]


def _quantiles(errors: Sequence[float]) -> list[str]:
    """Returns the median error, the error that 9 of 10 rows do not exceed, and the largest error, in
    percent."""
    sizes = sorted(abs(error) for error in errors)
    nine_of_ten = sizes[max(-(-9 * len(sizes) // 10) - 1, 0)]
    return [f"{100 * size:.1f}" for size in (statistics.median(sizes), nine_of_ten, sizes[-1])]


def order_of_layouts(pairs: Sequence[tuple[Row, float, float]]) -> float | None:
    """Returns Kendall's tau of predicted and measured seconds over all pairs of rows that differ only in
    layout, micro-batch and heads: 1 if all pairs are in the same order. Returns None without such pairs."""
    agree = compared = 0
    for (a, predicted_a, measured_a), (b, predicted_b, measured_b) in combinations(pairs, 2):
        if a.problem == b.problem and a.layout != b.layout:
            sign = (predicted_a - predicted_b) * (measured_a - measured_b)
            agree += (sign > 0) - (sign < 0)
            compared += 1
    return agree / compared if compared else None


# --- Memory ---


def memory_report(rows: Sequence[Row]) -> str:
    """Returns a text with a line per row that has a measured memory, and lines of the rows that ran out of
    memory."""
    table = [["row", "layout", "measured", "predicted", "error %"]]
    errors: dict[str, list[float]] = {}
    verdicts, wrong = [], []
    for row in rows:
        if row.memory_gb is None and not row.out_of_memory:
            continue
        predicted = row.peak_gb()
        gpu = find_gpu(row.config)
        assert gpu is not None
        limit = USABLE * gpu.memory_bytes / 1e9
        if (predicted > limit) != row.out_of_memory:
            wrong.append(f"{row.name}: {predicted:.0f} GB of {limit:.0f}")
        if row.memory_gb is None:
            verdicts.append(f"{row.name} {row.layout}: {predicted:.0f} GB of {limit:.0f}")
            continue
        errors.setdefault(row.gpu_kind, []).append(predicted / row.memory_gb - 1)
        error = f"{100 * errors[row.gpu_kind][-1]:+.1f}"
        table.append([row.name, row.layout, f"{row.memory_gb:.0f}", f"{predicted:.1f}", error])
    lines = [format_table(table, left_align=(0, 1))]
    lines += [
        f"{kind}: {len(found)} rows, median {median} %, 9 of 10 within {nine_of_ten} %, worst {worst} %"
        for kind, found in errors.items()
        for median, nine_of_ten, worst in [_quantiles(found)]
    ]
    lines += [f"out of memory: {'; '.join(verdicts)}", f"wrong verdicts: {len(wrong)} {'; '.join(wrong)}"]
    return "\n".join(lines)


def stage_report() -> str:
    """Returns a text with a line per stage of published/stages.csv."""
    table = [["program", "layout", "stage", "parameters", "static", "error %", "peak", "error %"]]
    static_errors, peak_errors = [], []
    for row, config in read_stages():
        stage, program = int(row["stage"]), IN_USE.programs[row["program"]]
        allocated, peak = float(row["allocated_mib"]), float(row["peak_mib"])
        parameters = planned_of(config).stages.stage_parameters(stage)
        predicted = stage_memory(config, program)[stage]
        static_errors.append(predicted.static / MIB / allocated - 1)
        peak_errors.append(predicted.peak / MIB / peak - 1)
        model, pp_size = config.model, config.parallel.pipeline_model_parallel_size
        table.append(
            [
                row["program"],
                f"{model.num_layers}x{model.hidden_size} PP{pp_size}",
                row["stage"],
                f"{parameters - int(row['parameters']):+d}",
                f"{allocated:.0f}",
                f"{100 * static_errors[-1]:+.2f}",
                f"{peak:.0f}",
                f"{100 * peak_errors[-1]:+.1f}",
            ]
        )
    exact = [line[3] for line in table].count("+0")
    worst_static, worst_peak = (max(map(abs, errors)) for errors in (static_errors, peak_errors))
    return (
        f"{format_table(table, left_align=(0, 1))}\n"
        f"parameters exact in {exact} of {len(static_errors)} rows; static: worst {100 * worst_static:.2f} % "
        f"(goal 1 %); peak: worst {100 * worst_peak:.1f} % (goal 5 %)"
    )


# --- Constants ---


def fit_report(rows: Sequence[Row]) -> str:
    """Returns the table of the best constants and the constants in use."""
    used = [row for row in rows if row.is_fitted and row.seconds]
    best = fit(used)
    table = [["constant", "best", "in use"]]
    table += [[name, f"{value:.3g}", f"{IN_USE.get(name):.3g}"] for name, value in best.items()]
    return f"\nfitted on {len(used)} rows\n{format_table(table, left_align=(0,))}"


def fit(rows: Sequence[Row], start: Mapping[str, float] = FITTED) -> dict[str, float]:
    """Returns the constants with the least error on the rows. The rows of a repository on one kind of GPU
    have together the weight of the square root of their number."""
    counts = Counter((row.origin, row.gpu_kind) for row in rows)

    def cost(values: Mapping[str, float]) -> float:
        constants = IN_USE
        for name, value in values.items():
            constants = constants.with_value(name, value)
        errors = [
            min(abs(math.log(predicted / (row.seconds or 1.0))), _OUTLIER)
            / math.sqrt(counts[row.origin, row.gpu_kind])
            for row, predicted in zip(rows, predict(rows, constants), strict=True)
        ]
        distances = [math.log(value / start[name]) ** 2 for name, value in values.items()]
        return sum(errors) + _PRIOR * sum(distances)

    return least(cost, start)


def least(cost: Callable[[Mapping[str, float]], float], start: Mapping[str, float]) -> dict[str, float]:
    """Returns the values with the least cost, with a precision of 1 %. It changes one value at a time, in
    smaller and smaller steps."""
    best = dict(start)
    lowest = cost(best)
    for factor in (1.1, 1.03, 1.01):
        improves = True
        while improves:
            improves = False
            for name in best:
                for changed in (best[name] * factor, best[name] / factor):
                    if (found := cost({**best, name: changed})) < lowest:
                        lowest, improves, best[name] = found, True, changed
                        break
    return best


if __name__ == "__main__":
    main()
