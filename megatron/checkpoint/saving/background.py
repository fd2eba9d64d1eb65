"""Saves in the background: their files are written while training continues, and rank 0 completes them.

The state is copied while training waits. Then a thread of each rank waits for the rank's writer process and
reports to rank 0 through the ranks' key-value store; a thread of rank 0 collects the reports and completes
the checkpoint. Training waits for neither thread. A `CheckpointWriter` creates the content of the files;
`BackgroundFiles` passes the content to the writer process, while `DirectFiles` (for saves in the foreground)
writes it during the call. Both compute the SHA-256 of a file while they write it. The archives have no CRC-32
checksums.
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

# Interval in which a thread asks the store for the value of another rank.
_POLL_S = 0.2


@dataclass(frozen=True)
class SaveOutcome:
    """How a save in the background ended."""

    folder: Path
    iteration: int
    problem: str = ""
    """Why the checkpoint was not saved; "" if it is complete."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time from the start of the save until the checkpoint has its final name."""
    mismatched: tuple[str, ...] = ()
    """Parameters and moments whose replicas on several ranks differ."""
    is_local: bool = False
    """Whether this was a save to --save-local."""


@dataclass
class RankResult:
    """What one rank has contributed to a save."""

    files: Files
    table: Any
    """The result of `CheckpointWriter.write`."""
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
    """The content of `run.json` without the files and the integrity record."""
    started: float
    """Time of the start of the save, from `time.monotonic`."""
    writer: CheckpointWriter
    folder: Path
    """The checkpoint's folder under its final name, for messages."""
    complete: Callable[[BackgroundSave, list[RankResult]], SaveOutcome]
    """Makes the checkpoint visible. A thread of rank 0 calls it with the results of all ranks, by rank."""
    is_local: bool = False
    """Whether this is a save to --save-local."""
    before_report: Callable[[BackgroundSave, Files, str], str] | None = None
    """A function of the save, the files that this rank has written, and its problem. It returns the problem
    to report."""
    after_report: Callable[[BackgroundSave], None] | None = None
    """A function that all ranks except rank 0 call after the report, only for a local checkpoint."""
    num_copied_bytes: int = 0
    """Number of bytes that `before_report` has copied so far."""
    canary_loss: float = 0.0
    outcome: SaveOutcome | None = None
    """How the save ended. Rank 0 has it when the save has ended, other ranks after
    `BackgroundSaves.finish`."""
    is_reported: threading.Event = field(default_factory=threading.Event)
    """It is set when this rank's result is in the store for rank 0."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    """It is set on rank 0 when rank 0 has the outcome."""

    @property
    def saving(self) -> Path:
        """The checkpoint's folder under its temporary name."""
        return self.writer.folder

    def ended(
        self, problem: str = "", files: Files | None = None, mismatched: tuple[str, ...] = ()
    ) -> SaveOutcome:
        """Returns the outcome of this save. files: the checkpoint's files. The other arguments: see
        `SaveOutcome`."""
        num_bytes = sum(record["bytes"] for record in (files or {}).values())
        seconds = time.monotonic() - self.started
        return SaveOutcome(
            self.folder,
            self.state.iteration,
            with_final_names(problem),
            num_bytes,
            seconds,
            mismatched,
            self.is_local,
        )

    def count_bytes(self, count: int) -> None:
        """Adds to `num_copied_bytes`. `BackgroundSaves.finish` sends heartbeats only while this number
        grows."""
        self.num_copied_bytes += count


