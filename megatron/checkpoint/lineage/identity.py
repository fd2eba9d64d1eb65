"""The identity of a run: a run id, and the digests of its earlier checkpoints.

Names such as `global_step4` are the same in every run, so they do not identify a checkpoint. `run.json`
therefore holds `run_id` (128 random bits, created when a run starts in a --save folder) and `lineage`: the
earlier checkpoints, oldest first, each with the digest of its `run.json`. Checkpoints from before run ids
have a lineage of names only. They can still be read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

CHECKPOINT_NAME = re.compile(r"global_step([0-9]{1,12})")
# Number of entries that are kept: enough for every checkpoint that may be deleted or resumed.
MAX_LINEAGE = 1000
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    one, that the run was started from. claimed: names in --save that belong to the run although they have no
    run id (see `lineage.start`). attempt: random, different in each job.
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    lineage: tuple[LineageEntry, ...] = ()
    origin: Mapping[str, Any] | None = None
    claimed: frozenset[str] = frozenset()
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))

    def with_checkpoint(self, entry: LineageEntry) -> RunIdentity:
        """The identity after `entry` was saved."""
        before = (other for other in self.lineage if other.name != entry.name)
        return replace(self, lineage=(*before, entry)[-MAX_LINEAGE:])

    def rolled_back_to(self, name: str) -> RunIdentity:
        """The identity after a rollback to the checkpoint `name` of the lineage."""
        position = [entry.name for entry in self.lineage].index(name)
        return replace(self, lineage=self.lineage[: position + 1])

    def record(self) -> dict[str, Any]:
        """The identity as `run.json` of the next checkpoint stores it."""
        lineage = [asdict(entry) for entry in self.lineage]
        return {"run_id": self.run_id, "origin": self.origin, "lineage": lineage}

    def saved(self, entry: LineageEntry) -> bool:
        """Whether this run saved a checkpoint of its lineage, rather than the run that it was started
        from."""
        return entry.run_id == self.run_id or (entry.run_id is None and entry.name in self.claimed)

    def owns(self, name: str, run: Mapping[str, Any] | None) -> bool:
        """Whether the checkpoint `name` in --save belongs to this run. run: the content of its `run.json`;
        None if it cannot be read."""
        if name in self.claimed:
            return True
        if run is None:
            return False
        in_lineage = any(entry.sha256 == run.get("sha256") for entry in self.lineage if entry.sha256)
        return run.get("run_id") == self.run_id or in_lineage


def parse_run_id(value: Any) -> str | None:
    """Checks a `run_id` read from a file; None stays None. ValueError unless it has 32 hex digits."""
    if value is not None and not (isinstance(value, str) and _RUN_ID.fullmatch(value)):
        raise ValueError("run_id is not 32 hex digits")
    return value


def parse_lineage(value: Any) -> tuple[LineageEntry, ...]:
    """Parses a `lineage` read from a file; keeps the newest MAX_LINEAGE entries. ValueError if malformed."""
    if not isinstance(value, list):
        raise ValueError("lineage is not a list")
    return tuple(_parse_entry(item) for item in value[-MAX_LINEAGE:])


def parse_entry(value: Any) -> LineageEntry | None:
    """Parses one lineage entry read from a file, which may be null."""
    return None if value is None else _parse_entry(value)


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
