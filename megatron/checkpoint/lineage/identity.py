"""The identity of a run, and its records in `run.json`, `latest` and `latest.json`.

Names such as `global_step4` occur in every run, so they do not identify a checkpoint. `run.json` therefore
holds `run_id` (128 random bits, created when a run starts in a --save folder) and `lineage`: the earlier
checkpoints, oldest first, each with the digest of its `run.json`. Checkpoints of versions without run ids
have a lineage of names only; they can still be read.

`latest` in a --save folder holds the name of the newest checkpoint, as DeepSpeed writes it. Users edit it to
resume from an older checkpoint. `latest.json` records what this program itself wrote into `latest`. If the
two agree, `latest.json` decides: it is right even if the job was killed after it renamed a checkpoint and
before it updated `latest`. If they differ, a user has edited `latest`, and `latest` decides.

Users edit the files that name a checkpoint: `latest`, `latest_universal`, and Megatron-LM's
`latest_checkpointed_iteration.txt`. This program understands a path into the folder, a number, another
framework's spelling, a comment and a link. Any other content is an error that quotes the content; the newest
checkpoint is not used instead, because the user wanted a different one.

`latest_local` lists the run's local checkpoints that a restart may find on the nodes' disks. Only the
checkpoints in this file are used, so whoever deletes the --save folder also makes its local checkpoints
unusable.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import add_checksum, read_record, read_with_retries, write_small
from megatron.checkpoint.names import is_plain, shown
from megatron.errors import UserError, is_access_error
from megatron.files import HostileFileError, read_small, write_json

LATEST_FILE = "latest"
RECORD_FILE = "latest.json"
LOCAL_RECORD_FILE = "latest_local"
CHECKPOINT_NAME = re.compile(r"global_step([0-9]{1,12})")
# Largest length of a lineage. It is enough for every checkpoint that may be deleted or resumed.
MAX_LINEAGE = 1000
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Largest size in bytes of a file that holds one name.
_MAX_BYTES = 4096
_STEP = re.compile(r"(?:(?:(?:global_?)?step|iter(?:ation)?|checkpoint)[ _-]?)?([0-9]{1,12})", re.IGNORECASE)
_COMMENT = re.compile(r"(^|\s)#.*")
# Invisible characters that `str.strip` does not remove.
_ZERO_WIDTH = str.maketrans("", "", "\u200b\u200c\u200d\u2060\ufeff")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LineageEntry:
    """A checkpoint of a run. sha256: the checksum of `run.json`, which the file itself contains. run_id and
    sha256 are None for checkpoints of versions without run ids."""

    name: str
    iteration: int
    run_id: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class RunIdentity:
    """The run of this job. Only rank 0 knows it.

    lineage: the run's checkpoints so far, oldest first. origin: the checkpoint from which the run was
    started, if it is outside of --save or converted. without_run_id: names in --save that belong to the run
    although they have no run id (see `lineage.start`).
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    lineage: tuple[LineageEntry, ...] = ()
    origin: Mapping[str, Any] | None = None
    without_run_id: frozenset[str] = frozenset()

    def with_checkpoint(self, entry: LineageEntry) -> RunIdentity:
        """Returns the run's identity after `entry` was saved."""
        before = (other for other in self.lineage if other.name != entry.name)
        return replace(self, lineage=(*before, entry)[-MAX_LINEAGE:])

    def rolled_back_to(self, name: str) -> RunIdentity:
        """Returns the run's identity after a rollback to the checkpoint `name` of its lineage."""
        position = [entry.name for entry in self.lineage].index(name)
        return replace(self, lineage=self.lineage[: position + 1])

    def record(self) -> dict[str, Any]:
        """Returns the identity in the form in which `run.json` of the next checkpoint stores it."""
        lineage = [asdict(entry) for entry in self.lineage]
        return {"run_id": self.run_id, "origin": self.origin, "lineage": lineage}

    def saved(self, entry: LineageEntry) -> bool:
        """Returns whether this run itself, and not an earlier run, saved a checkpoint of its lineage."""
        return entry.run_id == self.run_id or (entry.run_id is None and entry.name in self.without_run_id)

    def owns(self, name: str, run: Mapping[str, Any] | None) -> bool:
        """Returns whether the checkpoint `name` in --save belongs to this run. run: the content of the
        checkpoint's `run.json`; None if it cannot be read."""
        if name in self.without_run_id:
            return True
        if run is None:
            return False
        in_lineage = any(entry.sha256 == run.get("sha256") for entry in self.lineage if entry.sha256)
        return run.get("run_id") == self.run_id or in_lineage


def parse_run_id(value: Any) -> str | None:
    """Returns a `run_id` read from a file; None for None. Raises ValueError unless it has 32 hex digits."""
    if value is not None and not (isinstance(value, str) and _RUN_ID.fullmatch(value)):
        raise ValueError("run_id is not 32 hex digits")
    return value


def parse_lineage(value: Any) -> tuple[LineageEntry, ...]:
    """Returns the newest MAX_LINEAGE entries of a `lineage` read from a file. Raises ValueError if it is
    malformed."""
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


class MissingCheckpointError(UserError):
    """A user wrote a text into `latest` that names no checkpoint. No other checkpoint is used instead."""


