"""A process beside each rank that writes the rank's checkpoint files while training continues.

The rank serializes its state with torch.save into a ring buffer in shared memory, which takes as long as a
copy. The writer process takes the bytes from the ring, writes them to the files and computes digests from
them: the SHA-256 of each file, and the digests of the parameters in it (see `megatron.checkpoint.digests`).
No file is read again. If the ring is smaller than the state, torch.save waits until the writer has freed a
part of the ring.

Messages to the writer: ("open", path), ("table", table of fragments), ("data", offset, length, used bytes,
fragments in the piece), ("close",), ("end",). Messages to the rank: ("freed", bytes), ("written", Written),
("failed", text).
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.checkpoint.files import Files, HashedFile, write_problem
from megatron.checkpoint.host_digests import add_part, host_digests
from megatron.child_processes import end_with_parent, python_path, signals_blocked
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece

if TYPE_CHECKING:  # the writer process needs no configuration and no torch
    from megatron.checkpoint.formats.writing import Content
    from megatron.config import Config

# The writer frees the ring in pieces of at most this many bytes.
PIECE_BYTES = 1 << 24
# Pieces begin at multiples of this many bytes, so that no piece ends inside an element of a tensor.
ALIGNMENT = 64
# The nice value of the writer process is increased by this number, so that training has priority.
NICENESS = 19
# Ctrl-C and signals of Slurm reach the whole process group. The writer ignores them: its rank ends it.
IGNORED_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
# The command is not `python -m`, with which the classes of messages would belong to the module __main__.
_PROGRAM = f"from {__name__} import main; main()"
# Bytes that a rank's files need in addition to the tensors: for the archives and for padding.
_OVERHEAD_BYTES = 1 << 24
# (number of the fragment in the table, offset in the piece in bytes, first element of the shard, number of
# elements)
_Part = tuple[int, int, int, int]


def ring_bytes(layer_parameters: Sequence[int], config: Config) -> int:
    """Returns the bytes of the ring of one rank: enough for its state, but at most --async-save-memory-gb.

    layer_parameters: number of parameters of each layer of the rank, in the shard of one tensor-parallel
    rank.
    """
    parallel, total = config.parallel, sum(layer_parameters)
    # The replicas share the layer files, one file at a time.
    replicas = parallel.dp_cp_size
    weights = min(total, -(-total // replicas) + max(layer_parameters, default=0))
    if not config.checkpoint.saves_layer_files:
        weights = 0
    elements = -(-total // parallel.optimizer_partitions)
    needed = (
        weights * (4 if config.precision.name == "fp32" else 2)
        + 4 * elements * (1 + config.optimizer.most_moments)
        + _OVERHEAD_BYTES
    )
    limit = config.checkpoint.async_save_memory_gb
    return needed if limit is None else min(needed, int(limit * 1e9))


@dataclass
class Written:
    """What a rank's writer has done for a save."""

    files: Files = field(default_factory=dict)
    digests: dict[str, dict[str, int]] = field(default_factory=dict)
    """Parameter -> state -> this rank's contribution to the digest."""
    problem: str = ""
    """Why the files are not complete; "" if they are."""


