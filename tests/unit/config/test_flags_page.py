"""docs/flags.md is generated from the config."""

from __future__ import annotations

from pathlib import Path

from megatron.config.cli import make_parser
from megatron.config.flags_page import flags_page

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == flags_page(), (
        "run .venv/bin/python -m megatron.config.flags_page > docs/flags.md"
    )


def test_the_page_has_every_spelling_of_every_flag() -> None:
    page = flags_page()
    spellings = make_parser()._option_string_actions.keys() - {"-h", "--help"}
    assert [spelling for spelling in spellings if f"`{spelling}`" not in page] == []