def read_latest_file(path: Path, step_names: Sequence[str], other_names: re.Pattern[str]) -> str | None:
    """Returns the name of the folder beside `path` that the file or link `path` names. Returns None if `path`
    is missing, empty or not readable as text, as after a power failure.

    step_names: how a folder is named after its step, such as "global_step{}". other_names: names that are
    used unchanged. If several names are possible, the first that exists is returned; if none exists, the
    first. Raises MissingCheckpointError for content that is not understood, and OSError if the file cannot be
    read now.
    """
    text = _content(path)
    if not text:
        return None
    name = _name_inside(path.parent, text)
    if name is not None and (path.parent / name).is_symlink() and not other_names.fullmatch(name):
        name = _name_inside(path.parent, os.path.realpath(path.parent / name)) or name
    step = _STEP.fullmatch(name or "")
    names = [step_name.format(int(step[1])) for step_name in step_names] if step else []
    if name in names[:1]:
        return name
    names += [name] if name is not None and other_names.fullmatch(name) else []
    existing = (name for name in names if (path.parent / name).is_dir())
    if found := next(existing, names[0] if names else None):
        return found
    raise MissingCheckpointError(
        f"{path} holds {shown(text)}, expected the name of a checkpoint in {path.parent}, such as "
        f"{step_names[0].format(3)}: correct it, or remove {path.name} to use the newest checkpoint"
    )


def _content(path: Path) -> str:
    """Returns what a person wrote: the target of a link, or a file's lines without comments and quotes.
    Returns "" for a file that is missing, empty, or not a text."""
    if path.is_symlink() and not path.is_file():
        return os.readlink(path)
    try:
        content = read_with_retries(path, lambda: read_small(path, _MAX_BYTES))
    except (OSError, HostileFileError) as error:
        if is_access_error(error):
            raise
        if path.is_dir():
            raise MissingCheckpointError(
                f"{path} is a folder, expected a file or a link that names a checkpoint"
            ) from error
        return ""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_utf16 else "utf-8", errors="replace").translate(_ZERO_WIDTH)
    lines = [_COMMENT.sub("", line).strip() for line in text.splitlines()]
    written = "\n".join(filter(None, lines)) or text.strip()  # a file with only a comment is an error
    if any(character < " " and character not in "\t\n" or character == "\ufffd" for character in written):
        return ""
    return written[1:-1] if written[0:1] in ("'", '"') and written[0] == written[-1] else written


def _name_inside(folder: Path, text: str) -> str | None:
    """Returns the last component of a path whose parent is `folder`. The path may be absolute, a URL, or
    relative to `folder`, to the working folder, or to a parent of `folder`. Returns None for any other
    text."""
    is_url = "://" in text
    parent, name = os.path.split(text.rstrip("/") if is_url else os.path.normpath(os.path.expanduser(text)))
    if not (is_plain(name) or _STEP.fullmatch(name)):
        return None
    own, absolute = os.path.realpath(folder), os.path.abspath(folder)
    if not parent or is_url:
        return name if not parent or parent == str(folder) else None
    if own in (os.path.realpath(parent), os.path.realpath(folder / parent)):
        return name
    end = os.sep + parent
    return name if not os.path.isabs(parent) and (own.endswith(end) or absolute.endswith(end)) else None


@dataclass(frozen=True)
class LatestRecord:
    """The content of `latest.json`.

    latest: the content of `latest` when this record was written. lineage: the run's checkpoints, oldest
    first, up to the newest complete one. upcoming: a checkpoint that is about to be renamed to its final
    name.
    """

    latest: str
    run_id: str
    lineage: tuple[LineageEntry, ...]
    origin: Mapping[str, Any] | None = None
    upcoming: LineageEntry | None = None

    @property
    def entries(self) -> tuple[LineageEntry, ...]:
        """The lineage, followed by the upcoming checkpoint if there is one."""
        return self.lineage if self.upcoming is None else (*self.lineage, self.upcoming)

    @property
    def written_names(self) -> set[str]:
        """The names that this program may have written into `latest`."""
        return {self.latest, *([] if self.upcoming is None else [self.upcoming.name])}


def read_latest(folder: Path) -> str | None:
    """Returns the name of the checkpoint that `latest` names; see `read_latest_file`."""
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
    """Records a checkpoint in `latest.json` before the checkpoint is renamed to its final name."""
    latest = ""
    with suppress(MissingCheckpointError):  # a user edited `latest` since the start: the save overwrites it
        latest = read_latest(folder) or ""
    _write(folder, LatestRecord(latest, identity.run_id, identity.lineage, identity.origin, upcoming))


def set_latest(folder: Path, entry: LineageEntry, identity: RunIdentity) -> None:
    """Writes the name of a complete checkpoint into `latest`. identity: the run, with `entry` in its
    lineage."""
    write_small(folder / LATEST_FILE, entry.name)
    try:
        _write(folder, LatestRecord(entry.name, identity.run_id, identity.lineage, identity.origin))
    except OSError as error:
        # The record that `record_upcoming` wrote is still right for the folder.
        _LOG.warning("%s cannot be updated: %s", folder / RECORD_FILE, error)


def _write(folder: Path, record: LatestRecord) -> None:
    write_small(folder / RECORD_FILE, json.dumps(add_checksum(asdict(record)), indent=1) + "\n")


# --- latest_local ---


def read_local_entries(save: Path) -> tuple[LineageEntry, ...]:
    """Returns the checkpoints in `latest_local`, oldest first; () if the file is missing or damaged. Raises
    OSError if it cannot be read now."""
    record = read_record(save / LOCAL_RECORD_FILE)
    try:
        return () if record is None else parse_lineage(record["entries"])
    except (ValueError, KeyError):
        return ()


def write_local_entries(save: Path, entries: Sequence[LineageEntry], **notes: Any) -> None:
    """Writes `latest_local`, or removes the file if there are no entries. notes: further keys, which only
    users read."""
    path = save / LOCAL_RECORD_FILE
    if entries:
        write_json(path, add_checksum({"entries": [asdict(entry) for entry in entries], **notes}), indent=1)
    else:
        path.unlink(missing_ok=True)
