#!/usr/bin/env python3
"""Compares the planner's predictions with published measurements: step time, memory, out-of-memory runs.

    python benchmarks/planner_accuracy.py               BigScience's rows of 2021, row by row
    python benchmarks/planner_accuracy.py --rows FILE   rows of 2023 and later, by framework and GPU
    python benchmarks/planner_accuracy.py --fit         also fits the constants

The rows were measured with other frameworks, whose kernels and memory `benchmarks.published_programs`
describes. The benchmark tests the predicted times of kernels and collectives (`megatron.planner.rates`,
`network`) and the simulation of schedules. The constants were fitted on the rows marked with *
(`benchmarks.published_programs.fitting`).

FILE has the format of benchmarks/published/modern.csv; the constants were also fitted on the rows of that
file.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

# The published frameworks do not have these kernels.
os.environ["MEGATRON_KERNELS"] = "pytorch"

from benchmarks.machine import benchmark_parser
from benchmarks.published_programs.classes import IN_USE
from benchmarks.published_programs.fitting import FITTED, Sample, choose, fit
from benchmarks.published_programs.report import accuracy_report, kendall_tau, predict
from benchmarks.published_programs.rows import read_rows
from benchmarks.published_programs.steps import predict_step
from benchmarks.published_rows import (
    DEEPSPEED_3D,
    FOLDER,
    MEGATRON,
    MIB,
    USABLE,
    Row,
    fullest_gb,
    stage_memory,
    stage_rows,
    throughput_rows,
)
from megatron.cluster.devices import find_gpu
from megatron.config import Config
from megatron.pipeline.stages import plan_stages
from megatron.text_table import format_table

BIGSCIENCE = "bigscience-workshop/bigscience"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="published rows of 2023 and later")
    parser.add_argument(
        "--outliers", type=int, default=0, help="with --rows: number of rows to print per framework"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants")
    arguments = parser.parse_args()
    rows = throughput_rows()
    fitted_on = choose({BIGSCIENCE: [row.source for row in rows if row.seconds]})
    if arguments.fit:
        print(fit_report(rows, fitted_on))
    if arguments.rows is not None:
        print(rows_report(arguments.rows, arguments.outliers))
        return
    for kind in ("a100", "v100"):
        print(f"\n{kind}, time of a step")
        print(time_report([row for row in rows if row.gpu_kind == kind], fitted_on))
    print("\nmemory of the most loaded GPU, GB")
    print(memory_report(rows))
    print("\nmemory per stage, MiB")
    print(stage_report())


def rows_report(path: Path, outliers: int) -> str:
    """Returns the table of errors for the rows of a file."""
    rows, skipped = read_rows(path)
    fitted_rows, _ = read_rows(FOLDER / "modern.csv")
    return accuracy_report(predict(rows, IN_USE), skipped, {row.source for row in fitted_rows}, outliers)


def fit_report(rows: Sequence[Row], fitted_on: set[str]) -> str:
    """Returns the table of the best constants and the constants in use."""
    samples = [
        Sample(row.run, row.seconds, BIGSCIENCE, row.gpu_kind)
        for row in rows
        if row.source in fitted_on and row.seconds
    ]
    samples += [
        Sample(row.run, row.seconds, row.origin, row.gpu_kind) for row in read_rows(FOLDER / "modern.csv")[0]
    ]
    best = fit(samples, IN_USE)
    table = [["constant", "best", "in use"]]
    table += [[one.name, f"{best.get(one.name):.3g}", f"{IN_USE.get(one.name):.3g}"] for one in FITTED]
    return f"fitted on {len(samples)} rows\n{format_table(table, left_align=(0,))}"


def time_report(rows: Sequence[Row], fitted_on: set[str]) -> str:
    """Returns a line per row, and the errors of the rows that the constants were not fitted on."""
    table, others, order = [["row", "layout", "measured s", "predicted s", "error %"]], [], []
    for row in rows:
        if row.seconds is None:
            continue
        predicted = predict_step(row.run(IN_USE)).total
        error = predicted / row.seconds - 1
        used = row.source in fitted_on
        table.append([row.name + "*" * used, row.layout, f"{row.seconds:.1f}", f"{predicted:.1f}"])
        table[-1].append(f"{100 * error:+.1f}")
        order.append((row, row.seconds, predicted))
        others += [] if used else [error]
    lines = [format_table(table, left_align=(0, 1)), f"without the fitted rows: {_errors(others)}"]
    tau = kendall_tau([(seconds, predicted) for _, seconds, predicted in order])
    lines.append(f"order of all rows: Kendall's tau {tau:.2f}")
    lines.append(_repeats_line(order))
    by_model: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for row, seconds, predicted in order:
        model, batch = row.config.model, row.config.batch.global_batch_size
        by_model.setdefault((model.num_layers, model.hidden_size, batch), []).append((seconds, predicted))
    for (layers, hidden, batch), pairs in by_model.items():
        if len(pairs) >= 4:
            lines.append(
                f"order of the {len(pairs)} layouts of {layers} x {hidden}, batch {batch}: "
                f"Kendall's tau {kendall_tau(pairs):.2f}"
            )
    return "\n".join(lines)


def _repeats_line(order: Sequence[tuple[Row, float, float]]) -> str:
    """Returns the rank correlation of the predictions over different layouts. Also returns the spread of
    repeated measurements of a layout, and the rank correlation that their medians would reach."""
    same: dict[Config, list[tuple[float, float]]] = {}
    for row, seconds, predicted in order:
        same.setdefault(row.config, []).append((seconds, predicted))
    medians = {config: statistics.median(s for s, _ in pairs) for config, pairs in same.items()}
    repeated = [[s for s, _ in pairs] for pairs in same.values() if len(pairs) > 1]
    layouts = kendall_tau([(medians[config], pairs[0][1]) for config, pairs in same.items()])
    line = f"order of the {len(same)} different layouts: Kendall's tau {layouts:.2f}"
    if not repeated:
        return line
    spread = max(max(seconds) / min(seconds) - 1 for seconds in repeated)
    exact = kendall_tau([(seconds, medians[row.config]) for row, seconds, _ in order])
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


def memory_report(rows: Sequence[Row]) -> str:
    """Returns a line per row with a measured memory, and the out-of-memory rows."""
    table, verdicts = [["row", "layout", "measured", "predicted", "error %"]], []
    errors: dict[str, list[float]] = {}
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
    """Returns a line per stage of published/stage_memory.csv."""
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
