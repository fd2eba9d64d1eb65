"""The nodes of a run, and the copies of files between their disks.

A node is a host: ranks with equal node names share its disk. The nodes form a ring in the order of their
first ranks, and each node keeps a second copy of the files of the node before it. Files are sent over a gloo
process group of their own, because a thread sends them while training uses the other groups.
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

# A file is sent in pieces of this size.
PIECE_BYTES = 1 << 24
# A rank may wait for a slow disk of its partner; the watchdog detects hangs.
_MAX_WAIT = timedelta(hours=2)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, and the place of one rank. names, ranks: of each node, in ring order."""

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
        """Returns the number of a rank's node."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def index(self) -> int:
        """The number of this rank's node."""
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
        """Returns the rank on the next node that keeps the copies of a rank's files; None with one node."""
        if len(self.ranks) == 1:
            return None
        node = self.node_of(rank)
        next_ranks = self.ranks[(node + 1) % len(self.ranks)]
        return next_ranks[self.ranks[node].index(rank) % len(next_ranks)]

    def sources(self) -> list[int]:
        """Returns the ranks whose files this rank keeps copies of."""
        every = (rank for ranks in self.ranks for rank in ranks)
        return sorted(rank for rank in every if self.partner_of(rank) == self.rank)


class FileTransfer:
    """Sends files of this rank's node to other ranks, and receives theirs.

    A failure to read or to write a file is a returned problem: both sides exchange all pieces of all files,
    so that they never wait for each other in vain. A lost connection is a RuntimeError.
    """

    def __init__(self) -> None:
        """Collective."""
        self._group = dist.new_group(backend="gloo", timeout=_MAX_WAIT)

    def mirror(self, folder: Path, files: Files, nodes: Nodes, count_bytes: Callable[[int], object]) -> str:
        """Sends a rank's files in a folder to its partner, and receives into the folder the files that this
        rank keeps copies of. Returns the first problem; "" if there is none.

        files: none if this rank has failed. count_bytes: called with the bytes of each piece.
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

        # Both directions at once: in a ring nobody could begin to receive otherwise.
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
        self, path: Path, facts: Mapping[str, Any], rank: int, count_bytes: Callable[[int], object]
    ) -> str:
        """Sends a file. facts: its size and digest, which `receive` gets as well. Returns why it could not be
        read, "" if it could: then the receiver gets other bytes, and finds that their digest differs."""
        problem = ""
        piece = torch.zeros(min(PIECE_BYTES, facts["bytes"]), dtype=torch.uint8)
        content = piece.numpy().data
        try:
            file = open_regular(path)
        except OSError as error:
            file, problem = None, f"{path}: {error.strerror}"
        for begin in range(0, facts["bytes"], PIECE_BYTES):
            count = min(PIECE_BYTES, facts["bytes"] - begin)
            try:
                if file is not None and file.readinto(content[:count]) != count:  # type: ignore[attr-defined]
                    problem = f"{path} is shorter than {facts['bytes']:,} bytes"
            except OSError as error:
                problem = f"{path}: {error.strerror}"
            dist.send(piece[:count], rank, self._group)
            count_bytes(count)
        if file is not None:
            file.close()
        return problem

    def receive(
        self, path: Path, facts: Mapping[str, Any], rank: int, count_bytes: Callable[[int], object]
    ) -> str:
        """Receives a file and syncs it. Returns why it is not what `facts` says; "" if it is."""
        problem, file = "", None
        try:
            file = HashedFile(path)
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        piece = torch.empty(min(PIECE_BYTES, facts["bytes"]), dtype=torch.uint8)
        for begin in range(0, facts["bytes"], PIECE_BYTES):
            count = min(PIECE_BYTES, facts["bytes"] - begin)
            dist.recv(piece[:count], rank, self._group)
            count_bytes(count)
            try:
                if file is not None and not problem:
                    file.write(piece[:count].numpy())
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        try:
            if file is not None and file.close() != facts and not problem:
                problem = f"{path}: the copy from rank {rank} differs from the file"
        except OSError as error:
            problem = problem or f"{path}: {error.strerror}"
        return problem
