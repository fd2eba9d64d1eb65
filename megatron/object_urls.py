"""URLs of folders in object stores, and paths in their mirrors.

A mirror is a folder on a node's disk that stands for a URL, see `megatron.checkpoint.object_store.mirror`.
Users see the URL.
"""

import os
import re
from typing import Any

# Begins the name of a mirror's folder: object-store-<user id>-<16 hexadecimal digits>.
MIRROR = "object-store-"
_PATH = re.compile(rf"(?:/[^/\s]*)*/{MIRROR}[0-9]+-[0-9a-f]{{16}}/([a-z][a-z0-9+.-]*)/")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as s3://bucket/run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def as_urls(text: str) -> str:
    """Returns the text with each path in a mirror as its URL."""
    return _PATH.sub(r"\1://", text)


def settings_with_urls(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run with the URLs of --save and --load in place of their mirrors, whose paths
    differ between the nodes."""
    checkpoint = settings["checkpoint"]
    paths = {name: as_urls(checkpoint[name]) for name in ("save", "load") if checkpoint.get(name)}
    return {**settings, "checkpoint": {**checkpoint, **paths}}


def is_mirrored(path: str) -> bool:
    """Returns whether a path is in a mirror."""
    return _PATH.match(path) is not None
