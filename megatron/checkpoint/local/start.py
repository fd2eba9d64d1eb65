"""Starts a run from the newest complete checkpoint of --save and the nodes' disks.

A local checkpoint is used if it continues the checkpoint that would be loaded otherwise, and if the disks of
all nodes together have all its files. Each rank then reads its files from its own node's disk. A node may
lack a file, because it replaces a lost node or because the layout has changed. It then gets the file from a
node that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.discovery import open_or_none
from megatron.checkpoint.files import describe_file
from megatron.checkpoint.folders.of_run import FILE_SYSTEM, Folders
from megatron.checkpoint.formats.deepspeed_files import optimizer_files
from megatron.checkpoint.formats.native import NativeReader
from megatron.checkpoint.lineage.identity import LineageEntry, read_latest, read_local_entries
from megatron.checkpoint.lineage.start import is_same_path, origin_matches
from megatron.checkpoint.local.saves import LocalCheckpoints
from megatron.checkpoint.ranks import errors_of_rank_0, first_problem_of_ranks
from megatron.checkpoint.record import RUN_FILE, Checkpoint
from megatron.checkpoint.selection import check_fits, select_valid_checkpoint
from megatron.config import CheckpointConfig
from megatron.engine.pipeline_engine import GPTEngine
from megatron.files import sync_file, write_json
from megatron.mpu.world import broadcast_from_rank_0, gather_from_all_ranks
from megatron.run import Run
from megatron.text_table import first_few


def select_checkpoint(
    shared: Checkpoint | None,
    local: LocalCheckpoints | None,
    run: Run,
    heartbeat: Callable[[], None],
    folders: Folders = FILE_SYSTEM,
) -> Checkpoint | None:
    """Returns the checkpoint that the run starts from, on all ranks; None if it initializes from scratch.

    shared: the result of `find_checkpoint` on rank 0; other ranks may pass None. Its files are read only if
    no local checkpoint is newer. local: None without --save-local. folders: the folders of the run.
    Collective.
    """
    if local is None or run.config.checkpoint.load is None:
        return select_valid_checkpoint(shared, run, heartbeat, folders)

    def newest_local(other: Checkpoint | None) -> tuple[Checkpoint | None, list[str]]:
        checkpoint, reasons = _newest_complete(other, local, heartbeat)
        with errors_of_rank_0():
            if checkpoint is not None and dist.get_rank() == 0:
                check_fits(checkpoint, run)
        return checkpoint, reasons

    shared = broadcast_from_rank_0(shared)
    checkpoint, reasons = newest_local(shared)
    if checkpoint is None:
        valid = select_valid_checkpoint(shared, run, heartbeat, folders)
        if shared is not None and (valid is None or valid.folder != shared.folder):
            checkpoint, reasons = newest_local(valid)  # `shared` was damaged, and may have been newer
        if checkpoint is None and valid is not None:
            return replace(valid, skip_reason="; ".join(filter(None, [valid.skip_reason, *reasons])))
    return checkpoint


def _newest_complete(
    shared: Checkpoint | None, local: LocalCheckpoints, heartbeat: Callable[[], None]
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest complete local checkpoint that continues `shared` (None if there is none), and why
    newer local checkpoints are not used. Collective."""
    entries: tuple[LineageEntry, ...] = ()
    latest = None
    save = Path(str(local.options.save))
    with errors_of_rank_0(f"--save {save}"):
        if dist.get_rank() == 0:
            entries, latest = read_local_entries(save), read_latest(save)
    entries, latest = broadcast_from_rank_0((entries, latest))
    is_in_save = shared is not None and is_same_path(shared.folder.parent, save)
    reasons: list[str] = []
    for number, entry in reversed(list(enumerate(entries))):
        if is_in_save and shared is not None and entry.iteration <= shared.state.iteration:
            break
        folder = local.folder / entry.name
        checkpoint = _open_on_a_node(folder, entry)
        if checkpoint is None:
            reasons.append(f"no node has {RUN_FILE} of the local checkpoint {entry.name}")
            continue
        if not continues(checkpoint, shared, latest, local.options):
            continue
        needed = [path.name for _, path, _ in optimizer_files(checkpoint.folder, checkpoint.run["files"])]
        local.present = _intact_files(checkpoint, needed, local, heartbeat)
        if lacking := sorted(set(needed) - frozenset().union(*local.present)):
            reasons.append(
                f"the local checkpoint {entry.name} is incomplete: no node has an intact copy of "
                f"{first_few(lacking, 1)}"
            )
            continue
        local.entries = entries[: number + 1]
        instead = "no checkpoint in --save" if shared is None else f"newer than {shared.folder}"
        why = "; ".join([f"local checkpoint, {instead}", *reasons])
        return replace(checkpoint, skip_reason=why), reasons
    return None, reasons


