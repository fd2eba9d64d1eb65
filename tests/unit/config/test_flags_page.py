"""docs/flags.md and the tables of docs/migration.md are generated from the configuration."""

from __future__ import annotations

from pathlib import Path

from megatron.config.flag_parser import make_parser
from megatron.config.flags_page import flags_page, other_frameworks_tables

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_current() -> None:
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == flags_page(), (
        "run .venv/bin/python -m megatron.config.flags_page > docs/flags.md"
    )


def test_the_tables_of_other_frameworks_are_current() -> None:
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{other_frameworks_tables()}\n"), (
        "put what .venv/bin/python -m megatron.config.flags_page --other-frameworks prints "
        "at the end of docs/migration.md"
    )


def test_the_page_has_every_spelling_of_every_flag() -> None:
    page = flags_page()
    spellings = make_parser()._option_string_actions.keys() - {"-h", "--help"}
    assert [spelling for spelling in spellings if f"`{spelling}`" not in page] == []
