"""The nodes of a run, and the copies of files between their disks.

A node is a host: ranks with equal node names share its disk. The nodes form a ring in the order of their
first ranks, and each node keeps a second copy of the files of the node before it. A thread sends files over a
gloo process group of its own, because training uses the other groups at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.files import Files, HashedFile
from megatron.errors import one_line
from megatron.files import open_regular
from megatron.mpu.world import gather_from_all_ranks

# Size of the pieces in which a file is sent, in bytes.
PIECE_BYTES = 1 << 24
# Largest time that a rank waits for its partner, whose disk may be slow. The watchdog detects hangs.
_MAX_WAIT = timedelta(hours=2)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run as one rank sees them. names, ranks: name and ranks of each node, in ring order."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def connect(cls, name: str) -> Nodes:
        """Returns the nodes of the run. name: the name of this rank's node. Collective."""
        names = gather_from_all_ranks(name)
        ordered = tuple(dict.fromkeys(names))
        ranks = tuple(tuple(rank for rank, own in enumerate(names) if own == node) for node in ordered)
        return cls(ordered, ranks, dist.get_rank())

    def node_of(self, rank: int) -> int:
        """Returns the index of a rank's node."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def index(self) -> int:
        """The index of this rank's node."""
        return self.node_of(self.rank)

    @property
    def name(self) -> str:
        """The name of this rank's node."""
        return self.names[self.index]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.rank == self.ranks[self.index][0]

    def partner_of(self, rank: int) -> int | None:
        """Returns the rank on the next node that keeps copies of `rank`'s files; None if there is only one
        node."""
        if len(self.ranks) == 1:
            return None
        node = self.node_of(rank)
        next_ranks = self.ranks[(node + 1) % len(self.ranks)]
        return next_ranks[self.ranks[node].index(rank) % len(next_ranks)]

    def sources(self) -> list[int]:
        """Returns the ranks whose files this rank copies to its node."""
        every = (rank for ranks in self.ranks for rank in ranks)
        return sorted(rank for rank in every if self.partner_of(rank) == self.rank)


class FileTransfer:
    """Sends files of this rank's node to other ranks, and receives files from other ranks.

    A file that cannot be read or written is returned as a problem, not raised: both sides exchange all pieces
    of all files in any case, so that neither waits forever. A lost connection raises RuntimeError.
    """

    def __init__(self) -> None:
        """Creates the process group. Collective."""
        self._group = dist.new_group(backend="gloo", timeout=_MAX_WAIT)

    def mirror(self, folder: Path, files: Files, nodes: Nodes, count_bytes: Callable[[int], object]) -> str:
        """Sends this rank's files in a folder to its partner, and receives into the folder the files that
        this rank copies from another node. Returns the first problem; "" if there is none.

        files: {} if this rank's save has failed. count_bytes: called with the number of bytes of each piece.
        """
        partner = nodes.partner_of(nodes.rank)
        if partner is None:
            return ""
        problems: list[str] = []

        def receive() -> None:
            try:
                for source in nodes.sources():
                    problems.append(self._receive_files(folder, source, count_bytes))
            except RuntimeError as error:
                problems.append(one_line(error))

        # The rank sends and receives at the same time. If all ranks first sent to their partners, none
        # would receive.
        thread = threading.Thread(target=receive, name="mirror", daemon=True)
        thread.start()
        sent = self._send_files(folder, files, partner, count_bytes)
        thread.join()
        return next(filter(None, [sent, *problems]), "")

    def _send_files(self, folder: Path, files: Files, rank: int, count_bytes: Callable[[int], object]) -> str:
        dist.send_object_list([files], rank, self._group)
        problems = [self.send(folder / name, files[name], rank, count_bytes) for name in files]
        return next(filter(None, problems), "")

    def _receive_files(self, folder: Path, rank: int, count_bytes: Callable[[int], object]) -> str:
        received: list[Any] = [None]
        dist.recv_object_list(received, rank, self._group)
        files: Files = received[0]
        problems = [self.receive(folder / name, files[name], rank, count_bytes) for name in files]
        return next(filter(None, problems), "")

    def send(
        self, path: Path, file_record: Mapping[str, Any], rank: int, count_bytes: Callable[[int], object]
    ) -> str:
        """Sends a file to `rank`. file_record: the file's size and digest; `receive` gets the same record.

        Returns why the file could not be read; "" if it was. If the file could not be read, the receiver gets
        wrong bytes, and finds that their digest differs from the record."""
        problem = ""
        piece = torch.zeros(min(PIECE_BYTES, file_record["bytes"]), dtype=torch.uint8)
        content = piece.numpy().data
        try:
            file = open_regular(path)
        except OSError as error:
            file, problem = None, f"{path}: {error.strerror}"
        for begin in range(0, file_record["bytes"], PIECE_BYTES):
            count = min(PIECE_BYTES, file_record["bytes"] - begin)
            try:
                if file is not None and file.readinto(content[:count]) != count:  # type: ignore[attr-defined]
                    problem = f"{path} is shorter than {file_record['bytes']:,} bytes"
            except OSError as error:
                problem = f"{path}: {error.strerror}"
            dist.send(piece[:count], rank, self._group)
            count_bytes(count)
        if file is not None:
            file.close()
        return problem

    def receive(
        self, path: Path, file_record: Mapping[str, Any], rank: int, count_bytes: Callable[[int], object]
    ) -> str:
        """Receives a file from `rank` and syncs it to disk.

        Returns why the file differs from `file_record`; "" if it is equal."""
        problem, file = "", None
        try:
            file = HashedFile(path)
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        piece = torch.empty(min(PIECE_BYTES, file_record["bytes"]), dtype=torch.uint8)
        for begin in range(0, file_record["bytes"], PIECE_BYTES):
            count = min(PIECE_BYTES, file_record["bytes"] - begin)
            dist.recv(piece[:count], rank, self._group)
            count_bytes(count)
            try:
                if file is not None and not problem:
                    file.write(piece[:count].numpy())
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        try:
            if file is not None and file.close() != file_record and not problem:
                problem = f"{path}: the copy from rank {rank} differs from the file"
        except OSError as error:
            problem = problem or f"{path}: {error.strerror}"
        return problem
