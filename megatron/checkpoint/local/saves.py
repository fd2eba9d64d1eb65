"""Saves to --save-local: each node's disk gets the files of its own ranks and of the node before it.

Such a checkpoint is a native checkpoint whose files are on several disks. Each node has `run.json`. A save is
always in the background. Once all files are written and mirrored, rank 0 sends `run.json` to the first rank
of each node, which gives its part of the checkpoint the final name. When all nodes have answered, rank 0
records the checkpoint in `latest_local`. Only then a restart may use the checkpoint.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.files import Files
from megatron.checkpoint.lineage.identity import CHECKPOINT_NAME, LineageEntry, write_local_entries
from megatron.checkpoint.local.nodes import FileTransfer, Nodes
from megatron.checkpoint.ranks import errors_of_all_ranks
from megatron.checkpoint.record import RUN_FILE
from megatron.checkpoint.saving.background import BackgroundSave, wait_for_value
from megatron.checkpoint.saving.publishing import UNFINISHED, remove_checkpoint
from megatron.config import CheckpointConfig
from megatron.errors import UserError
from megatron.files import rename_synced, sync_file, write_json
from megatron.mpu.world import broadcast_from_rank_0

_LOG = logging.getLogger(__name__)
# Number of kept checkpoints. A restart uses the newest; the one before it is needed if the newest is damaged.
NUM_KEPT = 2


@dataclass
class LocalCheckpoints:
    """A run's local checkpoints as one rank sees them.

    options: contain --save and --save-local. folder: the folder of the local checkpoints on this rank's node.
    store: the ranks' key-value store.
    """

    options: CheckpointConfig
    folder: Path
    nodes: Nodes
    transfer: FileTransfer
    store: dist.Store
    entries: tuple[LineageEntry, ...] = ()
    """The checkpoints in `latest_local`, oldest first. Only rank 0 has them."""
    present: tuple[frozenset[str], ...] = ()
    """For each node, the intact files on its disk of the checkpoint that the run starts from."""
    num_left_out: int = 0
    """Number of saves that were skipped because another save was in flight."""
    _num_saves: int = field(default=0, init=False)

    @classmethod
    def connect(cls, options: CheckpointConfig, node: str, store: dist.Store) -> LocalCheckpoints:
        """Returns the local checkpoints of the run. node: the name of this rank's node. Collective.

        Raises UserError on every rank if a node cannot write to its folder, or if nodes share a disk.
        """
        nodes = Nodes.connect(node)
        folder = Path(options.local_folder(node))
        _check_disks(options, folder, nodes)
        return cls(options, folder, nodes, FileTransfer(), dist.PrefixStore("local checkpoints", store))

    def notes(self) -> list[str]:
        """Returns a sentence if files are not mirrored, because the run has only one node; otherwise []."""
        if len(self.nodes.names) > 1:
            return []
        return ["--save-local: the run has one node, so its local checkpoints are not mirrored"]

    # --- a save ---

    def begin(self, saving_name: str) -> Path:
        """Returns the folder of a new save on this node, under its temporary name. Collective."""
        self._num_saves += 1
        return self.folder / broadcast_from_rank_0(saving_name)

    def mirror(self, save: BackgroundSave, files: Files, problem: str) -> str:
        """Copies this rank's files to its partner. Returns the first problem; "" if there is none. Runs in a
        thread of each rank. problem: why this rank's files are not complete; "" if they are."""
        copied = self.transfer.mirror(save.saving, {} if problem else files, self.nodes, save.count_bytes)
        return problem or copied

    def commit(self, saving: Path, run: dict[str, Any] | None) -> str:
        """Completes a save on all nodes. Returns the first problem; "" if there is none. Runs in a thread of
        rank 0.

        saving: the folder on rank 0's node. run: the content of `run.json`; None if the save has failed.
        """
        entries = self.entries
        if run is not None:
            name = f"global_step{run['state']['iteration']}"
            entry = LineageEntry(name, run["state"]["iteration"], run["run_id"], run["sha256"])
            before = [other for other in self.entries if other.name != name]
            entries = (*before, entry)[-NUM_KEPT:]
        kept = [entry.name for entry in entries]
        self.store.set(self._key("decision"), json.dumps([run, kept]))
        problems = [self._commit_on_node(saving, run, kept)]
        leaders = [ranks[0] for ranks in self.nodes.ranks[1:]]
        problems += [wait_for_value(self.store, self._key(rank)).decode() for rank in leaders]
        for what in ("decision", *leaders):
            self.store.delete_key(self._key(what))
        problem = next(filter(None, problems), "")
        if run is not None and not problem:
            self.set_entries(entries)
        return problem

    def follow(self, save: BackgroundSave) -> None:
        """Completes or deletes the save on this node, as rank 0 decides. Runs in a thread of each node's
        first rank."""
        if not self.nodes.leads:
            return
        run, kept = json.loads(wait_for_value(self.store, self._key("decision")))
        self.store.set(self._key(self.nodes.rank), self._commit_on_node(save.saving, run, kept))

    def set_entries(self, entries: tuple[LineageEntry, ...]) -> None:
        """Writes `latest_local`, on rank 0. Raises OSError if it cannot be written."""
        write_local_entries(
            Path(str(self.options.save)),
            entries,
            folder=str(self.options.save_local),
            nodes=self.nodes.names,
        )
        self.entries = entries

    def _key(self, what: object) -> str:
        # The number is equal on all ranks: no rank begins a save before the previous save has ended.
        return f"{self._num_saves} {what}"

    def _commit_on_node(self, saving: Path, run: dict[str, Any] | None, kept: list[str]) -> str:
        """Gives this node's part of a checkpoint its name, and deletes all other local checkpoints except
        `kept`. Without `run` it deletes only the failed save, because the folder may already belong to the
        run's next job. Returns the problem of the save; "" if there is none."""
        try:
            if run is None:
                remove_checkpoint(saving)
                return ""
            final = saving.with_name(f"global_step{run['state']['iteration']}")
            write_json(saving / RUN_FILE, run)
            sync_file(saving)
            remove_checkpoint(final)  # of an earlier start; the run did not resume from it
            rename_synced(saving, final)
        except OSError as error:
            return f"node {self.nodes.name}: {error}"
        for path in sorted(self.folder.iterdir()):
            is_old = CHECKPOINT_NAME.fullmatch(path.name) is not None and path.name not in kept
            if is_old or UNFINISHED.fullmatch(path.name):
                try:
                    remove_checkpoint(path)
                except OSError as error:  # the new checkpoint is complete in any case
                    _LOG.warning("the local checkpoint %s cannot be deleted: %s", path, error)
        return ""


