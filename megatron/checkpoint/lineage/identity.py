"""The identity of a run, and its records in `run.json`, `latest` and `latest.json`.

Names such as `global_step4` occur in every run, so they do not identify a checkpoint. `run.json` therefore
holds `run_id` (128 random bits, created when a run starts in a --save folder) and `lineage`: the earlier
checkpoints, oldest first, each with the digest of its `run.json`. Checkpoints from before run ids have a
lineage of names only; they can still be read.

`latest` in a --save folder holds the name of the newest checkpoint, as DeepSpeed writes it; users edit it to
resume from an older one. `latest.json` records what the program itself wrote into `latest`. If the two agree,
`latest.json` decides: it is right even if the job was killed after a checkpoint was renamed and before
`latest` was updated. If they differ, a user has edited `latest`, and `latest` decides.

`latest_local` lists the local checkpoints of the run that a restart may find on the nodes' disks. Only the
checkpoints in this file are used, so deleting the --save folder forgets the local checkpoints, too.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import add_checksum, read_record, write_small
from megatron.checkpoint.latest import MissingCheckpointError, read_latest_file
from megatron.files import write_json

LATEST_FILE = "latest"
RECORD_FILE = "latest.json"
LOCAL_RECORD_FILE = "latest_local"
CHECKPOINT_NAME = re.compile(r"global_step([0-9]{1,12})")
# Maximum length of a lineage: enough for every checkpoint that may be deleted or resumed.
MAX_LINEAGE = 1000
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LineageEntry:
    """A checkpoint of a run. sha256: the checksum that `run.json` holds of itself. run_id and sha256 are None
    for checkpoints that were written before run ids existed."""

    name: str
    iteration: int
    run_id: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class RunIdentity:
    """The run of this job; known on rank 0 only.

    lineage: its checkpoints so far, oldest first. origin: the checkpoint outside --save, or the converted
    one, that the run was started from. without_run_id: names in --save that belong to the run although they
    have no run id (see `lineage.start`).
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    lineage: tuple[LineageEntry, ...] = ()
    origin: Mapping[str, Any] | None = None
    without_run_id: frozenset[str] = frozenset()

    def with_checkpoint(self, entry: LineageEntry) -> RunIdentity:
        """Returns the identity after `entry` was saved."""
        before = (other for other in self.lineage if other.name != entry.name)
        return replace(self, lineage=(*before, entry)[-MAX_LINEAGE:])

    def rolled_back_to(self, name: str) -> RunIdentity:
        """Returns the identity after a rollback to the checkpoint `name` of the lineage."""
        position = [entry.name for entry in self.lineage].index(name)
        return replace(self, lineage=self.lineage[: position + 1])

    def record(self) -> dict[str, Any]:
        """Returns the identity as `run.json` of the next checkpoint stores it."""
        lineage = [asdict(entry) for entry in self.lineage]
        return {"run_id": self.run_id, "origin": self.origin, "lineage": lineage}

    def saved(self, entry: LineageEntry) -> bool:
        """Returns whether this run itself saved a checkpoint of its lineage."""
        return entry.run_id == self.run_id or (entry.run_id is None and entry.name in self.without_run_id)

    def owns(self, name: str, run: Mapping[str, Any] | None) -> bool:
        """Returns whether the checkpoint `name` in --save belongs to this run. run: the content of its
        `run.json`; None if it cannot be read."""
        if name in self.without_run_id:
            return True
        if run is None:
            return False
        in_lineage = any(entry.sha256 == run.get("sha256") for entry in self.lineage if entry.sha256)
        return run.get("run_id") == self.run_id or in_lineage


def parse_run_id(value: Any) -> str | None:
    """Checks a `run_id` read from a file; None stays None. Raises ValueError unless it has 32 hex digits."""
    if value is not None and not (isinstance(value, str) and _RUN_ID.fullmatch(value)):
        raise ValueError("run_id is not 32 hex digits")
    return value


def parse_lineage(value: Any) -> tuple[LineageEntry, ...]:
    """Parses the newest MAX_LINEAGE entries of a `lineage`. Raises ValueError if it is malformed."""
    if not isinstance(value, list):
        raise ValueError("lineage is not a list")
    return tuple(_parse_entry(item) for item in value[-MAX_LINEAGE:])


