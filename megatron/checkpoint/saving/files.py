"""Writes the files of a save: a `CheckpointWriter` makes their content, one of two classes writes them.

`DirectFiles` writes while training waits, `BackgroundFiles` hands the content to the rank's writer process.
Both compute the SHA-256 of a file while they write it. The archives have no CRC-32 of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.digests import piece_digests
from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.archive_writer import is_staged
from megatron.checkpoint.formats.writing import Content, RankFiles
from megatron.checkpoint.saving.writer import BackgroundWriter
from megatron.mpu.pieces import Piece


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._problem = self._problem or str(error)

    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """See `RankFiles`. Returns once the content is copied. After a failure it does nothing: this rank
        still takes part in the collectives of the save."""
        try:
            if not self._problem and self._writer is not None:
                self._writer.write_file(file, self._in_host_memory(contents, digests_only=file is None))
        except OSError as error:
            self._problem = str(error)

    def end(self) -> str:
        """Ends the files of the save. Returns why this rank's part has failed; "" if it has not so far."""
        try:
            if not self._problem and self._writer is not None:
                self._writer.end_save()
        except OSError as error:
            self._problem = str(error)
        return self._problem

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
