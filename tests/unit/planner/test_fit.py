"""Tests whether a plan fits a device, the table of planned memory, and the lines of a ramp-up."""

from __future__ import annotations

import os
import re
from functools import cache

import pytest

from megatron.arguments import parse_args
from megatron.planner.dry_run import memory_table, planned_run_report
from megatron.planner.fit import free_saving, remedies, smaller_plans, with_verdict
from megatron.planner.in_flight import InFlight, in_flight_micro_batches, in_flight_on_rank
from megatron.planner.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION
from megatron.planner.plan import Plan, make_plan
from megatron.training.out_of_memory import UNPREDICTED
from megatron.units import GIB
from tests.unit.config.command_lines import SMALL

VOCAB = 50_000
SIZES = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings "
    "1024 --global-batch-size 64 --lr 1e-3 --train-samples 9600 --bf16 --dry-run"
).split()
MODEL = [*SIZES, *"--micro-batch-size 4 --world-size 4 --pipeline-model-parallel-size 2".split()]


@cache
def _plan_of(flags: str, kernels: str | None) -> Plan:
    return make_plan(parse_args([*MODEL, *flags.split()], {}), VOCAB)


def plan_of(flags: str = "") -> Plan:
    return _plan_of(flags, os.environ.get("MEGATRON_KERNELS"))


def summary_of(flags: str) -> tuple[bool | None, str]:
    plan = with_verdict(plan_of(flags))
    return plan.fits, plan.verdict


def test_without_a_device_there_is_no_verdict():
    assert summary_of("") == (None, "")


def test_what_is_to_spare_is_the_device_less_the_plan_and_the_reserve():
    plan = plan_of()
    largest = max(part.total for part in plan.memory)
    # There are three communicators: all ranks; data parallel; pipeline parallel, with the stages of the tied
    # weight.
    reserve = CONTEXT_BYTES + 3 * COMMUNICATOR_BYTES + FRAGMENTATION * largest
    assert plan.reserve_bytes == reserve
    fits, sentence = summary_of("--device-memory 64")
    assert fits and sentence.startswith(
        f"fits with {64 - (largest + reserve) / GIB:.2f} GiB to spare: stage 0 "
    )
    assert "v100-32gb" in summary_of("--gpu v100-32gb")[1]


def test_a_plan_fits_to_the_byte():
    plan = plan_of()
    need = (plan.peak_bytes + plan.reserve_bytes) / GIB
    assert summary_of(f"--device-memory {need + 1e-6}")[0]
    assert not summary_of(f"--device-memory {need - 1e-6}")[0]


def test_an_overflow_names_the_stages_and_flags_with_their_new_totals(monkeypatch):
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")  # then dropout keeps its masks
    fits, sentence = summary_of("--device-memory 8")
    assert not fits and "does not fit" in sentence and "stage 0 needs" in sentence
    found = re.findall(r"[ ,](--[\w -]+) \(([\d.]+) GiB, fits\)", sentence)
    assert found
    for flags, size in found:
        assert float(size) == pytest.approx(plan_of(flags).peak_bytes / GIB, abs=0.006)


def flag_sets(flags: str) -> list[str]:
    """Returns the sets of flags that are suggested for a run, as typed."""
    plan = make_plan(parse_args([*SIZES, *flags.split()], {}), VOCAB)
    found = remedies(plan)
    assert all(changed.peak_bytes < plan.peak_bytes for _, changed in found)
    return [" ".join(one.values()) for one, _ in found]


