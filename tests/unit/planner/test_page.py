"""The HTML page of a plan loads no other file, and is safe whatever its data contain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron import __version__
from megatron.errors import UserError
from megatron.planner.page import page_text, write_page
from megatron.planner.sweep.folder import version_and_host


def data_of(page: str) -> object:
    """Returns the data that the page's scripts read."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)["data"]


def test_the_page_loads_nothing() -> None:
    page = page_text("plan", "", {})
    assert re.findall(r"(?:src|href)\s*=\s*(\S+)", page) == ['"data:,">']
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page and "{{" not in page and "innerHTML" not in page


@pytest.mark.parametrize(
    "value",
    ["</script><script>alert(1)</script>", "<!--<script>", "{{style}}", "'\"\\&amp;\u2028\udcff\U0001f600"],
)
def test_every_text_comes_back(value: str) -> None:
    page = page_text("sweep", value, {"reason": value, "rows": [{value: value}]})
    assert data_of(page) == {"reason": value, "rows": [{value: value}]}
    assert page.count("<script") == page_text("sweep", "", {}).count("<script")


def test_the_title_names_the_model_the_devices_and_the_commit() -> None:
    page = page_text("search", "", {"title": "7 B parameters, 8 x a100-80gb <1>"})
    assert "<title>Search for a layout: 7 B parameters, 8 x a100-80gb &lt;1&gt;</title>" in page
    (made,) = re.findall(r'"made":"([^"]*)"', page)
    commit = version_and_host()["commit"] or "unknown"
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\dT\S+, version {re.escape(__version__)}, commit {re.escape(commit)}", made
    )


def test_numbers_that_json_has_not_become_texts() -> None:
    assert data_of(page_text("sweep", "", {"loss": [float("nan"), float("-inf"), 1.5]})) == {
        "loss": ["nan", "-inf", 1.5]
    }


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    write_page(tmp_path / "new" / "page.html", "plan", "", {})
    with pytest.raises(UserError, match="--html .* cannot be written .*Set another file"):
        write_page(tmp_path / "new" / "page.html" / "below.html", "plan", "", {})
