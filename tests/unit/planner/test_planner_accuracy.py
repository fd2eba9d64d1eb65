"""Tests benchmarks/planner_accuracy.py: how other programs are described, how errors are counted, and
the command."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import FITTED, least, main, order_of_layouts, time_report
from benchmarks.published_runs import (
    FOLDER,
    IN_USE,
    Program,
    PublishedCluster,
    PublishedNetwork,
    Row,
    read_rows,
    read_stages,
)
from megatron.cluster.devices import A100_80GB
from megatron.mpu.mesh import Mesh
from megatron.planner.network import KINDS
from megatron.planner.rates import RATES, kernel_seconds
from megatron.planner.simulation.passes import Collective, Kernel

ROWS = read_rows()
# Causal attention of 4 x 16 heads of 128 elements, 2048 tokens. The FLOPs count all scores.
FORWARD = Kernel("attention", 4 * 64 * 2048**2 * 128, 1e8, (2048, 2048, 128))
# Both backward kernels of this program together: seven products; the forward kernel has two.
BACKWARD = dataclasses.replace(FORWARD, name="attention_backward", flops=3.5 * FORWARD.flops)


def cluster(**fields: object) -> PublishedCluster:
    program = Program("", **fields)  # type: ignore[arg-type]
    return PublishedCluster("a100", A100_80GB, KINDS["a100"], rates=RATES["a100"], program=program)


def seconds(kernel: Kernel) -> float:
    return kernel_seconds(kernel, A100_80GB, RATES["a100"], "bf16")


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_attention_takes_the_time_of_the_programs_kernel(kernel: Kernel) -> None:
    """FlashAttention computes only the causal half. Its backward pass computes 2.5 times as much as its
    forward pass."""
    flops = FORWARD.flops / 2 * (2.5 if kernel is BACKWARD else 1)
    half = dataclasses.replace(kernel, name=f"flash_{kernel.name}", flops=flops)
    assert cluster().kernel_seconds(kernel, "bf16") == pytest.approx(seconds(half))
    slow = cluster(attention_rate=(0.5, 1.0)).kernel_seconds(kernel, "bf16")
    assert slow == pytest.approx(2 * seconds(half))


@pytest.mark.parametrize(("kernel", "products", "score_bytes"), [(FORWARD, 2, 9), (BACKWARD, 4, 11)])
def test_unfused_attention_has_batched_products_and_moves_the_scores(
    kernel: Kernel, products: int, score_bytes: int
) -> None:
    """arXiv 2205.05198: there are two products forward and four backward. Softmax and dropout read and write
    16-bit scores and masks."""
    parts = cluster(traffic=1.5)._unfused(kernel)
    flops = [part.flops for part in parts if part.flops]
    assert flops == pytest.approx([2 * 64 * 2048**2 * 128] * products)
    moved = sum(part.bytes for part in parts if not part.flops)
    assert moved == pytest.approx(1.5 * score_bytes * 64 * 2048**2)
    misaligned = dataclasses.replace(kernel, product=(2048, 2048, 108))
    unfused = cluster(attention=("unfused", "unfused"))
    assert unfused.kernel_seconds(misaligned, "bf16") > 2 * unfused.kernel_seconds(kernel, "bf16")


def test_other_kernels_move_more_bytes_and_tensor_parallel_collectives_take_longer() -> None:
    other, product = Kernel("add", 0.0, 1e9), Kernel("mm", 1e12, 1e8, (4096, 4096, 4096))
    assert cluster(traffic=2.0).kernel_seconds(other, "bf16") == pytest.approx(2 * seconds(other))
    assert cluster(traffic=2.0).kernel_seconds(product, "bf16") == seconds(product)
    network = KINDS["a100"]
    slower = PublishedNetwork(*vars(network).values(), tensor_latency_s=1.0)
    mesh = Mesh.from_config(ROWS[0].config.parallel, 0)
    for group, more in (("tensor", 1.0), ("data", 0.0)):
        call = Collective(group, "allreduce_", 1e6)
        assert slower.seconds(call, mesh) == pytest.approx(network.seconds(call, mesh) + more)


def test_the_rows_are_runs_of_known_programs() -> None:
    assert len({row.source for row in ROWS}) == len(ROWS)
    assert {row.program for row in ROWS} | {row["program"] for row, _ in read_stages()} == set(
        IN_USE.programs
    )
    for row in ROWS:
        assert row.config.batch.global_batch_size % row.config.parallel.data_parallel_size == 0
        assert row.gpu_kind in RATES and (row.seconds or row.memory_gb or row.out_of_memory)
    bigscience = [row for row in ROWS if row.seconds and row.origin.startswith("bigscience")]
    assert sum(row.is_fitted for row in bigscience) == len(bigscience) // 3


def test_every_fitted_constant_can_be_set() -> None:
    for name in FITTED:
        assert 0 < IN_USE.get(name)
        changed = IN_USE.with_value(name, 0.125)
        owners, _, attribute = name.partition(".")
        assert [changed.get(f"{owner}.{attribute}") for owner in owners.split("+")] == [0.125] * (
            owners.count("+") + 1
        )
        assert changed.with_value(name, IN_USE.get(name)) == IN_USE


def test_the_fit_finds_the_least_cost() -> None:
    found = least(lambda at: abs(at["a"] - 0.62) + (at["b"] / at["a"] - 2) ** 2, {"a": 0.8, "b": 0.5})
    assert found["a"] == pytest.approx(0.62, rel=0.01) and found["b"] == pytest.approx(1.24, rel=0.02)


def layouts(base: Row, times: list[tuple[float, float]], batch: int) -> list[tuple[Row, float, float]]:
    """Returns (row, predicted, measured) for different layouts of one problem."""
    return [
        (
            dataclasses.replace(
                base,
                config=base.config.with_settings(
                    {"batch.global_batch_size": batch, "batch.micro_batch_size": 2**index}
                ),
            ),
            *pair,
        )
        for index, pair in enumerate(times)
    ]


def test_the_order_is_counted_over_the_layouts_of_one_problem() -> None:
    right = layouts(ROWS[0], [(2, 1), (3, 2), (4, 3), (5, 4)], 2048)
    assert order_of_layouts(right) == 1
    wrong = layouts(ROWS[0], [(5, 1), (4, 2), (3, 3)], 1024)
    assert order_of_layouts(right + wrong) == pytest.approx((6 - 3) / 9)
    equal = layouts(ROWS[0], [(1, 1), (1, 2)], 512)
    assert order_of_layouts(equal) == 0
    assert order_of_layouts([*right[:1], *wrong[:1]]) is None
    assert order_of_layouts([right[0], right[0]]) is None  # repetitions of one layout have no order


def test_errors_are_counted_by_program_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in ROWS if row.program == "xla" and row.gpu_kind == "h100")
    rows = [
        dataclasses.replace(row, seconds=10.0, is_fitted=fitted, source=f"a@{index}")
        for index, fitted in enumerate([False] * 5 + [True])
    ]
    times = [11.0, 8.0, 13.0, 6.0, 15.0, 10.1]
    monkeypatch.setattr("benchmarks.planner_accuracy.predict", lambda rows: times)
    lines = [line.split() for line in time_report(rows).splitlines()]
    assert ["unseen", "xla", "h100", "5", "30.0", "50.0", "50.0"] in lines
    assert ["fitted", "on", "all", "all", "1", "1.0", "1.0", "1.0"] in lines
    assert any(line[0] == "a@5*" and line[-1] == "+1.0" for line in lines if line)


def test_the_command_predicts_the_rows_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are small models. The planner's own constants predict them, without a new fit."""
    with (FOLDER / "rows.csv").open() as file:
        reader = csv.DictReader(file)
        rows = [
            row for row in reader if row["program"] == "fsdp eager" and "--num-layers 24 " in row["flags"]
        ]
        fields = reader.fieldnames
    assert fields is not None
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows[:2])
    monkeypatch.setattr("sys.argv", ["planner_accuracy.py", "--rows", str(tmp_path / "rows.csv")])
    main()
    printed = capsys.readouterr().out
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("fitted on  all"))
    assert line[4] == "2" and float(line[5]) < 10
    assert "memory" not in printed
