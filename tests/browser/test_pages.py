"""Opens the pages of --html in headless Chromium. They render, sort and zoom, and log no error."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from megatron.arguments import read_command_line
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.statistics import dataset_statistics
from megatron.planner import plan_tool
from megatron.planner.command import with_defaults
from megatron.planner.plan_tool import plan_report, search_report
from megatron.planner.sweep.summary import summarize
from megatron.planner.sweep.table import remarks
from megatron.units import GIB
from tests.browser.conftest import Show
from tests.unit.data.token_files import write_documents
from tests.unit.planner.sweep.made import make_record, make_result, make_row

MODEL = (
    "--dry-run --gpu a100-80gb --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 "
    "--global-batch-size 32 --vocab-size 50257"
)
PIPELINE = "--world-size 8 --pipeline-model-parallel-size 4 --zero-stage 1 --micro-batch-size 2"
HOSTILE = """<script>window.broken = 1</script><img src=x onerror="window.broken = 1">'"&amp;{{data}}"""


@pytest.fixture(
    scope="module",
    params=[
        "1f1b",
        pytest.param("dualpipev", marks=pytest.mark.full),
        pytest.param("zero-bubble", marks=pytest.mark.full),
    ],
)
def plan(request: pytest.FixtureRequest) -> dict[str, Any]:
    words, _ = with_defaults([*MODEL.split(), *PIPELINE.split(), "--pipeline-schedule", request.param])
    return plan_report(read_command_line(words, {}).config).data


def cells(browser: Chrome, table: str, column: str) -> list[str]:
    """Returns the texts of a column, from top to bottom."""
    return browser.execute_script(
        "const table = document.getElementById(arguments[0]);"
        "const titles = [...table.querySelectorAll('th')].map((head) => head.textContent.split(' ')[0]);"
        "const index = titles.indexOf(arguments[1]);"
        "return [...table.querySelectorAll('tbody tr')].map((row) => row.cells[index].textContent);",
        table,
        column,
    )


def head(browser: Chrome, table: str, column: str) -> WebElement:
    """Returns the button in the head of a column."""
    return browser.find_element(By.XPATH, f"//*[@id='{table}']//th/button[starts-with(., '{column}')]")


def visible_seconds(timeline: WebElement) -> tuple[float, float]:
    first, last = timeline.get_attribute("data-from"), timeline.get_attribute("data-to")
    assert first is not None and last is not None
    return float(first), float(last)


def pass_widths(browser: Chrome) -> list[float]:
    """Returns the widths of all drawn passes. Each kind of pass is a path of 'M x y h WIDTH v h z'."""
    paths = browser.find_elements(By.CSS_SELECTOR, "#timeline path.passes")
    text = "".join(path.get_attribute("d") or "" for path in paths)
    return [float(width) for width in re.findall(r"M[\d.]+ [\d.]+h([\d.]+)", text)]


def test_the_numbers_of_a_plan_are_shown(show: Show, plan: dict[str, Any]) -> None:
    browser = show("plan", plan)
    text = browser.find_element(By.TAG_NAME, "main").text
    assert f"{plan['parameters']:,}" in text and f"{plan['step']['tokens_per_second']:,.0f}" in text
    assert "Fits with" in text and f"{plan['peak_bytes'] / GIB:.2f}" in text
    assert cells(browser, "memory", "total") == [f"{part['total'] / GIB:.3f}" for part in plan["memory"]]
    assert cells(browser, "stages", "parameters") == [f"{stage['parameters']:,}" for stage in plan["stages"]]
    times = [float(cell) for cell in cells(browser, "stages", "forward")]
    assert times == pytest.approx([stage["forward"] for stage in plan["step"]["stages"]], rel=1e-3)
    assert len(pass_widths(browser)) == len(plan["timeline"])
    assert cells(browser, "what-if", "change") == [one["change"] for one in plan["what_if"]]
    assert cells(browser, "what-if", "fits") == [
        "rejected" if one["fits"] is None else "yes" if one["fits"] else "no" for one in plan["what_if"]
    ]


