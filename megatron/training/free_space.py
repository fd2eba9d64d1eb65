"""Compares the planned size of a checkpoint with the free space of --save and --save-local."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.lineage.identity import CHECKPOINT_NAME
from megatron.checkpoint.local.saves import NUM_KEPT, LocalCheckpoints
from megatron.checkpoint.saving.publishing import UNFINISHED
from megatron.cluster.exit_codes import SharedUserError
from megatron.config import CheckpointConfig, Config
from megatron.config.registries import OPTIMIZERS
from megatron.model.layer_kinds import layer_kinds
from megatron.mpu.world import gather_from_all_ranks
from megatron.object_store.store import is_url
from megatron.run import Run


def checkpoint_bytes(config: Config, num_parameters: int, save_format: str) -> int:
    """Returns the size of a checkpoint of all ranks in bytes: weights and moments in fp32, and in native
    files also the weights in the precision of the run."""
    choice = OPTIMIZERS[config.optimizer.optimizer]
    matrices = sum(kind.matrix_elements for kind in layer_kinds(config.model)) if choice.matrix_moments else 0
    moments = len(choice.moments) * (num_parameters - matrices) + len(choice.matrix_moments) * matrices
    weight_bytes = 4 if config.precision.name == "fp32" else 2
    return 4 * (num_parameters + moments) + weight_bytes * num_parameters * (save_format == "native")


def check_free_space(run: Run, local: LocalCheckpoints | None) -> list[str]:
    """Returns a warning for each file system that has no room for all checkpoints that the run will keep. An
    object store has no limit. Collective.

    Raises SharedUserError on all ranks if a file system has no room for one checkpoint. Does nothing with
    --no-preflight.
    """
    config, start, iterations = run.config, run.start, run.length.iterations
    options, training, num_parameters = config.checkpoint, config.training, run.stages.total_parameters
    if options.save is None or training.no_train or training.no_preflight or start.iteration >= iterations:
        return []
    found: list[tuple[str, bool] | None] = []
    if dist.get_rank() == 0 and not is_url(options.save):
        interval = options.save_interval or iterations
        first, last = start.iteration // interval, -(-iterations // interval)
        retained = _retained(options, interval, last) - _retained(options, interval, first)
        size = checkpoint_bytes(config, num_parameters, options.save_format)
        where, saves = f"--save {options.save}", last - first
        found.append(_shortage(where, options.save, size, saves, options.keep_last, retained))
    if local is not None and local.nodes.leads:
        nodes = len(local.nodes.names)
        size = checkpoint_bytes(config, num_parameters, "native") * min(nodes, 2) // nodes
        where, saves = f"node {local.nodes.name}: --save-local {options.save_local}", NUM_KEPT + 1
        found.append(_shortage(where, str(local.folder), size, saves, NUM_KEPT))
    everywhere = [shortage for of_rank in gather_from_all_ranks(found) for shortage in of_rank if shortage]
    for sentence, is_error in everywhere:
        if is_error:
            raise SharedUserError(f"{sentence}. Free space, or set another folder.")
    remedy = "free space, set another folder, or set --keep-last lower"
    return [f"WARNING: {sentence}; {remedy}" for sentence, _ in everywhere]


def _retained(options: CheckpointConfig, interval: int, saves: int) -> int:
    """Returns the number of checkpoints that --save-retain-interval keeps in addition to --keep-last, after
    a number of saves, one every `interval` iterations."""
    older = max(saves - (options.keep_last or 0), 0)
    return min(older, older * interval // options.save_retain_interval) if options.save_retain_interval else 0


def _shortage(
    where: str, folder: str, size: int, saves: int, keep_last: int | None, retained: int = 0
) -> tuple[str, bool] | None:
    """Returns a sentence about missing space, and whether not even one checkpoint fits. Returns None if all
    checkpoints that the run keeps fit, or if the file system reports no size.

    A save can use the space that is not reserved for root or limited by a quota, and the space of unfinished
    saves of killed jobs, which are deleted first. With keep_last, an old checkpoint is deleted when the new
    one is complete, except `retained` checkpoints. size: bytes of a checkpoint. saves: number of checkpoints
    that the run will save.
    """
    try:
        stats, paths = os.statvfs(folder), list(Path(folder).iterdir())
        leftovers = [path for path in paths if UNFINISHED.fullmatch(path.name)]
        free = stats.f_bavail * stats.f_frsize
        free += sum(file.stat().st_size for path in leftovers for file in path.rglob("*"))
    except OSError:
        return None  # the save will report the error of the file system
    if not stats.f_blocks:
        return None  # ramfs, and FUSE file systems without statfs, report no size
    if keep_last is not None:
        present = sum(CHECKPOINT_NAME.fullmatch(path.name) is not None for path in paths)
        saves = min(saves, keep_last + 1 - min(present, keep_last) + retained)
    if free >= size * max(saves, 1):
        return None
    sizes = f"{where}: {free / 1e6:,.1f} MB are free, and a checkpoint takes about {size / 1e6:,.1f} MB"
    if free < size:
        return f"{sizes} (--no-preflight skips this check)", True
    return f"{sizes}: room for {free // size} of {saves} that the run adds to those in the folder", False