def _check_disks(options: CheckpointConfig, folder: Path, nodes: Nodes) -> None:
    """Raises UserError on every rank unless all ranks of a node share a folder, and different nodes have
    different folders. Collective."""
    token = f".node-{broadcast_from_rank_0(secrets.token_hex(8))}"
    own = folder / f"{token}-{nodes.index}"
    try:
        with errors_of_all_ranks():
            if nodes.leads:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    own.touch()
                except OSError as error:
                    raise UserError(
                        f"--save-local {options.save_local} is not writable on node {nodes.name} "
                        f"({error.strerror})"
                    ) from error
        with errors_of_all_ranks():
            _check_sharing(options, folder, nodes, token)
    finally:
        if nodes.leads:
            with suppress(OSError):
                own.unlink()


def _check_sharing(options: CheckpointConfig, folder: Path, nodes: Nodes, token: str) -> None:
    """Raises UserError unless this node's first rank alone has written a file to this folder. token: prefix
    of the names of these files."""
    try:
        found = {path.name for path in folder.glob(f"{token}-*")}
    except OSError as error:
        raise UserError(
            f"--save-local {options.save_local} cannot be read on node {nodes.name} ({error.strerror})"
        ) from error
    own = f"{token}-{nodes.index}"
    if others := sorted(found - {own}):
        other = nodes.names[int(others[0].rpartition("-")[2])]
        raise UserError(
            f"--save-local {options.save_local}: nodes {other} and {nodes.name} have one folder, expected "
            "one on the disk of each node: set another folder, or put {node} into the path, which stands for "
            "the node's name"
        )
    if own not in found:
        raise UserError(
            f"--save-local {options.save_local}: rank {nodes.rank} does not see the files of rank "
            f"{nodes.ranks[nodes.index][0]}, although both are on node {nodes.name}: set a folder that all "
            "processes of a node share"
        )
