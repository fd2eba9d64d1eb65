"""The files `latest` and `latest.json` of a --save folder: the newest checkpoint, by name and by identity.

`latest` holds a name only, as DeepSpeed writes it; users edit it to resume from an older checkpoint.
`latest.json` records what the program itself wrote there. If both agree, `latest.json` decides: it is right
even if the job was killed after a checkpoint was renamed and before `latest` was updated. If they differ, a
user has edited `latest`, and `latest` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import add_checksum, has_valid_checksum, read_with_retries
from megatron.checkpoint.lineage.identity import (
    CHECKPOINT_NAME,
    LineageEntry,
    RunIdentity,
    parse_entry,
    parse_lineage,
    parse_run_id,
)
from megatron.checkpoint.names import read_name
from megatron.errors import is_access_error
from megatron.files import HostileFileError, read_json, write_atomically, write_json

LATEST_FILE = "latest"
RECORD_FILE = "latest.json"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatestRecord:
    """The content of `latest.json`.

    latest: the name that `latest` held when this was written. lineage: the run's checkpoints, oldest first,
    up to the newest complete one. upcoming: a checkpoint that is about to be renamed into place.
    """

    latest: str
    run_id: str
    lineage: tuple[LineageEntry, ...]
    origin: Mapping[str, Any] | None = None
    upcoming: LineageEntry | None = None

    @property
    def entries(self) -> tuple[LineageEntry, ...]:
        """The lineage, then the upcoming checkpoint."""
        return self.lineage if self.upcoming is None else (*self.lineage, self.upcoming)

    @property
    def written_names(self) -> set[str]:
        """The names that the program may have left in `latest`."""
        return {self.latest, *([] if self.upcoming is None else [self.upcoming.name])}


def read_latest(folder: Path) -> str | None:
    """The name in `latest`; None if the file is missing or holds anything else. OSError if it cannot be read
    now."""
    name = read_name(folder / LATEST_FILE)
    return name if name is not None and CHECKPOINT_NAME.fullmatch(name) else None


def read_record(folder: Path) -> LatestRecord | None:
    """The content of `latest.json`; None if it is missing or damaged. OSError if it cannot be read now."""
    path = folder / RECORD_FILE
    try:
        record = read_with_retries(path, lambda: read_json(path))
        if not isinstance(record, dict) or not has_valid_checksum(record):
            return None
        run_id, origin = parse_run_id(record["run_id"]), record["origin"]
        if run_id is None or not isinstance(record["latest"], str) or not isinstance(origin, dict | None):
            return None
        lineage, upcoming = parse_lineage(record["lineage"]), parse_entry(record["upcoming"])
    except (OSError, ValueError, KeyError, HostileFileError) as error:
        if is_access_error(error):
            raise
        return None
    return LatestRecord(record["latest"], run_id, lineage, origin, upcoming)


def record_upcoming(folder: Path, upcoming: LineageEntry, identity: RunIdentity) -> None:
    """Records, before a checkpoint is renamed into place, which one that will be."""
    latest = read_latest(folder) or ""
    _write(folder, LatestRecord(latest, identity.run_id, identity.lineage, identity.origin, upcoming))


def set_latest(folder: Path, entry: LineageEntry, identity: RunIdentity) -> None:
    """Writes the name of a complete checkpoint into `latest`. identity: its lineage includes the
    checkpoint."""
    write_atomically(folder / LATEST_FILE, entry.name)
    try:
        _write(folder, LatestRecord(entry.name, identity.run_id, identity.lineage, identity.origin))
    except OSError as error:
        # What `record_upcoming` wrote still describes the folder.
        _LOG.warning("%s cannot be updated: %s", folder / RECORD_FILE, error)


def _write(folder: Path, record: LatestRecord) -> None:
    write_json(folder / RECORD_FILE, add_checksum(asdict(record)), indent=1)