class BackgroundSaves:
    """A rank's saves in the background. At most one is in flight."""

    def __init__(self, engine: GPTEngine, store: dist.Store, heartbeat: Callable[[], None]) -> None:
        """store: the ranks' key-value store. heartbeat: called while the state is copied, and while `finish`
        waits for a writer that makes progress."""
        self.in_flight: BackgroundSave | None = None
        self.writer: BackgroundWriter | None = None
        self.last_has_failed = False
        """Whether the last save to --save that ended has failed; equal on all ranks."""
        self._engine, self._store, self._heartbeat = engine, store, heartbeat
        self._num_saves = 0
        self._lost_store = ""
        """Why a thread of this rank could not use the store; "" if every thread could."""
        self._outcomes: SimpleQueue[SaveOutcome] = SimpleQueue()

    def start_writer(self) -> str:
        """Starts the writer process if there is none. Returns why it cannot be started; "" if it runs."""
        try:
            if self.writer is None:
                sizes = [*self._engine.layer_sizes.values()]
                self.writer = BackgroundWriter(ring_bytes(sizes, self._engine.run.config), self._heartbeat)
        except OSError as error:
            return f"the checkpoint writer cannot be started ({error})"
        return ""

    def start(self, save: BackgroundSave) -> None:
        """Copies the state to the writer process and returns. Collective."""
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
        threading.Thread(
            target=self._finish_files,
            args=(save, self._num_saves, None if problem else self.writer, result),
            name="save",
            daemon=True,
        ).start()

    def finish(self) -> SaveOutcome | None:
        """Waits for the save in flight. Returns how it ended; None if there was none. Collective."""
        save = self.in_flight
        if save is None:
            return None
        before = 0
        while not save.is_reported.wait(1.0):
            # Heartbeats are sent only while the writer progresses, so the watchdog ends a run whose file
            # system hangs.
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
        """Yields the outcomes of saves that have ended since the last call: on rank 0 once they are complete,
        on other ranks after `finish`. Raises DistError if the store is lost."""
        self._check_store()
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def _check_store(self) -> None:
        """Raises DistError if a thread has lost the store, because no save can be completed without it."""
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
        """Reports to rank 0 that this rank's files are on disk, or why they are not; rank 0 then completes
        the checkpoint. Runs in a thread. number: the number of the save, equal on all ranks, so that the
        reports of different saves never mix."""
        written = Written() if writer is None else writer.written()
        for name, digests in written.digests.items():
            result.digests.digests.setdefault(name, {}).update(digests)
        problem = result.problem or written.problem
        if save.before_report is not None:
            try:
                problem = save.before_report(save, written.files, problem)
            except Exception as error:  # such as a lost connection: nobody would see an error of a thread
                problem = problem or one_line(error)
        result = replace(result, files=written.files, problem=problem)
        content: Any = pickle.dumps(result)  # the store accepts bytes, although its annotations lack them
        try:
            self._store.set(f"save {number} {dist.get_rank()}", content)
            if dist.get_rank() != 0 and save.after_report is not None:
                save.is_reported.set()
                save.after_report(save)
        except dist.DistError as error:  # nobody would see an error of a thread
            self._lost_store = one_line(error)
        save.is_reported.set()
        if dist.get_rank() != 0:
            return
        try:
            results = self._results(number)
            save.outcome = save.complete(save, results)
        except Exception as error:  # nobody would see an error of a thread, and `finish` would wait forever
            if isinstance(error, dist.DistError):  # a lost store may still accept one `set`
                self._lost_store = one_line(error)
            save.outcome = save.ended(f"{type(error).__name__}: {error}")
        self._outcomes.put(save.outcome)
        save.has_ended.set()

    def _results(self, number: int) -> list[RankResult]:
        """Waits for the results of all ranks, and deletes them from the store. Returns them by rank."""
        results = []
        for rank in range(dist.get_world_size()):
            key = f"save {number} {rank}"
            results.append(pickle.loads(wait_for_value(self._store, key)))
            self._store.delete_key(key)
        return results


def wait_for_value(store: dist.Store, key: str) -> bytes:
    """Waits until another rank has set a key, and returns its value. Threads use it because a long wait in
    the store would keep the other threads of this rank from using the store."""
    while not store.check([key]):
        time.sleep(_POLL_S)
    return store.get(key)


class DirectFiles(RankFiles):
    """Writes each file immediately and syncs it to disk. files: the files written so far, by name."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        """heartbeat: called after each file."""
        self.files: Files = {}
        self._heartbeat = heartbeat

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """See `RankFiles`. Without a file it does nothing, because digests of the whole state are computed
        later."""
        if file is None:
            return
        hashed = HashedFile(file)
        for content in contents:
            content.save(hashed)
        self.files[file.name] = hashed.close()
        self._heartbeat()


class BackgroundFiles(RankFiles):
    """Passes each file to the writer process. digests: parameter -> state -> digest of the tensors that are
    not in host memory; these digests are computed immediately."""

    def __init__(self, writer: BackgroundWriter | None, problem: str) -> None:
        """writer: the writer process; None if it could not be started. problem: why; "" if it runs."""
        self.digests: dict[str, dict[str, int]] = {}
        self._writer = writer
        self._problem = problem

    def make_folder(self, folder: Path) -> None:
        """See `RankFiles`. If it fails, `end` returns the problem."""
        with self._noting_problem():
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """See `RankFiles`. Returns once the content is copied. After a failure it does nothing, but this rank
        still takes part in the collectives of the save."""
        with self._noting_problem():
            if not self._problem and self._writer is not None:
                self._writer.write_file(file, self._in_host_memory(contents, digests_only=file is None))

    def end(self) -> str:
        """Ends the files of the save. Returns why this rank's part has failed; "" if it has not failed so
        far."""
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
        """Yields the contents with only those pieces whose states are in host memory. Computes the digests of
        states on a device. If only digests are needed, contents without states in host memory are not
        yielded."""
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
