"""A save in the background: its files are written while training continues; rank 0 completes it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.background_writer import BackgroundWriter, Written
from megatron.checkpoint.digests import RankDigests
from megatron.checkpoint.files import Files
from megatron.checkpoint.formats.deepspeed_files import Place
from megatron.checkpoint.record import TrainingState


@dataclass(frozen=True)
class SaveOutcome:
    """The end of a save that was made in the background."""

    folder: Path
    iteration: int
    problem: str = ""
    """Why the checkpoint was not saved; "" if it is complete."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time from the begin of the save until the checkpoint has its final name."""
    mismatched: tuple[str, ...] = ()
    """Replicas that differ on several ranks."""


@dataclass
class RankResult:
    """What a rank has contributed to a save."""

    files: Files
    places: dict[str, dict[str, Place]]
    digests: RankDigests
    problem: str


@dataclass
class BackgroundSave:
    """A save in flight on one rank."""

    number: int
    """The number of the save, equal on all ranks: reports of different saves never mix."""
    state: TrainingState
    saving: Path
    """The folder, under its temporary name."""
    run: dict[str, Any]
    """The content of `run.json` without the files and the digests."""
    canary_loss: float
    digests: RankDigests
    """The digests of this rank, without the digests that the writer computes."""
    places: dict[str, dict[str, Place]]
    """Where this rank's files of the optimizer's state hold a parameter."""
    writer: BackgroundWriter | None
    """None if the writer has failed while the state was copied: `problem` says how."""
    store: dist.Store
    started: float
    problem: str = ""
    outcome: SaveOutcome | None = None
    """On rank 0, once the save has ended; on the others after `CheckpointManager.finish_save`."""
    _is_reported: bool = field(default=False, init=False)

    def report(self, wait_s: float = 0.0) -> bool:
        """Reports to rank 0, once, that this rank's files are on the disk, or why they are not. Returns
        whether the report is made. wait_s: how long to wait for the writer, in seconds."""
        if not self._is_reported:
            written = Written() if self.writer is None else self.writer.written(wait_s)
            if written is None:
                return False
            for name, digests in written.digests.items():
                self.digests.digests.setdefault(name, {}).update(digests)
            result = RankResult(written.files, self.places, self.digests, self.problem or written.problem)
            content = pickle.dumps(result)
            self.store.set(self._key(dist.get_rank()), content)  # type: ignore[arg-type]  # bytes are accepted
            self.store.add(self._key("reports"), 1)
            self._is_reported = True
        return True

    def results(self) -> list[RankResult] | None:
        """Returns the results of all ranks, by rank; None while one is missing. Deletes them from the
        store."""
        keys = [self._key(rank) for rank in range(dist.get_world_size())]
        if self.store.add(self._key("reports"), 0) < len(keys):
            return None
        results = [pickle.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return results

    def _key(self, name: str | int) -> str:
        return f"save {self.number} {name}"
