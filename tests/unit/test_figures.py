"""The figures of the documentation are what docs/figures/make.py draws."""

from __future__ import annotations

import runpy
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.end_to_end.command import ROOT

FIGURES = ROOT / "docs" / "figures"
sys.path.append(str(FIGURES))  # where a script finds the modules beside it
DRAWN = runpy.run_path(str(FIGURES / "make.py"))["FIGURES"]


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_current(name: str) -> None:
    assert (FIGURES / name).read_text() == DRAWN[name](), "run: python docs/figures/make.py"
    ET.parse(FIGURES / name)


def test_no_figure_is_left_over() -> None:
    assert {path.name for path in FIGURES.glob("*.svg")} == set(DRAWN)
