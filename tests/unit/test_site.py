"""The documentation site has the README as its home page, and the links of this page lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.end_to_end.command import ROOT


class HomePage(HTMLParser):
    """The text and the link targets of the article of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.targets: list[str] = []
        self._in_article = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_article |= tag == "article"
        if self._in_article:
            self.targets += [value for name, value in attrs if name in ("href", "src") and value]

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"

    def handle_data(self, data: str) -> None:
        if self._in_article:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the site, built with every link checked."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def home(site: Path) -> HomePage:
    """Returns the home page of the site."""
    return HomePage((site / "index.html").read_text())


def words_of(text: str) -> str:
    """Returns the letters and digits of a text, which Markdown and HTML have in the same order."""
    return "".join(re.findall(r"\w", text))


def test_the_home_page_has_the_text_of_the_readme(home: HomePage) -> None:
    readme = (ROOT / "README.md").read_text()
    for heading in re.findall(r"^#+ (.*)$", readme, re.MULTILINE):
        assert heading in home.text
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    paragraphs = [part for part in readme.split("\n\n") if re.match(r"[A-Z]", part) and "](" not in part]
    assert len(blocks) > 5 and len(paragraphs) > 5
    for part in [*blocks, *paragraphs]:
        assert words_of(part) in words_of(home.text)


def test_the_links_and_pictures_of_the_home_page_exist(site: Path, home: HomePage) -> None:
    local = [unquote(target) for target in home.targets if not target.startswith("http")]
    assert len(local) > 10 and any(target.endswith(".svg") for target in local)
    for target in local:
        path, _, anchor = target.partition("#")
        page = site / path
        page = page / "index.html" if page.is_dir() else page
        assert page.is_file(), target
        assert not anchor or f'id="{anchor}"' in page.read_text(), target


def test_the_index_of_all_pages_links_to_the_home_page(site: Path) -> None:
    index = HomePage((site / "pages" / "index.html").read_text())
    assert "All pages" in index.text and ".." in {target.rstrip("/") for target in index.targets}
