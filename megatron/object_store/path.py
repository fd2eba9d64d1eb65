"""Paths in an object store: `ObjectPath` has the methods of `Path` with which a program inspects a folder.

The text of such a path is a URL. A path exists if `ObjectTree` knows that it is in the store. Opening a path
opens the object's file in the node's cache, which exists once the object was downloaded. Only `write_bytes`
sends a request.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import Any, NoReturn

from megatron.object_store.cache import explained_full_disk
from megatron.object_store.store import ObjectInfo, ObjectStore, is_url

# In a store, the folder of a save has a suffix that no other save uses. In a tree its name has no suffix.
_SUFFIX = re.compile(r"(/global_step[0-9]+)\.[0-9a-f]{8}$")


@dataclass
class ObjectTree:
    """What is known about the objects below a URL. Keys in this tree may differ from the keys in the store.

    cache: the folder on this node's disk for the files of the objects. folders: folder -> path in it ->
    object; objects that are in no folder are under "".
    """

    store: ObjectStore
    cache: Path
    folders: dict[str, dict[str, ObjectInfo]] = field(default_factory=dict)

    def keep(self, key: str, content: bytes, modified: float | None = None) -> None:
        """Adds an object with this content, and writes its file to the disk. modified: its time; None for
        now."""
        path = self.cache / key
        with explained_full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.new")  # so readers see the old content or the new one
            temporary.write_bytes(content)
            os.replace(temporary, path)
        folder, name = _split(key)
        self.folders.setdefault(folder, {})[name] = ObjectInfo(len(content), modified or time.time())

    def names(self, key: str) -> list[str]:
        """Returns the sorted names in a folder; [] if it does not exist."""
        if not key:
            return sorted({*self.folders, *self.folders.get("", ())} - {""})
        folder, _, inside = f"{key}/".partition("/")
        below = (
            path.removeprefix(inside) for path in self.folders.get(folder, ()) if path.startswith(inside)
        )
        return sorted({path.partition("/")[0] for path in below})

    def is_folder(self, key: str) -> bool:
        """Returns whether the tree has an object in this folder."""
        return bool(self.names(key) if key else self.folders)

    def info(self, key: str) -> ObjectInfo | None:
        """Returns what is known about an object; None if it does not exist."""
        folder, name = _split(key)
        return self.folders.get(folder, {}).get(name)


def _split(key: str) -> tuple[str, str]:
    folder, _, path = key.partition("/")
    return (folder, path) if path else ("", folder)


class ObjectPath(PosixPath):
    """The path of an object, or of a folder of objects. All other methods of `Path` fail, or use the file in
    the cache."""

    def __new__(cls, *_: Any) -> ObjectPath:
        return object.__new__(cls)

    def __init__(self, tree: ObjectTree, key: str = "") -> None:
        self.tree, self.key = tree, key

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the name: the other process has not listed the folder, and may have a different
        disk."""
        return ObjectPath, (ObjectTree(ObjectStore(self.tree.store.url), Path(os.devnull)), self.key)

    def __str__(self) -> str:
        return self.tree.store.url_of(self.key)

    def __fspath__(self) -> str:
        return os.fspath(self.tree.cache / self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)

    def __gt__(self, other: Any) -> bool:
        return str(self) > str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: Any) -> ObjectPath:
        return ObjectPath(self.tree, f"{self.key}/{name}" if self.key else str(name))

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.tree, self.key.rpartition("/")[0])

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Returns kind, size and time of change of an object; of a folder only the kind."""
        if (info := self.tree.info(self.key)) is None:
            if self.is_dir():
                return os.stat_result((stat.S_IFDIR, *[0] * 9))
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        times = (*[int(info.modified)] * 3, *[info.modified] * 3, *[int(info.modified * 1e9)] * 3)
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, info.size, *times))

    def lstat(self) -> os.stat_result:
        return self.stat()

    def exists(self, *_: Any, **__: Any) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, *_: Any, **__: Any) -> bool:
        return self.tree.info(self.key) is not None

    def is_dir(self, *_: Any, **__: Any) -> bool:
        return self.tree.is_folder(self.key)

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[ObjectPath]:  # type: ignore[override]
        return (self / name for name in self.tree.names(self.key))

    def glob(self, pattern: str, *_: Any, **__: Any) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yields the files and folders directly in this folder whose names match the pattern."""
        assert "/" not in pattern
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def write_bytes(self, content: Any) -> int:
        """Writes the object to the store, and its file to the cache. Returns the number of bytes."""
        self.tree.store.put(self.key, bytes(content))
        self.tree.keep(self.key, content)
        return len(content)

    def _is_read_only(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error. It replaces methods that would change or list only the cache, not the store."""
        raise TypeError(f"{self}: objects are written and removed through the store")

    mkdir = rmdir = unlink = rename = replace = touch = chmod = symlink_to = write_text = _is_read_only
    hardlink_to = rglob = walk = _is_read_only


def real_path(path: str | os.PathLike[str]) -> str:
    """Returns a text that is equal for all names of a folder: its path without links, or its URL."""
    text = str(path)
    return _SUFFIX.sub(r"\1", text.rstrip("/")) if is_url(text) else os.path.realpath(path)
