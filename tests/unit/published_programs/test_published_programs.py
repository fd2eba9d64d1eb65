"""Published programs: lists of kernels, the assembly of a step, memory, and the search for constants."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.published_programs.classes import IN_USE, PROGRAMS, TRANSFORMER_ENGINE, XLA
from benchmarks.published_programs.fitting import FITTED, MOST_OF_ORIGIN, Fitted, Sample, choose, fit
from benchmarks.published_programs.layer_passes import (
    TENSOR,
    head_backward,
    layer_backward,
    layer_forward,
)
from benchmarks.published_programs.memory import peak_bytes
from benchmarks.published_programs.rows import PublishedRow, SkippedRow, read_rows
from benchmarks.published_programs.shapes import Layout, Model, Program, Shape
from benchmarks.published_programs.steps import Run, divide_layers, pipeline_seconds, predict_step
from megatron.planner.simulation.passes import Collective, Kernel

ROOT = Path(__file__).resolve().parents[3]
ASSET = ROOT / "tests" / "assets" / "published_rows.csv"
FITTED_ROWS = ROOT / "benchmarks" / "published" / "modern.csv"
MODEL = Model(8, 4096, 14336, 32, 8, 128, 128256, 4096, gated=True, rotary=True)
LAYOUT = Layout(8, 8, 1, 1, 1, 1, 1, False, 2, 64, "none")
TP4 = dataclasses.replace(LAYOUT, tensor=4, sequence_parallel=True)
TOKENS = 2 * 4096


def shape_of(program: Program, layout: Layout = LAYOUT) -> Shape:
    return Shape(MODEL, layout, program, program.attention and program.attention[1])


def flops(actions) -> float:
    return sum(action.flops for action in actions if isinstance(action, Kernel))


def sent(actions) -> float:
    return sum(
        action.bytes for action in actions if isinstance(action, Collective) and action.group == TENSOR
    )


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("layout", [LAYOUT, TP4], ids=["TP1", "TP4"])
def test_a_layer_computes_the_products_of_its_parameters_and_half_or_all_of_attention(
    program: Program, layout: Layout
) -> None:
    shape = shape_of(program, layout)
    products = 2 * TOKENS * MODEL.layer_parameters / layout.tensor
    full = 4 * TOKENS * MODEL.seq * MODEL.queries / layout.tensor
    forward, backward = (full, 2 * full) if program.attention is None else (full / 2, 2.5 * full / 2)
    assert flops(layer_forward(shape)) == pytest.approx(products + forward)
    assert flops(layer_backward(shape)) == pytest.approx(2 * products + backward)
    again = shape_of(program, dataclasses.replace(layout, recompute="full"))
    assert flops(layer_backward(again)) == pytest.approx(3 * products + forward + backward)
    head = 2 * TOKENS * MODEL.embedding_parameters / layout.tensor
    assert flops(head_backward(shape)) == pytest.approx(2 * head)


def test_a_layer_with_sequence_parallelism_communicates_as_arxiv_2205_05198_says() -> None:
    each = 2 * TOKENS * MODEL.hidden
    shape = shape_of(TRANSFORMER_ENGINE, TP4)
    # Forward: two gathers and two scatters; backward: the same, and the inputs are gathered again.
    assert sent(layer_forward(shape)) == 4 * each
    assert sent(layer_backward(shape)) == 6 * each
    overlapped = shape_of(TRANSFORMER_ENGINE, dataclasses.replace(TP4, tensor_overlap=True))
    assert sent(layer_forward(overlapped)) == 4 * each
    assert not sent(layer_forward(shape_of(TRANSFORMER_ENGINE)))


def run_of(program: str = "transformer engine", layout: Layout = LAYOUT, gpu: str = "h100-80gb") -> Run:
    row = PublishedRow("a/b@c:d", "x", program, (), gpu, "bf16", MODEL, layout, 1.0, None, False)
    return row.run(IN_USE)


def test_overlap_of_tensor_parallel_collectives_shortens_a_step() -> None:
    alone, chunked = (
        predict_step(run_of(layout=dataclasses.replace(TP4, tensor_overlap=overlap))).total
        for overlap in (False, True)
    )
    assert 0.8 * alone < chunked < alone


def test_sharded_weights_cost_only_what_computation_does_not_hide() -> None:
    layout = dataclasses.replace(LAYOUT, zero=3, gpus=64, global_batch=512)
    run = run_of("xla", layout)
    slow = dataclasses.replace(run.machine.network, inter_bytes_per_s=1e9)
    limited = dataclasses.replace(run, machine=dataclasses.replace(run.machine, network=slow))
    weights = MODEL.layers * MODEL.layer_parameters * 2 * 63 / 64
    # Two gatherings and a reduction per micro-batch, at 1 GB/s per node.
    assert predict_step(limited).pipeline > 4 * 3 * weights / 1e9
    local = dataclasses.replace(run, program=dataclasses.replace(XLA, shards_weights=False))
    assert predict_step(run).total < 1.25 * predict_step(local).total


@pytest.mark.parametrize(
    ("program", "layers", "stages", "chunks", "expected"),
    [
        ("transformer engine", 8, 4, 2, (1,) * 8),
        ("transformer engine", 126, 8, 8, (1, *[2] * 62, 1)),
        ("transformer engine", 9, 4, 1, (3, 2, 2, 2)),
        # 16 layers of 1.34B parameters, whose LM head is as large as 4 of them.
        ("nanotron", 16, 4, 1, (6, 5, 5, 0)),
    ],
)
def test_layers_are_divided_as_the_programs_do(program, layers, stages, chunks, expected) -> None:
    model = Model(layers, 2048, 8192, 32, 32, 64, 131072, 4096, gated=True)
    layout = dataclasses.replace(LAYOUT, pipeline=stages, chunks=chunks)
    assert divide_layers(PROGRAMS[program], model, layout) == expected
    assert sum(expected) == layers


def test_the_extrapolated_pipeline_is_the_simulated_one() -> None:
    # Equal stages without transfers: (micro-batches + stages - 1) x (forward + backward), arXiv 2104.04473.
    for count in (4, 12, 13, 500):
        assert pipeline_seconds((1.0,) * 4, (2.0,) * 4, 0.0, count, 1) == pytest.approx(3 * (count + 3))
    # Two chunks per rank halve the bubble.
    assert pipeline_seconds((0.5,) * 8, (1.0,) * 8, 0.0, 400, 2) == pytest.approx(3 * (400 + 1.5))


def test_memory_of_a_rank_by_hand() -> None:
    layout = dataclasses.replace(LAYOUT, pipeline=4, gpus=8)
    run = run_of(layout=layout)
    parameters = 2 * MODEL.layer_parameters + MODEL.embedding_parameters
    kept = 8 * MODEL.hidden + 2 * (2 * MODEL.queries + 2 * MODEL.keys + 3 * MODEL.ffn)
    # Weights and fp32 gradients, the optimizer over two ranks, and four micro-batches of two layers; the last
    # rank has one micro-batch and the logits.
    first = parameters * (2 + 4 + 12 / 2) + 4 * 2 * TOKENS * kept
    last = parameters * (2 + 4 + 12 / 2) + 2 * TOKENS * kept + 10 * TOKENS * MODEL.vocab
    assert peak_bytes(run) == pytest.approx(max(first, last))
    again = run_of(layout=dataclasses.replace(layout, recompute="full"))
    assert peak_bytes(again) == pytest.approx(
        parameters * 12
        + max(
            4 * 2 * TOKENS * 2 * MODEL.hidden + TOKENS * kept,
            2 * TOKENS * 2 * MODEL.hidden + 10 * TOKENS * MODEL.vocab,
        )
    )


def test_rows_are_read_with_the_rules_and_the_others_say_why_not() -> None:
    rows, skipped = read_rows(ASSET)
    assert Counter(row.program for row in rows) == {
        "fsdp eager": 3,
        "transformer engine": 3,
        "xla": 1,
        "fsdp compiled": 1,
        "nanotron": 5,
    }
    assert Counter(row.reason for row in skipped) == {
        "fp8, whose rates are not known": 1,
        "gpus not stated": 1,
    }
    assert all(isinstance(row, SkippedRow) for row in skipped)
    by_name = {row.title: row for row in rows}
    nemo = by_name["NeMo 24.09 container, Llama 3.1 405B"]
    assert nemo.layout.tensor_overlap and nemo.layout.micro_batches == 63 and nemo.model.vocab == 51200
    assert dict(nemo.changes) == {"gradient": 2, "reduced": 2}
    megatron = by_name["Megatron-LM core, pretrain_gpt.py functional test"]
    assert megatron.run(IN_USE).program.deterministic and megatron.run(IN_USE).shape.attention == "flash"
    limited = by_name["torchtitan 9dec370 (FSDP2)"].run(IN_USE).machine
    assert limited.gpu.bandwidth == 2.4e12
    assert limited.rates.products == IN_USE.rates["h100"].products * IN_USE.limited_products
    unstated = by_name["NeMo (25.05 release), Nemotron-4 340B"]
    assert unstated.layout.recompute == "" and unstated.run(IN_USE).layout.recompute == "none"
    assert unstated.layout.sequence_parallel and unstated.model.vocab == 256000
    assert sum(row.is_dubious for row in rows) == 1
    assert {row.origin for row in rows if row.program == "nanotron"} == {"vinjn/nanotron-ultrascale-playbook"}


def test_recomputation_that_is_not_stated_is_full_if_nothing_else_fits() -> None:
    large = dataclasses.replace(LAYOUT, micro_batch=32, recompute="")
    assert run_of(layout=large).layout.recompute == "full"
    assert run_of(layout=dataclasses.replace(large, micro_batch=1)).layout.recompute == "none"


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("precision", "fp8", "fp8, whose rates are not known"),
        ("recompute", "every other layer", "recompute is every other layer"),
        ("layers", "", "layers not stated"),
        ("gpus", "36", "a layout that does not divide"),
        ("global_batch_size", "1001", "does not divide the batch"),
        ("gpu", "mi300x", "a GPU that is not in the table: mi300x"),
        ("program", "a program of my own", "a program without a class"),
        ("pipeline_parallel", "2", "a pipeline with sharded weights"),
    ],
)
def test_what_cannot_be_predicted_is_skipped(tmp_path: Path, column: str, value: str, reason: str) -> None:
    row = _edited_row(tmp_path, {column: value})
    assert isinstance(row, SkippedRow) and reason in row.reason


def test_a_program_without_sharded_weights_shards_them_with_zero_3(tmp_path: Path) -> None:
    plain, sharded = (_edited_row(tmp_path, {"program": "NeMo", "zero_stage": stage}) for stage in "13")
    assert peak_bytes(sharded.run(IN_USE)) < 0.6 * peak_bytes(plain.run(IN_USE))
    assert sharded.run(IN_USE).program.shards_weights and not plain.run(IN_USE).program.shards_weights


def _edited_row(folder: Path, changes: dict[str, str]) -> PublishedRow | SkippedRow:
    """The asset's first row, with other values."""
    with ASSET.open() as file:
        values = next(csv.DictReader(file)) | changes
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, values)
        writer.writeheader()
        writer.writerow(values)
    rows, skipped = read_rows(path)
    (row,) = rows + skipped
    return row


