"""A hook of mkdocs: the site has only docs/, so a link to another file of the repository becomes its path."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page, with `[text](../path)` replaced by `text (path)`."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