def test_the_verdict_the_advice_and_the_doubt_stand_on_top(show: Show, plan: dict[str, Any]) -> None:
    verdict = "does not fit (stage 0), 47.40 GiB too much: stage 0 needs: all. Try --zero-stage 1 (fits)"
    step = {**plan["step"], "doubt": "no published run has reached it"}
    browser = show("plan", {**plan, "fits": False, "verdict": verdict, "step": step})
    lines = browser.find_element(By.TAG_NAME, "main").text.splitlines()
    assert lines[0] == f"Plan of a run: {plan['title']}" == browser.title
    assert lines[2:6] == [
        "Does not fit (stage 0), 47.40 GiB too much",
        "Try --zero-stage 1 (fits).",
        "Stage 0 needs: all.",
        "Note: no published run has reached it.",
    ]
    marked = browser.find_elements(By.CSS_SELECTOR, "#what-if tr.selected td:first-child")
    assert [cell.text for cell in marked] == ([plan["best_change"]] if plan["best_change"] else [])


def is_cut(browser: Chrome) -> list[str]:
    """Returns the tables that are wider than their place in a window of 1,400 pixels."""
    script = (
        "return [...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth)"
    )
    browser.set_window_size(1400, 1000)
    found = browser.execute_script(f"{script}.map((one) => one.id)")
    browser.set_window_size(1300, 1000)
    return found


def test_communication_is_that_of_the_chosen_rank(show: Show, plan: dict[str, Any]) -> None:
    browser = show("plan", plan)
    for rank in (1, 3):
        browser.find_element(By.CSS_SELECTOR, f"#rank option[value='{rank}']").click()
        expected: dict[str, int] = {}
        for row in plan["communication"]:
            if row["rank"] == rank:
                expected[row["group"]] = expected.get(row["group"], 0) + row["bytes"]
        shown = zip(cells(browser, "groups", "process"), cells(browser, "groups", "bytes"), strict=True)
        assert dict(shown) == {group: f"{size:,}" for group, size in expected.items()}


def test_a_column_head_sorts_with_mouse_and_keyboard(show: Show, plan: dict[str, Any]) -> None:
    browser = show("plan", plan)
    totals = sorted(part["total"] for part in plan["memory"])
    button = head(browser, "memory", "total")
    button.click()
    assert cells(browser, "memory", "total") == [f"{total / GIB:.3f}" for total in totals]
    button.send_keys(Keys.ENTER)
    assert cells(browser, "memory", "total") == [f"{total / GIB:.3f}" for total in reversed(totals)]
    parent = button.find_element(By.XPATH, "..")
    assert parent.get_attribute("aria-sort") == "descending"
    # Rejected changes have no throughput: they are sorted last in both directions.
    known = sorted(one["tokens_per_second"] for one in plan["what_if"] if one["tokens_per_second"])
    refused = ["–"] * (len(plan["what_if"]) - len(known))
    assert known and refused
    for order in (known, known[::-1]):
        head(browser, "what-if", "throughput").click()
        assert cells(browser, "what-if", "throughput") == [f"{rate:,.0f}" for rate in order] + refused


