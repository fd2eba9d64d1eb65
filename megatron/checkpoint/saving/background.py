"""Saves in the background: their files are written while training continues, and rank 0 completes them.

The state is copied while training waits. Then a thread of each rank waits for the rank's writer process and
reports to rank 0 through the store; a thread of rank 0 collects the reports and completes the checkpoint.
Training waits for neither. A `CheckpointWriter` makes the content of the files; `BackgroundFiles` hands it to
the writer process. `DirectFiles`, of saves in the foreground, writes it while training waits. Both compute
the SHA-256 of a file while they write it. The archives have no CRC-32 of their own.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.digests import RankDigests, piece_digests, rank_digests
from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.archive_writer import is_staged
from megatron.checkpoint.formats.writing import CheckpointWriter, Content, RankFiles
from megatron.checkpoint.integrity import canary_loss
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.saving.publishing import with_final_names
from megatron.checkpoint.saving.writer import BackgroundWriter, Written, ring_bytes
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import one_line
from megatron.mpu.pieces import Piece
from megatron.mpu.world import broadcast_from_rank_0

# How often a thread asks the store for the value of another rank.
_POLL_S = 0.2


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
    is_local: bool = False
    """Whether it was a save to --save-local."""


@dataclass
class RankResult:
    """What a rank has contributed to a save."""

    files: Files
    table: Any
    """What `CheckpointWriter.write` has returned."""
    digests: RankDigests
    problem: str


def problem_in(results: Sequence[RankResult]) -> str:
    """Returns the first problem in the results of all ranks, with its rank; "" if there is none."""
    problems = (f"rank {rank}: {result.problem}" for rank, result in enumerate(results) if result.problem)
    return next(problems, "")


@dataclass
class BackgroundSave:
    """A save in flight on one rank."""

    state: TrainingState
    run: dict[str, Any]
    """The content of `run.json` without the files and the digests."""
    started: float
    """The clock (`time.monotonic`) at the begin of the save."""
    writer: CheckpointWriter
    folder: Path
    """The folder of the checkpoint, for messages."""
    complete: Callable[[BackgroundSave, list[RankResult]], SaveOutcome]
    """Called in a thread of rank 0 with the results of all ranks, by rank; makes the checkpoint visible."""
    is_local: bool = False
    """Whether it is a save to --save-local."""
    before_report: Callable[[BackgroundSave, Files, str], str] | None = None
    """Called with the files that this rank has written and its problem. Returns the problem to report."""
    after_report: Callable[[BackgroundSave], None] | None = None
    """For a local checkpoint: called on all ranks except rank 0."""
    num_copied_bytes: int = 0
    """Bytes that `before_report` has copied so far."""
    canary_loss: float = 0.0
    outcome: SaveOutcome | None = None
    """On rank 0, once the save has ended; on the others after `BackgroundSaves.finish`."""
    is_reported: threading.Event = field(default_factory=threading.Event)
    """Set once rank 0 has what this rank has contributed."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    """Set on rank 0 once it has the outcome."""

    @property
    def saving(self) -> Path:
        """The folder, under its temporary name."""
        return self.writer.folder

    def ended(
        self, problem: str = "", files: Files | None = None, mismatched: tuple[str, ...] = ()
    ) -> SaveOutcome:
        """Returns the outcome. files: of the checkpoint. problem, mismatched: see `SaveOutcome`."""
        num_bytes = sum(facts["bytes"] for facts in (files or {}).values())
        seconds = time.monotonic() - self.started
        facts = (with_final_names(problem), num_bytes, seconds, mismatched, self.is_local)
        return SaveOutcome(self.folder, self.state.iteration, *facts)

    def count_bytes(self, count: int) -> None:
        """Counts copied bytes: the heartbeats of `BackgroundSaves.finish` depend on them."""
        self.num_copied_bytes += count


class BackgroundSaves:
    """A rank's saves in the background. At most one is in flight."""

    def __init__(self, engine: GPTEngine, store: dist.Store, heartbeat: Callable[[], None]) -> None:
        """store: the store of the ranks. heartbeat: called while the state is copied, and while `finish`
        waits if the writer makes progress."""
        self.in_flight: BackgroundSave | None = None
        self.writer: BackgroundWriter | None = None
        self.last_has_failed = False
        """Whether the last save to --save that has ended has failed, on every rank."""
        self._engine, self._store, self._heartbeat = engine, store, heartbeat
        self._num_saves = 0
        self._lost_store = ""
        """Why a thread of this rank could not use the store; "" if none has failed."""
        self._outcomes: SimpleQueue[SaveOutcome] = SimpleQueue()

    def start_writer(self) -> str:
        """Starts the writer process, if there is none. Returns why it cannot be started; "" if it can."""
        try:
            if self.writer is None:
                sizes = [*self._engine.layer_sizes.values()]
                self.writer = BackgroundWriter(ring_bytes(sizes, self._engine.run.config), self._heartbeat)
        except OSError as error:
            return f"the checkpoint writer cannot be started ({error})"
        return ""

    def start(self, save: BackgroundSave) -> None:
        """Copies the state and returns. Collective."""
        engine, optimizer = self._engine, self._engine.optimizer
        problem = self.start_writer()
        pieces = optimizer.pieces(with_values=False)
        files = BackgroundFiles(self.writer, problem)
        table = save.writer.write(engine, save.run, files)
        problem = files.end()
        digests = rank_digests(
            pieces, engine.mesh, optimizer.is_partitioned, lambda piece: files.digests.get(piece.name, {})
        )
        save.canary_loss = canary_loss(engine)
        self._num_saves += 1
        self.in_flight = save
        result = RankResult({}, table, digests, problem)
        work = (save, self._num_saves, None if problem else self.writer, result)
        threading.Thread(target=self._finish_files, args=work, name="save", daemon=True).start()

    def finish(self) -> SaveOutcome | None:
        """Waits for the save in flight, and returns how it ended; None if there is none. Collective."""
        save = self.in_flight
        if save is None:
            return None
        before = 0
        while not save.is_reported.wait(1.0):
            # A heartbeat only if the writer progresses: the watchdog ends a run whose file system hangs.
            written = self.writer.num_written if self.writer is not None else 0
            if written + save.num_copied_bytes != before:
                before = written + save.num_copied_bytes
                self._heartbeat()
        self._check_store()
        dist.barrier()
        if dist.get_rank() == 0:
            save.has_ended.wait()
        outcome = broadcast_from_rank_0(save.outcome)
        assert outcome is not None
        if dist.get_rank() != 0:
            save.outcome = outcome
            self._outcomes.put(outcome)
        self.in_flight = None
        if not outcome.is_local:
            self.last_has_failed = outcome.problem != ""
        if outcome.problem and self.writer is not None:
            self.writer.close()
            self.writer = None
        return outcome

    def take_outcomes(self) -> Iterator[SaveOutcome]:
        """Yields the saves that have ended since the last call: on rank 0 once they are complete, on other
        ranks after `finish`. Raises DistError if the store is lost."""
        self._check_store()
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def _check_store(self) -> None:
        """Raises DistError if a thread has lost the store, without which no save can be completed."""
        if self._lost_store:
            raise dist.DistError(
                "the store of the processes, which torch's launcher or rank 0 hosts, is lost "
                f"({self._lost_store})"
            )

    def _finish_files(
        self,
        save: BackgroundSave,
        number: int,
        writer: BackgroundWriter | None,
        result: RankResult,
    ) -> None:
        """Runs in a thread. Reports to rank 0 that this rank's files are on the disk, or why they are not;
        rank 0 then completes the checkpoint. number: the number of the save, equal on all ranks, so that
        reports of different saves never mix."""
        written = Written() if writer is None else writer.written()
        for name, digests in written.digests.items():
            result.digests.digests.setdefault(name, {}).update(digests)
        problem = result.problem or written.problem
        if save.before_report is not None:
            try:
                problem = save.before_report(save, written.files, problem)
            except Exception as error:  # a lost connection: nobody would see it in a thread
                problem = problem or one_line(error)
        result = replace(result, files=written.files, problem=problem)
        content: Any = pickle.dumps(result)  # the store accepts bytes, which its annotations do not say
        try:
            self._store.set(f"save {number} {dist.get_rank()}", content)
            if dist.get_rank() != 0 and save.after_report is not None:
                save.is_reported.set()
                save.after_report(save)
        except dist.DistError as error:  # nobody would see it in a thread
            self._lost_store = one_line(error)
        save.is_reported.set()
        if dist.get_rank() != 0:
            return
        try:
            results = self._results(number)
            save.outcome = save.complete(save, results)
        except Exception as error:  # nobody would see it in a thread, and `finish` would wait for ever
            if isinstance(error, dist.DistError):  # a lost store may accept one more `set`
                self._lost_store = one_line(error)
            save.outcome = save.ended(f"{type(error).__name__}: {error}")
        self._outcomes.put(save.outcome)
        save.has_ended.set()

    def _results(self, number: int) -> list[RankResult]:
        """Waits for the results of all ranks, and deletes them from the store."""
        results = []
        for rank in range(dist.get_world_size()):
            key = f"save {number} {rank}"
            results.append(pickle.loads(wait_for_value(self._store, key)))
            self._store.delete_key(key)
        return results


