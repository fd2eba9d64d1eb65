"""Writes the files of a save: a `SaveFormat` makes their content, one of two classes writes them.

`DirectFiles` writes while training waits, `BackgroundFiles` hands the content to the rank's writer process.
Both compute the SHA-256 of a file while they write it. The archives have no CRC-32 of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import Files, HashedFile
from megatron.checkpoint.formats.staged_archive import is_staged
from megatron.checkpoint.saving.writer import BackgroundWriter, StoredFragment
from megatron.optimizer.zero import LocalParamState


@dataclass(frozen=True)
class Content:
    """A part of a file, or the whole file.

    save: writes it to a file-like object. parts: the parts of parameters in it, with the tensors whose memory
    `save` writes.
    """

    save: Callable[[Any], None]
    parts: Sequence[LocalParamState] = ()


class RankFiles(ABC):
    """Writes the files of one rank."""

    @abstractmethod
    def make_folder(self, folder: Path) -> None:
        """Creates the folder of the save, unless another rank has created it."""

    @abstractmethod
    def write(self, file: Path | None, contents: Iterable[Content]) -> None:
        """Writes a file. file: None for contents that another rank writes: only their digests are computed,
        to compare the replicas."""


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
                self._writer.write_file(file, self._with_fragments(contents, digests_only=file is None))
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

    def _with_fragments(
        self, contents: Iterable[Content], digests_only: bool
    ) -> Iterator[tuple[list[StoredFragment], Callable[[Any], None]]]:
        """Yields each content's fragments in host memory, and its `save`. Computes the digests of fragments
        on a device: without fragments nothing is yielded for digests only."""
        for content in contents:
            fragments = [fragment for part in content.parts for fragment in self._fragments(part)]
            if fragments or not digests_only:
                yield fragments, content.save

    def _fragments(self, part: LocalParamState) -> list[StoredFragment]:
        on_device = {name: value for name, value in part.values.items() if is_staged(value.device)}
        if on_device:
            found = fragment_digests(part.spec, part.axes, part.start, on_device)
            self.digests.setdefault(part.name, {}).update(found)
        return [
            StoredFragment(
                part.name, state, part.spec, part.axes, part.start, value.data_ptr(), value.numel()
            )
            for state, value in part.values.items()
            if state not in on_device
        ]