def test_the_timeline_can_be_zoomed_and_moved(show: Show, plan: dict[str, Any]) -> None:
    browser = show("plan", plan)
    timeline = browser.find_element(By.ID, "timeline")
    end = max(event["end"] for event in plan["timeline"])
    assert visible_seconds(timeline) == pytest.approx((0, end))
    width = max(pass_widths(browser))
    browser.find_element(By.ID, "zoom-in").click()
    first, last = visible_seconds(timeline)
    assert last - first == pytest.approx(end / 1.5) and first == pytest.approx(end / 6)
    assert max(pass_widths(browser)) == pytest.approx(1.5 * width, rel=0.05)
    timeline.send_keys("+")
    assert visible_seconds(timeline)[1] - visible_seconds(timeline)[0] == pytest.approx(end / 1.5**2)

    before = visible_seconds(timeline)
    ActionChains(browser).drag_and_drop_by_offset(timeline, 200, 0).perform()
    after = visible_seconds(timeline)
    assert after[0] < before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", timeline)
    browser.find_element(By.ID, "zoom-reset").click()
    assert visible_seconds(timeline) == pytest.approx((0, end))
    # The pointer is at the middle of the last rank's first pass. The plot is 1,108 units wide, its lanes are
    # 1,042.
    scale = timeline.size["width"] / 1108
    ranks = len(plan["memory"])
    event = next(event for event in plan["timeline"] if event["rank"] == ranks - 1)
    right = 58 + 1042 * (event["start"] + event["end"]) / 2 / end - 1108 / 2
    down = (6 + 24 * ranks - 12) - timeline.size["height"] / scale / 2
    ActionChains(browser).move_to_element_with_offset(timeline, right * scale, down * scale).perform()
    read = [note.text for note in browser.find_elements(By.CSS_SELECTOR, ".note") if "pass of" in note.text]
    expected = f"rank {event['rank']}, stage {event['stage']}: {event['kind']} pass of micro-batch "
    assert read[0].startswith(f"{expected}{event['micro_batch']}, ")

    wheel = ScrollOrigin.from_element(timeline)
    ActionChains(browser).scroll_from_origin(wheel, 0, -100).perform()
    assert visible_seconds(timeline) == pytest.approx((0, end)), "the wheel alone scrolls the page"
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", timeline)
    ActionChains(browser).key_down(Keys.CONTROL).scroll_from_origin(wheel, 0, -100).key_up(
        Keys.CONTROL
    ).perform()
    first, last = visible_seconds(timeline)
    assert 0 < first < last < end


