"""The HTML page that --html of tools/plan.py, tools/sweep.py and tools/verify_dataset.py writes: one file
that loads no other file.

The data, page.css and the scripts are inserted into page.html. The scripts run in this order: base.js
(elements, numbers, sortable tables), chart.js (stacked bars, axes, legends), timeline.js (the schedule),
plan.js, sweep.js and data.js (the sections), main.js.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import megatron
from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.planner.sweep.folder import now_text, version_and_host

Kind = Literal["plan", "search", "recipe", "sweep", "data"]

_SOURCES = Path(__file__).parent / "assets"
_SCRIPTS = ("base.js", "chart.js", "timeline.js", "plan.js", "sweep.js", "data.js", "main.js")
_TITLES: dict[Kind, str] = {
    "plan": "Plan of a run",
    "search": "Search for a layout",
    "recipe": "Recipe for a layout",
    "sweep": "Sweep",
    "data": "Token files",
}
# Only these characters could end a <script> element, or begin a comment in it.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_page(path: Path, kind: Kind, command: str, data: Mapping[str, Any]) -> None:
    """Writes the page to `path`. Raises UserError if the file cannot be written. command: the command line
    that produced the data. data: for a plan `Plan.as_dict()`; for a search, a recipe or a sweep the object
    that --json writes; for token files `data.statistics.dataset_statistics()`."""
    text = page_text(kind, command, data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written ({error.strerror}). Set another file.") from None


def page_text(kind: Kind, command: str, data: Mapping[str, Any]) -> str:
    """Returns the HTML of the page. The arguments are explained at `write_page`."""
    commit = version_and_host()["commit"] or "unknown"
    title = f"{_TITLES[kind]}: {data['title']}" if data.get("title") else _TITLES[kind]
    made = f"{now_text()}, version {megatron.__version__}, commit {commit}"
    parts = {
        "title": html.escape(title),
        "style": (_SOURCES / "page.css").read_text(encoding="utf-8"),
        "data": _script_json({"kind": kind, "title": title, "made": made, "command": command, "data": data}),
        "script": "\n".join((_SOURCES / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    template = (_SOURCES / "page.html").read_text(encoding="utf-8")
    # All placeholders are replaced in one pass, so that a text like {{data}} inside the data does not change.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _script_json(value: Any) -> str:
    """Returns JSON that is safe inside a <script> element. NaN and infinity become strings."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return "".join(_ESCAPES.get(character, character) for character in text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