def test_the_fitted_rows_are_a_part_of_each_repository() -> None:
    rows, skipped = read_rows(FITTED_ROWS)
    assert not skipped and not any(row.is_dubious for row in rows)
    assert max(Counter(row.origin for row in rows).values()) <= MOST_OF_ORIGIN
    assert len({row.source for row in rows}) == len(rows)
    sources = {
        "a": [f"a@1:L{line}" for line in range(10)],
        "b": ["b@1:L1", "b@1:L2"],
        "c": [str(i) for i in range(500)],
    }
    chosen = choose(sources)
    assert [len(chosen.intersection(of_origin)) for of_origin in sources.values()] == [3, 0, MOST_OF_ORIGIN]


def test_the_fit_finds_the_constants_that_made_the_samples() -> None:
    true = IN_USE.with_value("h100+h200.products", 0.62).with_value("transformer engine.traffic", 1.3)
    layouts = [dataclasses.replace(LAYOUT, micro_batch=size) for size in (1, 2, 4)]
    layouts += [TP4, dataclasses.replace(LAYOUT, recompute="full"), dataclasses.replace(TP4, micro_batch=8)]
    models = [MODEL, dataclasses.replace(MODEL, hidden=8192, ffn=28672, heads=64, vocab=32000)]
    samples = []
    for model in models:
        for layout in layouts:
            row = PublishedRow(
                "a/b@c", "x", "transformer engine", (), "h100-80gb", "bf16", model, layout, 1, None, False
            )
            samples.append(Sample(row.run, predict_step(row.run(true)).total, "a/b", "h100"))
    fitted = (Fitted("h100+h200.products", 0.7, 0.5), Fitted("transformer engine.traffic", 1.8, 0.5))
    found = fit(samples, IN_USE, fitted)
    assert found.get("h200.products") == found.get("h100+h200.products") == pytest.approx(0.62, rel=0.01)
    assert found.get("transformer engine.traffic") == pytest.approx(1.3, rel=0.05)


def test_every_fitted_constant_can_be_set_and_lies_below_its_limit() -> None:
    for constant in FITTED:
        assert 0 < IN_USE.get(constant.name) <= constant.most
        assert IN_USE.with_value(constant.name, 0.125).get(constant.name) == 0.125
        # A fit from the start would not move far from what is in use.
        assert abs(math.log(IN_USE.get(constant.name) / constant.expected)) < 2 * max(constant.width, 0.7)