@pytest.mark.parametrize(
    "flags",
    [
        "--world-size 8 --micro-batch-size 1 --gpu a100-80gb --num-layers 32 --hidden-size 4096",
        pytest.param(
            "--world-size 8 --micro-batch-size 8 --gpu a100-80gb --num-layers 32 --hidden-size 4096",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "--world-size 4 --micro-batch-size 16 --gpu v100-16gb --tensor-model-parallel-size 2 "
            "--num-layers 24",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_fastest_flags_that_fit_come_first(flags: str) -> None:
    words = [*SIZES, *flags.split()]
    plan = make_plan(parse_args(words, {}), VOCAB)
    found = remedies(plan)
    assert plan.fits is False and 0 < len(found) <= 3
    rates = []
    for one, changed in found:
        again = make_plan(parse_args([*words, *" ".join(one.values()).split()], {}), VOCAB)
        assert (again.peak_bytes, again.fits) == (changed.peak_bytes, True)
        rates.append((not UNPREDICTED & set(one), again.tokens_per_second))
    assert rates == sorted(rates, reverse=True)
    # ZeRO-1 costs no time. So the first suggestion is at least as fast as ZeRO-1 or, if ZeRO-1 does not
    # suffice, as ZeRO-1 with a further flag.
    with_zero = make_plan(parse_args([*words, "--zero-stage", "1"], {}), VOCAB)
    others = [with_zero] if with_zero.fits else [made for _, made in smaller_plans(with_zero) if made.fits]
    assert rates[0][1] >= max(made.tokens_per_second for made in others)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Activations dominate.
        (
            "--world-size 1 --micro-batch-size 16 --device-memory 9",
            ["--recompute-granularity selective", "--micro-batch-size"],
        ),
        # The state dominates.
        (
            "--world-size 8 --micro-batch-size 1 --checkpoint-activations --device-memory 5",
            ["--zero-stage 1", "--tensor"],
        ),
    ],
)
def test_without_a_gpu_the_usually_cheaper_flags_come_first(flags: str, expected: list[str]) -> None:
    found = flag_sets(flags)
    assert [one for one, start in zip(found, expected, strict=False) if one.startswith(start)] == found[:2]


@pytest.mark.full  # dozens of plans
def test_advice_distributes_experts_and_names_no_set_of_flags_twice() -> None:
    """The search can reach EP 4 in two ways: directly, and from EP 2. It must name the flags of EP 4
    only once."""
    found = flag_sets(
        "--world-size 16 --gpu a100-40gb --zero-stage 1 --num-layers 16 --hidden-size 2048 --seq-length 4096 "
        "--max-position-embeddings 4096 --position-embedding-type rotary --normalization RMSNorm "
        "--glu-activation swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
        "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --hidden-dropout 0 "
        "--attention-dropout 0 --micro-batch-size 1 --global-batch-size 256"
    )
    assert "--expert-model-parallel-size 4" in found and len(set(found)) == len(found)


def test_flags_that_are_set_or_not_possible_are_not_named() -> None:
    found = flag_sets(
        "--world-size 1 --micro-batch-size 1 --checkpoint-activations --cpu-offload --device-memory 1"
    )
    assert not any(re.match("--(micro|checkpoint|cpu|zero|tensor|pipeline)", flag) for flag in found)


def test_an_unpredicted_time_is_not_compared() -> None:
    alone = "--world-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1 --num-layers 64"
    fits, sentence = summary_of(f"{alone} --checkpoint-activations --gpu v100-16gb")
    assert not fits and "Try --cpu-offload (" in sentence
    assert sentence.endswith(" GiB, fits, slower by an unpredicted time)")


def test_a_plan_that_fits_says_that_zero_1_is_free() -> None:
    saving = free_saving(plan_of("--gpu a100-80gb"))
    less = plan_of("").peak_bytes - plan_of("--zero-stage 1").peak_bytes
    assert saving.startswith(f"--zero-stage 1 saves {less / GIB:.2f} GiB per device, costs no time (+")
    # ZeRO-1 is already set, there is no replica, or there is no predicted time.
    for flags in ("--gpu a100-80gb --zero-stage 1", "--gpu a100-80gb --world-size 2", ""):
        assert free_saving(plan_of(flags)) == ""


def test_the_table_has_a_row_per_stage_whose_parts_add_up():
    plan = plan_of()
    header, *rows = (line.split() for line in memory_table(plan).splitlines())
    assert header == "stage state activations head temporaries tables total host work".split()
    for row, part in zip(rows, plan.memory, strict=True):
        *parts, total, _ = map(float, row[1:8])
        assert sum(parts) == pytest.approx(total, abs=0.003) and total == pytest.approx(
            part.total / GIB, abs=6e-4
        )
    assert sum(float(row[8]) for row in rows) == pytest.approx(100, abs=0.1)


def test_offloaded_state_is_in_host_memory():
    on_device, offloaded = plan_of().memory[0], plan_of("--cpu-offload").memory[0]
    assert on_device.host == 0
    # Master weights and moments move (12 bytes). fp32 gradients and 16-bit weights have a copy on the host.
    assert offloaded.host == pytest.approx(18 / 12 * (on_device.state - offloaded.state), rel=1e-3)


def test_a_ramp_up_has_its_steps_and_efficiency():
    text = planned_run_report(plan_of("--rampup-batch-size 16 16 960"))
    # Each of the sizes 16, 32 and 48 gets 320 samples: 20, 10 and 7 steps of 2, 4 and 6 micro-batches on 2
    # stages.
    assert "37 steps at batches of 16 to 48, pipeline efficiency 0.667 in the first step" in text
    assert f"{(20 * 2 + 10 * 4 + 7 * 6) / (20 * 3 + 10 * 5 + 7 * 7):.3f} on average" in text


def test_the_copy_of_a_background_save_is_planned_in_host_memory() -> None:
    """Each of 2 replicas saves half of a stage's fp32 values and moments, and about half of its bf16 weights,
    with an error of up to a layer."""
    before = plan_of("--zero-stage 1")
    plan, stages = (
        plan_of("--zero-stage 1 --async-save --save-interval 9 --save checkpoints"),
        before.run.stages,
    )
    for stage, (with_copy, without) in enumerate(zip(plan.memory, before.memory, strict=True)):
        layers = stages.parameters[stages.bounds[stage] : stages.bounds[stage + 1]]
        copy = with_copy.host - without.host - (1 << 24)
        assert 0 <= copy - (12 + 2) * sum(layers) / 2 <= 2 * max(layers)
        assert (with_copy.total, without.host) == (without.total, 0)
    limited = plan_of("--async-save --save-interval 9 --save checkpoints --async-save-memory-gb 0.1").memory
    assert [part.host for part in limited] == [1e8, 1e8]


def test_the_stages_of_an_interleaved_rank_do_not_have_most_in_flight_at_the_same_time() -> None:
    words = "--world-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 2"
    config = parse_args([*SMALL, *words.split(), "--num-layers", "4", "--global-batch-size", "32"], {})
    assert in_flight_on_rank(config, 0)[0] == {0: InFlight(3), 2: InFlight(2)}
    assert in_flight_micro_batches(config) == [4, 3, 2, 1]