def test_another_layout_of_a_search_is_shown(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is short, and leaves out the changes of one setting, which the page of a plan shows."""
    monkeypatch.setattr(plan_tool, "search", partial(plan_tool.search, planned=2))
    monkeypatch.setattr(plan_tool, "what_if", lambda *_: ())
    words, _ = with_defaults([*MODEL.split(), "--world-size", "2"])
    found = search_report(read_command_line(words, {}).config, words, top=1).data
    browser = show("search", found)
    rates = [one["step"]["tokens_per_second"] for one in found["candidates"]]
    assert len(rates) > 1
    assert cells(browser, "layouts", "throughput") == [f"{rate:,.0f}" for rate in rates]
    browser.find_element(By.XPATH, "//*[@id='layouts']//button[@aria-label='show 2']").click()
    chosen = browser.find_element(By.ID, "chosen").text
    assert is_cut(browser) == []
    titles = [one.text.split()[0] for one in browser.find_elements(By.CSS_SELECTOR, "#layouts th")]
    varied = {one["layout"]["recompute"] for one in found["candidates"]} != {"none"}
    assert "CP" not in titles and ("recompute" in titles) is varied
    assert chosen.startswith("Layout 2\npretrain_gpt.py ") and f"{rates[1]:,.0f}" in chosen
    assert cells(browser, "memory", "total") == [
        f"{part['total'] / GIB:.3f}" for part in found["candidates"][1]["memory"]
    ]
    assert "EP" not in titles and "parameters per token" not in chosen
    for one in found["candidates"]:
        one["layout"]["expert_parallel"], one["active_parameters"] = 1, one["parameters"] // 4
    browser = show("search", found)
    chosen = browser.find_element(By.ID, "chosen").text
    assert cells(browser, "layouts", "EP") == ["1"] * len(rates) and ", EP 1, micro-batch" in chosen
    active = found["candidates"][0]["active_parameters"]
    assert f"parameters per token {active:,} " in " ".join(chosen.split())


def test_a_sweep_shows_what_users_typed_as_text(show: Show) -> None:
    rows = [
        make_row(0, HOSTILE),
        make_row(1, "memory"),
        make_row(2, "time", processes=None, predicted=None, refused=f"no {HOSTILE}"),
    ]
    results = {(row.index, 1): make_result(row, 1, 2.0 - row.index, [3.0, math.nan]) for row in rows[:2]}
    summary = summarize(make_record(*rows, repeat=1, command=f"tools/sweep.py '{HOSTILE}'"), results)
    browser = show("sweep", {**summary, "remarks": remarks(summary)})
    assert cells(browser, "sweep", "--partition-method") == [HOSTILE, "memory", "time"]
    assert cells(browser, "sweep", "status") == ["ok", "ok", "refused"]
    assert cells(browser, "sweep", "loss") == ["nan", "nan", "–"]
    text = browser.find_element(By.TAG_NAME, "main").get_attribute("textContent") or ""
    assert f"row 2 refused: no {HOSTILE}" in text
    head(browser, "sweep", "time").click()
    assert cells(browser, "sweep", "row") == ["1", "0", "2"]
    assert browser.execute_script("return window.broken") is None
    assert browser.find_elements(By.TAG_NAME, "img") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(show: Show, plan: dict[str, Any], scheme: str) -> None:
    """Text and background have a contrast of at least 4.5 (WCAG 2.1, 1.4.3)."""
    browser = show("plan", plan)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    pairs = (("body", "color", "body"), (".note", "color", "body"), ("h2", "color", "body"))
    grounds = [style(browser, ground, "background-color") for *_, ground in pairs]
    colors = [style(browser, node, name) for node, name, _ in pairs]
    ratios = [contrast(a, b) for a, b in zip(colors, grounds, strict=True)]
    assert min(ratios) >= 4.5
    assert (luminance(grounds[0]) > 0.5) == (scheme == "light")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def style(browser: Chrome, node: str, name: str) -> list[int]:
    """Returns red, green and blue of a style of the first matching element."""
    script = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    text = browser.execute_script(script, node, name)
    return [int(part) for part in text.partition("(")[2].rstrip(")").split(",")[:3]]


def luminance(color: list[int]) -> float:
    """Returns the relative luminance (WCAG 2.1)."""
    parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(first: list[int], second: list[int]) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_numbers_of_token_files_are_shown(show: Show, tmp_path: Path) -> None:
    documents = {"a": [[5], [6, 6], [5], [8] * 9, []], HOSTILE: [[6, 6], [7] * 300]}
    prefixes = [write_documents(tmp_path / str(n), content) for n, content in enumerate(documents.values())]
    data = dataset_statistics([IndexedDataset(prefix) for prefix in prefixes])
    data["sets"][1]["prefix"] = data["examples"][0]["text"] = HOSTILE
    browser = show("data", data)
    assert browser.execute_script("return window.broken") is None
    figures = [element.text.split() for element in browser.find_elements(By.CLASS_NAME, "figure")]
    assert [" ".join(words) for words in figures] == [
        *("data sets 2", "documents 7", "tokens 315", "tokens per document 45.0"),
        "duplicates within data sets 14.3 % of documents",
    ]
    assert cells(browser, "sets", "data") == [prefixes[0], HOSTILE]
    assert cells(browser, "sets", "tokens") == ["13", "302"]
    assert cells(browser, "sets", "share") == ["4.1", "95.9"]
    assert cells(browser, "sets", "duplicates") == ["1", "0"] and cells(browser, "sets", "shared") == [
        "1",
        "1",
    ]
    assert cells(browser, "lengths", "documents") == ["1", "2", "2", "0", "1", "0", "0", "0", "0", "1"]
    assert cells(browser, "lengths", "tokens") == ["0", "2", "4", "0", "9", "0", "0", "0", "0", "300"]
    assert cells(browser, "repeated", "copies") == ["2", "2"]
    # The heights of the columns are shares of the documents.
    heights = [
        float(bar.get_attribute("height") or 0) for bar in browser.find_elements(By.CSS_SELECTOR, "svg rect")
    ]
    counts = [1, 2, 2, 1, 1]
    assert [height / heights[0] for height in heights[: len(counts)]] == pytest.approx(counts, rel=1e-3)
    head(browser, "sets", "tokens").click()
    head(browser, "sets", "tokens").click()
    assert cells(browser, "sets", "tokens") == ["302", "13"]
    data["sets"][1] = {**data["sets"][0], "prefix": "/data/corpora/common_crawl_deduplicated_text_document"}
    data["sets"][1] |= {"tokens": 312_345_678_901, "bytes_per_token": 4.2}
    data["sets"][1]["tokenizer"] = "GPT2BPETokenizer 50,257 5f3c8e2a90b1"
    assert is_cut(show("data", data)) == []
