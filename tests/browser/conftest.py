"""A headless Chromium that shows pages of --html, through Selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from megatron.planner.page import Kind, write_page

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1300,1000"),
)
Show = Callable[[Kind, Mapping[str, Any]], Chrome]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "Chromium is not installed: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    options = ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture
def show(chromium: Chrome, tmp_path: Path) -> Iterator[Show]:
    """Returns a function that writes a page and opens it. After the test the browser's console must be
    empty."""

    def open_page(kind: Kind, data: Mapping[str, Any]) -> Chrome:
        path = tmp_path / "page.html"
        write_page(path, kind, "tools/plan.py", data)
        chromium.get(path.as_uri())
        return chromium

    chromium.get_log("browser")
    yield open_page
    assert chromium.get_log("browser") == []