def _parse_entry(value: Any) -> LineageEntry:
    if isinstance(value, str):
        return LineageEntry(value, _iteration_of(value))
    if not isinstance(value, dict):
        raise ValueError("an entry of lineage is neither a name nor an object")
    name: Any = value.get("name")
    sha256 = value.get("sha256")
    iteration = _iteration_of(name)
    if value.get("iteration") != iteration:
        raise ValueError(f"lineage: {name} has iteration {str(value.get('iteration'))[:20]!r}")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise ValueError(f"lineage: the digest of {name} is not 64 hex digits")
    return LineageEntry(name, iteration, parse_run_id(value.get("run_id")), sha256)


def _iteration_of(name: Any) -> int:
    match = CHECKPOINT_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"lineage: {str(name)[:60]!r} is not the name of a checkpoint (global_step<N>)")
    return int(match[1])


# --- latest and latest.json ---


@dataclass(frozen=True)
class LatestRecord:
    """The content of `latest.json`.

    latest: the name that `latest` held when the record was written. lineage: the run's checkpoints, oldest
    first, up to the newest complete one. upcoming: a checkpoint that is about to be renamed into place.
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
    """Returns the name of the checkpoint that `latest` names, see `read_latest_file`."""
    return read_latest_file(folder / LATEST_FILE, ["global_step{}"], CHECKPOINT_NAME)


def read_latest_record(folder: Path) -> LatestRecord | None:
    """Returns `latest.json`; None if it is missing or damaged. Raises OSError if it cannot be read now."""
    if (record := read_record(folder / RECORD_FILE)) is None:
        return None
    try:
        run_id, origin = parse_run_id(record["run_id"]), record["origin"]
        if run_id is None or not isinstance(record["latest"], str) or not isinstance(origin, dict | None):
            return None
        lineage = parse_lineage(record["lineage"])
        upcoming = None if record["upcoming"] is None else _parse_entry(record["upcoming"])
    except (ValueError, KeyError):
        return None
    return LatestRecord(record["latest"], run_id, lineage, origin, upcoming)


def record_upcoming(folder: Path, upcoming: LineageEntry, identity: RunIdentity) -> None:
    """Records a checkpoint in `latest.json` before it is renamed into place."""
    latest = ""
    with suppress(MissingCheckpointError):  # edited since the start: the save writes it anew
        latest = read_latest(folder) or ""
    _write(folder, LatestRecord(latest, identity.run_id, identity.lineage, identity.origin, upcoming))


def set_latest(folder: Path, entry: LineageEntry, identity: RunIdentity) -> None:
    """Writes the name of a complete checkpoint into `latest`. identity: has it in its lineage."""
    write_small(folder / LATEST_FILE, entry.name)
    try:
        _write(folder, LatestRecord(entry.name, identity.run_id, identity.lineage, identity.origin))
    except OSError as error:
        # The record that `record_upcoming` wrote still describes the folder.
        _LOG.warning("%s cannot be updated: %s", folder / RECORD_FILE, error)


def _write(folder: Path, record: LatestRecord) -> None:
    write_small(folder / RECORD_FILE, json.dumps(add_checksum(asdict(record)), indent=1) + "\n")


# --- latest_local ---


def read_local_entries(save: Path) -> tuple[LineageEntry, ...]:
    """Returns the checkpoints in `latest_local`, oldest first; () if it is missing or damaged. Raises OSError
    if it cannot be read now."""
    record = read_record(save / LOCAL_RECORD_FILE)
    try:
        return () if record is None else parse_lineage(record["entries"])
    except (ValueError, KeyError):
        return ()


def write_local_entries(save: Path, entries: Sequence[LineageEntry], **facts: Any) -> None:
    """Writes `latest_local`, or removes it if there are no entries. facts: further keys, for users."""
    path = save / LOCAL_RECORD_FILE
    if entries:
        write_json(path, add_checksum({"entries": [asdict(entry) for entry in entries], **facts}), indent=1)
    else:
        path.unlink(missing_ok=True)
