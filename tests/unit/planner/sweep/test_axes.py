"""Tests the axes of tools/sweep.py: how they are typed, their product, and invalid axes."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.commands.sweep import build_parser
from megatron.errors import ConfigError, UserError
from megatron.planner.sweep.axes import Axis, make_rows, run_words, split_command

BASE = ["--num-layers", "4", "--global-batch-size", "8", "--micro-batch-size", "1", "--bf16"]


def test_a_command_is_split_into_words_axes_and_base() -> None:
    typed = "run --vary --partition-method type:a|b memory --steps 5 --vary --zero-stage 0 1 -- --lr 1 -- --x"
    words, axes, base = split_command(typed.split())
    assert words == ["run", "--steps", "5"]
    assert axes == [Axis("--partition-method", ("type:a|b", "memory")), Axis("--zero-stage", ("0", "1"))]
    assert base == ["--lr", "1", "--", "--x"]
    # A negative number is a value, not a flag.
    assert split_command(["--vary", "--lr", "-1", "2"])[1] == [Axis("--lr", ("-1", "2"))]
    with pytest.raises(UserError, match="--vary without a flag"):
        split_command(["run", "--vary", "memory", "--", "--lr", "1"])


def test_the_rows_are_the_product_and_the_last_axis_varies_fastest() -> None:
    axes = [Axis("--partition-method", ("memory", "time")), Axis("--micro-batch-size", ("1", "2", "4"))]
    rows = make_rows(axes, BASE)
    assert [tuple(row.settings.values()) for row in rows] == [*product(("memory", "time"), "124")]
    assert rows[4].words == ["--partition-method", "time", "--micro-batch-size", "2"]
    assert run_words(BASE, rows[4].words, 5)[: len(BASE) + 4] == [*BASE, *rows[4].words]


def test_switches_omitted_flags_and_flags_with_several_values() -> None:
    axes = [
        Axis("--checkpoint-activations", ("on", "off")),
        Axis("--exit-signal", ("", "SIGUSR1 SIGUSR2")),
    ]
    assert [row.words for row in make_rows(axes, BASE)] == [
        ["--checkpoint-activations"],
        ["--checkpoint-activations", "--exit-signal", "SIGUSR1", "SIGUSR2"],
        [],
        ["--exit-signal", "SIGUSR1", "SIGUSR2"],
    ]


def test_a_label_can_be_typed() -> None:
    (row,) = make_rows([Axis("--partition-method", ("type:a|b",)), Axis("--fp16", ("on",))], [])
    assert row.label == "--partition-method 'type:a|b' --fp16 on"
    (row,) = make_rows([], BASE)
    assert row.words == [] and row.label == "the base command"


@pytest.mark.parametrize(
    ("axes", "base", "expected"),
    [
        ([Axis("--mikro-batch-size", ("1",))], BASE, "did you mean --micro-batch-size"),
        ([Axis("--lr", ())], BASE, "--lr has no value"),
        ([Axis("--lr", ("1", "1"))], BASE, "value twice"),
        ([Axis("--fp16", ("yes",))], BASE, "on and off"),
        ([Axis("--bf16", ("on", "off"))], BASE, "--bf16 .* the base command sets it"),
        ([Axis("--micro-batch-size", ("", "2"))], BASE, "--micro-batch-size .* the base command sets it"),
        ([Axis("--save", ("x",))], BASE, "save nothing"),
        ([Axis("--exit-interval", ("2",))], BASE, "the sweep sets it"),
        ([Axis("--deepspeed", ("on",))], BASE, "is ignored"),
        (
            [Axis("--partition-method", ("time",)), Axis("--pp-partition-method", ("memory",))],
            BASE,
            "same flag",
        ),
        (
            [Axis("--seed", tuple(map(str, range(40)))), Axis("--lr", tuple(map(str, range(26))))],
            BASE,
            "1,040",
        ),
        ([], [*BASE, "--save", "x"], "--save in the base command"),
        ([], [*BASE, "--dry-run"], "plan command"),
        ([], ["pretrain_gpt.py", *BASE], "unexpected value 'pretrain_gpt.py'"),
    ],
)
def test_what_an_axis_or_a_base_command_cannot_be(axes: list[Axis], base: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_rows(axes, base)


def test_all_mistakes_of_a_sweep_are_in_one_error() -> None:
    words = "run --steps 0 --timeout x --vary --lr --vary --fp16 yes --vary --tensor-model-parallel-size 1 2"
    with pytest.raises(ConfigError) as caught:
        build_parser().parse_args([*words.split(), "--", "--seed", "-x", "--save", "there", "--dry-run"])
    lines = [line.strip() for line in str(caught.value).splitlines()]
    for part in (
        *("--steps 0", "argument --timeout", "--vary --lr has no value", "--vary --fp16 yes"),
        *(
            "--vary --tensor-model-parallel-size without --global-batch-size",
            "--seed",
            "--save in",
            "--dry-run",
        ),
    ):
        assert sum(line.startswith(part) for line in lines) == 1, (part, lines)
    rows = make_rows([Axis("--tensor-model-parallel-size", ("1", "2"))], ["--global-batch-size", "8"])
    assert len(rows) == 2
