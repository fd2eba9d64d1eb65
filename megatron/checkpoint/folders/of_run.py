"""The folders of a run's --save and --load, each in a file system or in an object store.

Rank 0 reads which checkpoints an object store holds; the other ranks know only the checkpoint that is loaded.
Before a load, the ranks of each node download the files that one of them reads to the node's disk. After the
load these files are removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.checkpoint.files import MAY_BE_INTACT
from megatron.checkpoint.folders.objects import FOLDER, ObjectFolder
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.local.nodes import Nodes
from megatron.checkpoint.names import METADATA_FILE
from megatron.checkpoint.ranks import errors_of_all_ranks
from megatron.checkpoint.record import Checkpoint
from megatron.checkpoint.saving.publishing import Folder
from megatron.config import CheckpointConfig
from megatron.errors import ConfigError, UserError, stop_at_access_error
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks
from megatron.object_store.cache import hold_cache
from megatron.object_store.store import check_url, is_url
from megatron.shares import share_out

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine


class Folders:
    """The folders of a run, as one rank sees them."""

    def __init__(self, cache: Path, load: str = "", save: str = "") -> None:
        """cache: folder on this node for files from object stores. load, save: --load and --save. Sends no
        request."""
        self._cache, self._load = cache, load
        urls = [_split(folder)[0] for folder in (save, load) if is_url(folder)]
        self._folders = {url: ObjectFolder(url, cache / url.replace("://", "/")) for url in urls}
        self.nodes: Nodes
        """The ranks of each node. `connect` sets it, if a folder is in a store."""

    def at(self, folder: str) -> Path:
        """Returns the path of a folder: an `ObjectPath` for a URL."""
        if not is_url(folder):
            return Path(folder)
        url, name = _split(folder)
        path = self._folders[url].path
        return path / name.partition(".")[0] if name else path

    def folder(self, folder: str) -> Folder:
        """Returns the `Folder` of --save."""
        return self._folders[_split(folder)[0]] if is_url(folder) else Folder(Path(folder))

    def read(self) -> None:
        """Reads which checkpoints the stores hold, on rank 0. Raises UserError for a folder that cannot be
        read."""
        for folder in self._folders.values():  # before any folder is read: one may be inside another
            shutil.rmtree(folder.tree.cache, ignore_errors=True)  # files of an earlier start of this job
        for url, folder in self._folders.items():
            try:
                folder.read()
            except OSError as error:
                raise UserError(f"{url} cannot be read ({error.strerror})") from error
        url, name = _split(self._load)
        if is_url(url) and "." in name and self._folders[url].keys.get(name.partition(".")[0]) != name:
            raise UserError(f"--load {url}/{name} is not a complete checkpoint")

    def connect(self, node: str) -> None:
        """Finds the ranks that share a node's cache. node: the name of this rank's node. Collective."""
        if self._folders:
            status = os.stat(self._cache)
            self.nodes = Nodes.connect(f"{node} {self._cache} {status.st_dev} {status.st_ino}")

    def _store_of(self, checkpoint: Checkpoint | None) -> ObjectFolder | None:
        """Returns the folder in an object store with a checkpoint; None if the checkpoint is in a file
        system."""
        return None if checkpoint is None else self._folders.get(str(checkpoint.folder.parent))

    @stop_at_access_error(MAY_BE_INTACT)
    def share(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Returns the checkpoint that rank 0 passes, on every rank. Collective."""
        checkpoint = broadcast_from_rank_0(checkpoint)
        if checkpoint is None or (folder := self._store_of(checkpoint)) is None:
            return checkpoint
        name = checkpoint.folder.name
        key, files = broadcast_from_rank_0((folder.keys.get(name, ""), folder.tree.folders.get(name, {})))
        if dist.get_rank() != 0:
            folder.add(name, key, files)
        with errors_of_all_ranks():
            if self.nodes.leads:
                folder.remove_fetched()  # files of a checkpoint that was not loaded
                if METADATA_FILE in files:  # the table that every reader needs
                    folder.fetch(name, METADATA_FILE, lambda: None)
        return replace(checkpoint, folder=folder.path / name)

    def fetch(self, checkpoint: Checkpoint, file: str, heartbeat: Callable[[], None]) -> str | None:
        """Makes a file of a shared checkpoint available on this node. Returns why the file does not exist;
        None if it exists. Raises OSError if it cannot be read now."""
        try:
            if (folder := self._store_of(checkpoint)) is not None:
                folder.fetch(checkpoint.folder.name, file, heartbeat)
        except FileNotFoundError:
            return f"{file} is missing"
        return None

    @contextmanager
    def fetched(
        self, checkpoint: Checkpoint, engine: GPTEngine, heartbeat: Callable[[], None]
    ) -> Iterator[Checkpoint]:
        """Makes the files of a shared checkpoint that a rank of this node reads available, during the block.
        Yields the checkpoint with these files. Beginning and end of the block are collective."""
        if (folder := self._store_of(checkpoint)) is None:
            yield checkpoint
            return
        name, ranks = checkpoint.folder.name, self.nodes.ranks[self.nodes.index]
        known = folder.tree.folders[name]
        # Files that a rank of this node has verified. No rank downloads before all ranks have looked for
        # them.
        present = {file for file in known if os.path.exists(checkpoint.folder / file)}
        with errors_of_all_ranks():
            own = open_reader(checkpoint).files_of_pieces(engine.optimizer.pieces(with_values=False))
        of_ranks = gather_from_all_ranks(own)
        needed = set().union(*(of_ranks[rank] for rank in ranks))
        shares = share_out({file: known[file].size for file in needed - present}, len(ranks))
        with stop_at_access_error(MAY_BE_INTACT), errors_of_all_ranks():
            for file, share in shares.items():
                if ranks[share] == self.nodes.rank:
                    folder.fetch(name, file, heartbeat)
        yield replace(checkpoint, is_partial=True)
        if self.nodes.leads:
            folder.remove_fetched()


def _split(url: str) -> tuple[str, str]:
    """Returns (folder of checkpoints in a URL, name of the checkpoint in it; "" if the URL names none). A
    checkpoint is read through its folder, which knows the key of each checkpoint."""
    parent, _, name = url.rstrip("/").rpartition("/")
    is_checkpoint = FOLDER.fullmatch(name) is not None and not parent.endswith("/")
    return (parent, name) if is_checkpoint else (url.rstrip("/"), "")


FILE_SYSTEM = Folders(Path(os.devnull))


@contextmanager
def open_folders(options: CheckpointConfig, node: str) -> Iterator[Folders]:
    """Yields the folders of a run. If one of them is in an object store, the run has a cache on this node
    during the block. Raises ConfigError for a URL that cannot be used."""
    urls = [path for path in (options.save, options.load) if path and is_url(path)]
    for url in urls:
        check_url(url)
    if options.save in urls and any(map(FOLDER.fullmatch, str(options.save).split("/"))):
        raise ConfigError(f"--save {options.save} is in a checkpoint: set a folder outside of it")
    if not urls:
        yield FILE_SYSTEM
        return
    with hold_cache(node) as cache:
        yield Folders(cache, options.load or "", options.save or "")
