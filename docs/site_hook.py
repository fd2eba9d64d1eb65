"""A hook of mkdocs: the README is the home page, and links to files outside docs/ become their paths."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HOME = "index.md"  # the README on the site; no such file is in docs/
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README as the home page; docs/README.md, the index of all pages, moves to pages/."""
    index = files.get_file_from_path("README.md")
    assert index is not None
    index.name, index.dest_uri = "pages", "pages/index.html"
    readme = Path(config.docs_dir).parent / "README.md"
    files.append(File.generated(config, HOME, content=readme.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with links of the site; a link to a file outside docs/ becomes `text (path)`."""
    folder = (
        "." if page.file.src_uri == HOME else posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    )

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], posixpath.normpath(posixpath.join(folder, link[2])), link[3] or ""
        source = HOME if target == "README.md" else posixpath.relpath(target, "docs")
        if files.get_file_from_path(source):
            return (
                f"[{text}]({posixpath.relpath(source, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
            )
        return link[0] if source[:2] != ".." else f"`{target}`" if text == target else f"{text} (`{target}`)"

    return LINK.sub(replaced, markdown)
