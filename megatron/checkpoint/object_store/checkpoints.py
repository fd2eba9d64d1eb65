"""The checkpoints of a run in object stores: --save and --load as URLs.

The program works on the mirror (see `mirror`). Rank 0 makes its mirror show what the store holds; the mirrors
of the other nodes show only the checkpoint that is loaded. Before a load, the ranks of each node download the
files that one of them reads; after the load these files are placeholders again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.checkpoint.files import MAY_BE_INTACT
from megatron.checkpoint.formats.dcp_storage import METADATA_FILE
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.lineage.owner import ClaimFolder
from megatron.checkpoint.local.nodes import Nodes
from megatron.checkpoint.object_store.folder import FOLDER, ObjectClaims, ObjectFolder
from megatron.checkpoint.object_store.mirror import hold_mirror, show_object
from megatron.checkpoint.ranks import errors_of_all_ranks, files_of_this_rank
from megatron.checkpoint.record import Checkpoint
from megatron.config import CheckpointConfig
from megatron.errors import ConfigError, UserError, stop_at_access_error
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks
from megatron.object_store.store import check_url
from megatron.object_urls import is_url
from megatron.shares import share_out

if TYPE_CHECKING:
    from megatron.engine.pipeline_engine import GPTEngine


class ObjectCheckpoints:
    """--save and --load of a run, as one rank sees them. At least one of the two is a URL.

    options: with paths in the mirror instead of URLs.
    """

    def __init__(self, root: Path, options: CheckpointConfig) -> None:
        """root: the folder of the mirror. Sends no request."""
        self._root = root
        self._folders: dict[Path, ObjectFolder] = {}
        self._load_folder = ""
        paths: dict[str, Any] = {}
        if options.save and is_url(options.save):
            paths["save"] = str(self._add(options.save))
        if options.load and is_url(options.load):
            # A checkpoint is read through its parent, which says in which folder it is.
            parent, _, name = options.load.rstrip("/").rpartition("/")
            is_checkpoint = FOLDER.fullmatch(name) is not None and not parent.endswith("/")
            self._load_folder = name if is_checkpoint else ""
            path = self._add(parent if is_checkpoint else options.load)
            paths["load"] = str(path / name.partition(".")[0] if is_checkpoint else path)
        self.options = replace(options, **paths)
        self.nodes: Nodes
        """The mirrors of the run, and the ranks of each, after `connect`."""
        # Of the files of the checkpoint that was shared last.
        self._sizes: dict[str, int] = {}

    def _add(self, url: str) -> Path:
        scheme, _, rest = url.rstrip("/").partition("://")
        path = self._root / scheme / rest
        self._folders.setdefault(path, ObjectFolder(url, path))
        return path

    def claims(self, folder: str) -> ClaimFolder:
        """Returns the owner files of --save. folder: its path, in the mirror or not."""
        found = self._folders.get(Path(folder))
        return ClaimFolder(Path(folder)) if found is None else ObjectClaims(found.store)

    def read(self) -> None:
        """Makes the mirror show what the folders hold, on rank 0. Raises UserError for an unreadable one."""
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)  # of an earlier start of this job
        for folder in self._folders.values():
            try:
                folder.mirror()
            except OSError as error:
                raise UserError(f"{folder.store.url} cannot be read ({error.strerror})") from error
        if (path := Path(str(self.options.save))) in self._folders:
            path.mkdir(parents=True, exist_ok=True)
        if self._load_folder:
            path = Path(str(self.options.load))
            given, found = self._load_folder, self._folders[path.parent].folders.get(path.name)
            if "." in given and found != given:
                raise UserError(f"--load {path.parent}/{given} is not a complete checkpoint")

    def folder_of(self, path: Path) -> ObjectFolder | None:
        """Returns the folder in a store with this path in the mirror; None if it is in a file system."""
        return self._folders.get(path)

    def connect(self, node: str) -> None:
        """Finds the ranks that share a mirror. node: the name of this rank's node. Collective."""
        status = os.stat(self._root)
        self.nodes = Nodes.connect(f"{node} {self._root} {status.st_dev} {status.st_ino}")

    # --- a load ---

    @stop_at_access_error(MAY_BE_INTACT)
    def share(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Returns rank 0's checkpoint on every rank, in the mirror of the rank. Collective."""
        facts = None
        if checkpoint is not None and dist.get_rank() == 0:
            if (folder := self.folder_of(checkpoint.folder.parent)) is not None:
                name = checkpoint.folder.name
                facts = folder.store.url, folder.folders[name], folder.sizes(name)
        checkpoint, facts = broadcast_from_rank_0((checkpoint, facts))
        if checkpoint is None or facts is None:
            return checkpoint
        url, key, self._sizes = facts
        folder = next(folder for folder in self._folders.values() if folder.store.url == url)
        name = checkpoint.folder.name
        folder.folders[name] = key
        folder.fetched[name].clear()
        with errors_of_all_ranks():
            if self.nodes.leads:
                if dist.get_rank() != 0:
                    folder.show(name, checkpoint.run, self._sizes)
                if METADATA_FILE in self._sizes:  # the table without which nothing can be read
                    folder.fetch(name, METADATA_FILE, lambda: None)
        return replace(checkpoint, folder=folder.path / name)

    def fetch(self, checkpoint: Checkpoint, file: str, heartbeat: Callable[[], None]) -> str | None:
        """Downloads a file of a shared checkpoint. Returns why it does not exist; None if it does. Raises
        OSError if it cannot be read now."""
        folder = self.folder_of(checkpoint.folder.parent)
        try:
            if folder is not None:
                folder.fetch(checkpoint.folder.name, file, heartbeat)
        except FileNotFoundError:
            return f"{file} is missing"
        return None

    @contextmanager
    def fetched(
        self, checkpoint: Checkpoint, engine: GPTEngine, heartbeat: Callable[[], None]
    ) -> Iterator[Checkpoint]:
        """Downloads to each node the files of a shared checkpoint that one of its ranks reads, during the
        block. Yields the checkpoint with these files only. Collective; so must be the end of the block."""
        folder = self.folder_of(checkpoint.folder.parent)
        if folder is None:
            yield checkpoint
            return
        name, ranks = checkpoint.folder.name, self.nodes.ranks[self.nodes.index]
        own = files_of_this_rank(open_reader(checkpoint), engine.optimizer)
        of_ranks = gather_from_all_ranks((own, folder.fetched[name]))
        needed = set().union(*(of_ranks[rank][0] for rank in ranks))
        present = set().union(*(of_ranks[rank][1] for rank in ranks))
        shares = share_out({file: self._sizes[file] for file in needed - present}, len(ranks))
        with stop_at_access_error(MAY_BE_INTACT), errors_of_all_ranks():
            for file, share in shares.items():
                if ranks[share] == self.nodes.rank:
                    folder.fetch(name, file, heartbeat)
        if self.nodes.leads:
            for file in self._sizes.keys() - needed - present:
                (checkpoint.folder / file).unlink(missing_ok=True)
        dist.barrier()
        yield replace(checkpoint, is_partial=True)
        if dist.get_rank() == 0:
            for file, size in self._sizes.items():
                show_object(checkpoint.folder / file, size)
        elif self.nodes.leads:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)


@contextmanager
def open_object_checkpoints(options: CheckpointConfig, node: str) -> Iterator[ObjectCheckpoints | None]:
    """Yields the checkpoints of a run in object stores, with a mirror on this node during the block; None if
    neither --save nor --load is a URL. Raises ConfigError for a URL that cannot be used."""
    urls = [path for path in (options.save, options.load) if path and is_url(path)]
    for url in urls:
        check_url(url)
    if options.save in urls and any(map(FOLDER.fullmatch, str(options.save).split("/"))):
        raise ConfigError(f"--save {options.save} is in a checkpoint: set a folder outside of it")
    if not urls:
        yield None
        return
    with hold_mirror(node) as root:
        yield ObjectCheckpoints(root, options)
