"""`latest_local` in --save: the local checkpoints of its run that a restart may find on the nodes' disks.

Only the checkpoints in this file are used, so deleting the --save folder forgets the local checkpoints, too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.files import add_checksum, read_record
from megatron.checkpoint.lineage.identity import LineageEntry, parse_lineage
from megatron.files import write_json

LOCAL_RECORD_FILE = "latest_local"


@dataclass(frozen=True)
class LocalRecord:
    """The content of `latest_local`. entries: the checkpoints, oldest first. folder: --save-local. nodes: the
    names of the nodes that saved the newest one. folder and nodes are for users."""

    entries: tuple[LineageEntry, ...]
    folder: str
    nodes: tuple[str, ...]


def read_local_entries(save: Path) -> tuple[LineageEntry, ...]:
    """Returns the checkpoints in `latest_local`, oldest first. See `read_record` for a file without any."""
    record = read_record(save / LOCAL_RECORD_FILE)
    try:
        return () if record is None else parse_lineage(record["entries"])
    except (ValueError, KeyError):
        return ()


def write_local_record(save: Path, record: LocalRecord) -> None:
    """Writes `latest_local`, or removes it if the record has no checkpoints."""
    path = save / LOCAL_RECORD_FILE
    if record.entries:
        write_json(path, add_checksum(asdict(record)), indent=1)
    else:
        path.unlink(missing_ok=True)