def wait_for_value(store: dist.Store, key: str) -> bytes:
    """Waits until another rank has set a key, and returns its value. For threads: a long wait in the store
    would keep the other threads of this rank from using it."""
    while not store.check([key]):
        time.sleep(_POLL_S)
    return store.get(key)


class DirectFiles(RankFiles):
    """Writes each file at once and syncs it to the disk. files: the files written so far, by name."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        """heartbeat: called after each file."""
        self.files: Files = {}
        self._heartbeat = heartbeat

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """See `RankFiles`. Without a file it does nothing: digests of the whole state are computed later."""
        if file is None:
            return
        hashed = HashedFile(file)
        for content in contents:
            content.save(hashed)
        self.files[file.name] = hashed.close()
        self._heartbeat()


class BackgroundFiles(RankFiles):
    """Hands each file to the writer process. digests: digests of the tensors that are not in host memory,
    which are computed at once, by parameter and state."""

    def __init__(self, writer: BackgroundWriter | None, problem: str) -> None:
        """problem: why there is no writer; "" if there is one."""
        self.digests: dict[str, dict[str, int]] = {}
        self._writer = writer
        self._problem = problem

    def make_folder(self, folder: Path) -> None:
        """See `RankFiles`. A failure is a problem that `end` returns."""
        with self._noting_problem():
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """See `RankFiles`. Returns once the content is copied. After a failure it does nothing: this rank
        still takes part in the collectives of the save."""
        with self._noting_problem():
            if not self._problem and self._writer is not None:
                self._writer.write_file(file, self._in_host_memory(contents, digests_only=file is None))

    def end(self) -> str:
        """Ends the files of the save. Returns why this rank's part has failed; "" if it has not so far."""
        with self._noting_problem():
            if not self._problem and self._writer is not None:
                self._writer.end_save()
        return self._problem

    @contextmanager
    def _noting_problem(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problem = self._problem or str(error)

    def _in_host_memory(self, contents: Iterable[Content], digests_only: bool) -> Iterator[Content]:
        """Yields the contents, with the states of their pieces that are in host memory. Computes the digests
        of the states on a device; if there are no others, nothing is yielded for digests only."""
        for content in contents:
            pieces = [held for piece in content.pieces if (held := self._held(piece)).values]
            if pieces or not digests_only:
                yield replace(content, pieces=pieces)

    def _held(self, piece: Piece) -> Piece:
        on_device = {name: value for name, value in piece.values.items() if is_staged(value.device)}
        if on_device:
            found = piece_digests(replace(piece, values=on_device))
            self.digests.setdefault(piece.name, {}).update(found)
        in_memory = {name: value for name, value in piece.values.items() if name not in on_device}
        return replace(piece, values=in_memory)