class BackgroundWriter:
    """The rank's side of the connection: sends files to the writer process and receives results from it."""

    def __init__(self, ring_bytes: int, heartbeat: Callable[[], None]) -> None:
        """ring_bytes: size of the shared memory. heartbeat: called for every piece that is sent."""
        self._size = max(-(-ring_bytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        self._heartbeat = heartbeat
        descriptor = os.memfd_create("checkpoint")
        os.ftruncate(descriptor, self._size)
        self._ring = mmap.mmap(descriptor, self._size)
        ours, theirs = socket.socketpair()
        with signals_blocked(IGNORED_SIGNALS):
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, (theirs.fileno(), descriptor, os.getpid()))],
                env={**os.environ, "PYTHONPATH": python_path(os.environ), "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(), descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        theirs.close()
        os.close(descriptor)
        self._pipe = Connection(ours.detach())
        self._sent = self.num_written = 0
        """Number of bytes that this rank has put into the ring, and that the writer has taken from it."""
        self._changed = threading.Condition()
        self._written: Written | None = None
        self._problem = ""
        self._outbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        for work in (self._receive, self._transmit):
            threading.Thread(target=work, name="checkpoint writer", daemon=True).start()

    def write_file(self, path: Path | None, contents: Iterable[Content]) -> None:
        """Writes the contents of a file, one after the other. Returns once all bytes are in the ring.

        path: the file; None to compute only digests. contents: the digests of their pieces, which must be in
        host memory, are computed. Raises OSError if the writer has failed.
        """
        self._send("open", None if path is None else str(path))
        for content in contents:
            self._send(
                "table", [(p.name, state, p.spec, p.axes) for p in content.pieces for state in p.values]
            )
            content.save(_RingFile(self, content.pieces))
        self._send("close")

    def end_save(self) -> None:
        """Ends the files of a save. `written` then waits until all files are on disk."""
        with self._changed:
            self._written = None
        self._send("end")

    def written(self) -> Written:
        """Waits until the writer has finished the save that `end_save` ended. Returns what it has done."""
        with self._changed:
            self._changed.wait_for(lambda: self._written is not None or self._problem != "")
            return self._written or Written(problem=self._problem)

    def close(self) -> None:
        """Ends the writer process."""
        self.process.kill()
        self.process.wait()
        self._outbox.put(("end",))  # the process is dead, so sending this message fails and the thread ends

    def append(self, data: memoryview, parts: Callable[[int, int], list[_Part]]) -> None:
        """Copies data to the ring. parts: returns the fragments between two offsets in the data."""
        done = 0
        while done < len(data):
            begin = self._sent % self._size
            count = min(PIECE_BYTES, len(data) - done, self._size - begin)
            used = -(-count // ALIGNMENT) * ALIGNMENT
            with self._changed:
                while not self._problem and self._size - (self._sent - self.num_written) < used:
                    self._changed.wait()
            self._heartbeat()  # there is space in the ring, so the writer progresses
            self._ring[begin : begin + count] = data[done : done + count]
            self._sent += used
            self._send("data", begin, count, used, parts(done, done + count))
            done += count

    def _send(self, *message: Any) -> None:
        """Queues a message. It never waits, because a busy writer may not read the messages of a save for
        long."""
        if self._problem:
            raise OSError(self._problem)
        self._outbox.put(message)

    def _transmit(self) -> None:
        """Sends the queued messages, in a thread. `_receive` reports how the writer ended."""
        with suppress(OSError):
            while True:
                self._pipe.send(self._outbox.get())

    def _receive(self) -> None:
        """Receives the writer's messages until the writer ends, in a thread."""
        problem = ""
        while not problem:
            try:
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                code = self.process.wait()
                kind, value = "failed", f"the checkpoint writer has ended with exit code {code}"
            with self._changed:
                if kind == "freed":
                    self.num_written += value
                elif kind == "written":
                    self._written = value
                else:
                    self._problem = problem = value
                self._changed.notify_all()


class _RingFile:
    """The file-like object that torch.save writes to."""

    def __init__(self, writer: BackgroundWriter, pieces: Sequence[Piece]) -> None:
        self._writer = writer
        # For each state of each piece: (address, first element in the shard, number of elements).
        self._fragments = [
            (values.data_ptr(), piece.start, values.numel())
            for piece in pieces
            for values in piece.values.values()
        ]

    def write(self, data: Any) -> int:
        """Appends the bytes of a buffer. For the storage of a tensor this buffer is the tensor's own
        memory."""
        content = memoryview(data).cast("B")
        base = int(np.frombuffer(content, np.uint8).ctypes.data) if len(content) else 0
        self._writer.append(content, lambda begin, end: self._parts(base + begin, base + end))
        return len(content)

    def flush(self) -> None:
        """Does nothing. torch.save calls it at the end."""

    def _parts(self, begin: int, end: int) -> list[_Part]:
        parts = []
        for number, (address, start, num_elements) in enumerate(self._fragments):
            first, last = max(begin, address), min(end, address + 4 * num_elements)
            if first < last:
                element = start + (first - address) // 4
                parts.append((number, first - begin, element, (last - first) // 4))
        return parts


class _WriterProcess:
    """The writer's side of the connection."""

    def __init__(self, pipe: Connection, ring: mmap.mmap) -> None:
        self._pipe, self._ring = pipe, ring
        self._result = Written()
        self._path: str | None = None
        self._file: HashedFile | None = None
        self._fragments: list[tuple[str, str, ParameterSpec, tuple[Axis, ...]]] = []

    def run(self) -> None:
        """Serves the rank until it closes the connection, or until a file cannot be written."""
        try:
            while True:
                kind, *values = self._pipe.recv()
                getattr(self, f"_{kind}")(*values)
        except EOFError:
            pass
        except OSError as error:
            with suppress(OSError):  # if the rank has ended
                self._pipe.send(("failed", write_problem(error, self._path)))

    def _open(self, path: str | None) -> None:
        self._path = path
        self._file = HashedFile(Path(path)) if path is not None else None

    def _table(self, table: list[tuple[str, str, ParameterSpec, tuple[Axis, ...]]]) -> None:
        self._fragments = table

    def _data(self, begin: int, count: int, used: int, parts: list[_Part]) -> None:
        piece = memoryview(self._ring)[begin : begin + count]
        if self._file is not None:
            self._file.write(piece)
        for number, offset, first, num_elements in parts:
            name, state_name, spec, axes = self._fragments[number]
            values = np.frombuffer(piece[offset : offset + 4 * num_elements], np.float32)
            part = host_digests(spec, axes, first, {state_name: values})[state_name]
            add_part(self._result.digests.setdefault(name, {}), state_name, part)
        self._pipe.send(("freed", used))

    def _close(self) -> None:
        if self._file is not None and self._path is not None:
            self._result.files[Path(self._path).name] = self._file.close()

    def _end(self) -> None:
        self._pipe.send(("written", self._result))
        self._result = Written()


def main() -> None:
    """Runs the writer. Arguments: descriptors of the connection and the ring, process id of the rank."""
    connection, ring, parent = map(int, sys.argv[1:])
    end_with_parent()
    if os.getppid() != parent:
        return
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(NICENESS)
    # All pages are allocated now: page faults would make the first save several times slower.
    shared = mmap.mmap(ring, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    _WriterProcess(Connection(connection), shared).run()