def _open_on_a_node(folder: Path, entry: LineageEntry) -> Checkpoint | None:
    """Returns the local checkpoint of an entry. The first rank whose node has the checkpoint's `run.json`
    reads it for all ranks. `folder` of the result is the folder on this rank's node. Collective."""
    own: Checkpoint | None = None
    with suppress(OSError):
        own = open_or_none(folder, ())
    has = own is not None and own.run["sha256"] == entry.sha256
    holder = next((rank for rank, found in enumerate(gather_from_all_ranks(has)) if found), None)
    if holder is None:
        return None
    shared = [own]
    dist.broadcast_object_list(shared, src=holder)
    assert shared[0] is not None
    return replace(shared[0], folder=folder, is_local=True, is_partial=True)


def continues(
    checkpoint: Checkpoint, shared: Checkpoint | None, latest: str | None, options: CheckpointConfig
) -> bool:
    """Returns whether a local checkpoint continues the run that would start from `shared` (None: from
    scratch). latest: the name in `latest` of --save.

    A local checkpoint does not continue the run if --save has a checkpoint that was saved later. If a user
    has set `latest` to an older checkpoint, a local checkpoint that was saved after the newest checkpoint in
    --save does not continue the run either.
    """
    save = str(options.save)
    if shared is None:
        return is_same_path(str(options.load), save) and not (checkpoint.lineage or checkpoint.origin)
    if not is_same_path(shared.folder.parent, save):
        return origin_matches(checkpoint.origin, shared, options)
    lineage = checkpoint.lineage
    digests = [entry.sha256 for entry in lineage]
    # If the newest checkpoint of the lineage is damaged, `shared` is an older one, and `latest` names the
    # damaged one.
    digest = shared.run.get("sha256")
    return digest is not None and digest in digests and (digests[-1] == digest or lineage[-1].name == latest)


def _intact_files(
    checkpoint: Checkpoint, names: Sequence[str], local: LocalCheckpoints, heartbeat: Callable[[], None]
) -> tuple[frozenset[str], ...]:
    """Returns for each node which of the files `names` are on its disk with the size and digest in
    `run.json`. The ranks of a node share the work. Collective."""
    ranks = local.nodes.ranks[local.nodes.index]
    own = set()
    on_disk: set[str] = set()
    with suppress(OSError):  # the disk fails, or the folder is missing: other nodes may have copies
        on_disk = set(os.listdir(checkpoint.folder))
    present = [name for name in names if name in on_disk]
    for name in present[ranks.index(local.nodes.rank) :: len(ranks)]:
        with suppress(OSError):
            if describe_file(checkpoint.folder / name) == checkpoint.run["files"][name]:
                own.add(name)
        heartbeat()
    of_ranks = gather_from_all_ranks(own)
    return tuple(frozenset().union(*(of_ranks[rank] for rank in node)) for node in local.nodes.ranks)


def fetch_files(
    checkpoint: Checkpoint, local: LocalCheckpoints, engine: GPTEngine, heartbeat: Callable[[], None]
) -> str:
    """Copies to each node the files that its disk lacks and that its ranks, or the ranks of the node before
    it, read. After that, any one node may be lost before the next save. Returns a sentence about the copies;
    "" if there are none. Collective.

    Raises OSError on every rank if a file cannot be copied. The next start then does not use the checkpoint.
    """
    nodes = local.nodes
    own = NativeReader(checkpoint).files_of_pieces(engine.optimizer.pieces(with_values=False))
    of_ranks = gather_from_all_ranks(own)
    copies: list[tuple[str, int, int]] = []
    for node, ranks in enumerate(nodes.ranks):
        needed = set().union(*(of_ranks[rank] for rank in (*ranks, *nodes.ranks[node - 1])))
        for number, name in enumerate(sorted(needed - local.present[node])):
            holders = [other for other, files in enumerate(local.present) if name in files]
            sources = nodes.ranks[holders[number % len(holders)]]
            copies.append((name, sources[number % len(sources)], ranks[number % len(ranks)]))
    problem: str | None = None
    try:
        checkpoint.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = str(error)
    # All ranks use the same order, so that no two ranks wait for each other.
    for name, source, target in copies:
        path, record = checkpoint.folder / name, checkpoint.run["files"][name]
        found = ""
        if nodes.rank == source:
            found = local.transfer.send(path, record, target, lambda count: heartbeat())
        if nodes.rank == target:
            found = local.transfer.receive(path, record, source, lambda count: heartbeat())
        problem = problem or found or None
    try:
        if nodes.leads and not problem:  # a node that was lost may have another checkpoint's `run.json`
            write_json(checkpoint.folder / RUN_FILE, checkpoint.run)
            sync_file(checkpoint.folder.parent)
    except OSError as error:
        problem = str(error)
    if (failed := first_problem_of_ranks(problem)) is not None:
        if nodes.rank == 0:
            local.set_entries(local.entries[:-1])
        raise OSError(
            f"local checkpoint {checkpoint.folder.name}: rank {failed[0]} cannot copy a file ({failed[1]}): "
            "the next start uses an older checkpoint"
        )
    receivers = sorted({nodes.names[nodes.node_of(target)] for _, _, target in copies})
    return (
        f"{len(copies)} of its files were copied from other nodes to {first_few(receivers)}" if copies else ""
    )
