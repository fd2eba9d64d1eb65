"""What a complete checkpoint consists of: every file's size and digest, so that damage is seen and named."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from megatron.checkpoint.integrity.files import open_regular, sync_file

# File name -> {"bytes": size, "sha256": digest in hex}.
Files = dict[str, dict[str, Any]]


def describe_files(folder: Path) -> Files:
    """Size and digest of every file in the folder, each of which is on the disk after this. Collective: the
    ranks share the work, and all get the whole."""
    import torch.distributed as dist

    # One rank lists: on a shared file system another's listing may be older.
    names: list[Any] = [sorted(path.name for path in folder.iterdir()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    (names,) = names
    return _shared(names, lambda name: describe_file(folder / name, to_disk=True))


def first_size_mismatch(folder: Path, files: Files) -> str | None:
    """The first file that is missing or of another size, in words; None if all are there. Reads no file."""
    for name, expected in sorted(files.items()):
        try:
            status = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        size = status.st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes and was written with {expected['bytes']:,}"
    return None


def first_damaged(folder: Path, files: Files) -> str | None:
    """The first file that is not as it was written, in words. Reads all. Collective, as `describe_files`."""

    def describe(name: str) -> dict[str, Any]:
        try:
            return describe_file(folder / name)
        except OSError as error:
            return {"unreadable": str(error)}

    for name, now in _shared(sorted(files), describe).items():
        if "unreadable" in now:
            return f"{name} cannot be read ({now['unreadable']})"
        if now != files[name]:
            return f"{name} is damaged: its digest is not the one that it was written with"
    return None


def add_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a digest of itself."""
    return {**record, "sha256": _digest_of(record)}


def has_valid_checksum(record: dict[str, Any]) -> bool:
    """Whether the record is as `add_checksum` left it."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return record.get("sha256") == _digest_of(content)


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file that is there whole, and on the disk under its name, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", opener=_not_through_a_link) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_file(path.parent)


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _digest_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _shared(names: list[str], describe: Any) -> Files:
    """describe(name) per name, each done by one rank; an OSError of one of them is raised on all."""
    # Imported only now: tools that look at checkpoints have no use for torch, which takes seconds.
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    own: Files | str
    try:
        own = {name: describe(name) for name in names[rank::size]}
    except OSError as error:
        own = str(error)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    for part in parts:
        if isinstance(part, str):
            raise OSError(part)
    return {name: entry for part in parts for name, entry in sorted(part.items())}


def describe_file(path: Path, to_disk: bool = False) -> dict[str, Any]:
    """Size and digest of one file. to_disk: it is on the disk after this."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
        if to_disk:
            os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _digest(file: Any) -> Any:
    """`hashlib.file_digest` of Python 3.10."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest
