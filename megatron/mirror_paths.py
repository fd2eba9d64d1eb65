"""Paths in the mirror of an object store, the folder on a node's disk that stands for a URL.

See `megatron.checkpoint.object_store.mirror`. Users see the URL of such a path.
"""

import re

# Begins the name of a mirror's folder: object-store-<user id>-<16 hexadecimal digits>.
MIRROR = "object-store-"
_PATH = re.compile(rf"(?:/[^/\s]*)*/{MIRROR}[0-9]+-[0-9a-f]{{16}}/([a-z][a-z0-9+.-]*)/")


def as_urls(text: str) -> str:
    """Returns the text with each path in a mirror as its URL."""
    return _PATH.sub(r"\1://", text)


def is_mirrored(path: str) -> bool:
    """Returns whether a path is in a mirror."""
    return _PATH.match(path) is not None
