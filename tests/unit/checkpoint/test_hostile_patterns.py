"""Patterns of parameter names in files: matched without `re`, in bounded time, and refused if hostile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.convert.patterns import check_pattern, matches
from megatron.files import HostileFileError
from tests.unit.hostile import bounds, refusal


def test_patterns_match_as_regular_expressions_do() -> None:
    names = [
        "3.mlp.dense.weight",
        "13.mlp.dense.weight",
        "tied_modules.embed.w",
        "a-b",
        "3xmlp.dense",
        "",
        "33",
        "3.w.w",
    ]
    patterns = [r"^\d+\.mlp\.dense\.weight$", r"\d+.mlp.dense", r"^tied_modules\.embed\.w$", "tied", r"a\-b$"]
    patterns += [
        r"\d*",
        r"\d+$",
        r"[0-9]+\.\w+\.\w+$",
        ".*weight$",
        ".+",
        "x",
        r"\w*\d\d*$",
        ".*w.*w$",
        "^",
        "$",
    ]
    for pattern in patterns:
        check_pattern(pattern, Path("f"))
        for name in names:
            assert matches(pattern, name) == bool(re.match(pattern, name)), (pattern, name)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "a|b", "(?=x)", "a{1000}", "[a-z]+", "a++", "x" * 400, "\\", "a^b", 5, r"(\d+)*\."]
)
def test_a_hostile_pattern_is_refused(pattern: object) -> None:
    assert "has the pattern" in refusal(lambda: check_pattern(pattern, Path("f")), HostileFileError)


def test_a_hostile_pattern_that_is_accepted_is_matched_in_bounded_time() -> None:
    with bounds(cpu_s=10.0):
        assert not matches(r"\d*" * 60 + "x", "1" * 200)
        assert not matches(".*" * 100 + "x", "1" * 200)
