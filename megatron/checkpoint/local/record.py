"""`latest_local` in --save: the local checkpoints of its run that a restart may find on the nodes' disks.

Only the checkpoints in this file are used, so deleting the --save folder forgets the local checkpoints, too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import add_checksum, has_valid_checksum, read_with_retries
from megatron.checkpoint.lineage.identity import LineageEntry, parse_lineage
from megatron.errors import is_access_error
from megatron.files import HostileFileError, read_json, write_json

LOCAL_RECORD_FILE = "latest_local"


@dataclass(frozen=True)
class LocalRecord:
    """The content of `latest_local`. entries: the checkpoints, oldest first. folder: --save-local. nodes: the
    names of the nodes that saved the newest one. folder and nodes are for users."""

    entries: tuple[LineageEntry, ...]
    folder: str
    nodes: tuple[str, ...]


def read_local_entries(save: Path) -> tuple[LineageEntry, ...]:
    """Returns the checkpoints in `latest_local`, oldest first; () if it is missing or damaged. Raises OSError
    if it cannot be read now."""
    path = save / LOCAL_RECORD_FILE
    try:
        record: Any = read_with_retries(path, lambda: read_json(path))
        if not isinstance(record, dict) or not has_valid_checksum(record):
            return ()
        return parse_lineage(record["entries"])
    except (OSError, ValueError, KeyError, HostileFileError) as error:
        if is_access_error(error):
            raise
        return ()


def write_local_record(save: Path, record: LocalRecord) -> None:
    """Writes `latest_local`, or removes it if the record has no checkpoints."""
    path = save / LOCAL_RECORD_FILE
    if record.entries:
        write_json(path, add_checksum(asdict(record)), indent=1)
    else:
        path.unlink(missing_ok=True)
