"""A hook of mkdocs: the site has only docs/, so it shows the path of any other file in place of a link."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Returns the page with `[text](../path)` replaced by `text (path)`."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
