"""Selects the checkpoint that a run starts from: the newest valid one that fits the flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.checkpoint.compatibility import (
    check_data,
    check_first_sample,
    check_model,
    check_replicas,
    check_schedule,
    check_vocabulary,
    start_of,
)
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import MAY_BE_INTACT
from megatron.checkpoint.folders.of_run import FILE_SYSTEM, Folders
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.lineage.start import PathOf, check_save_folder, choose_checkpoint, share_checkpoint
from megatron.checkpoint.ranks import errors_of_rank_0, first_problem
from megatron.checkpoint.record import Checkpoint, describe_start
from megatron.checkpoint.upcycling import source_config
from megatron.config import Config
from megatron.errors import UserError, stop_at_access_error
from megatron.object_store.store import is_url
from megatron.optimizer.batch_schedule import RunLength, check_remaining_batches

if TYPE_CHECKING:  # importing it loads DeepSpeed, which tools that read checkpoints do not need
    from megatron.run import Run


def planned_checkpoint(
    config: Config, damaged: Mapping[str, str] | None = None, path_of: PathOf = Path
) -> Checkpoint | None:
    """Returns the checkpoint that --load names; None if there is none. Does not compare it with the run's
    flags. damaged: see `find_checkpoint`."""
    # An evaluation uses the checkpoint in --load, not a newer one in --save.
    options = replace(config.checkpoint, save=None) if config.training.no_train else config.checkpoint
    checkpoint = choose_checkpoint(options, damaged, path_of)
    return None if checkpoint is None else _with_tokens(checkpoint, config)


def planned_length(config: Config) -> tuple[RunLength, Checkpoint | None, str]:
    """Returns the length of the run, the checkpoint that the run starts from, and a text that describes the
    start. Raises UserError if --load is in an object store."""
    load = config.checkpoint.load
    if is_url(load or ""):
        raise UserError(
            f"--load {load}: the length of the run depends on its checkpoint: copy the checkpoint to a file "
            "system"
        )
    checkpoint = planned_checkpoint(config)
    is_missing = load is not None and not Path(load).is_dir() and checkpoint is None
    text = f"{load} does not exist here" if is_missing else describe_start(checkpoint, load)
    return RunLength.from_config(config, start_of(checkpoint)), checkpoint, text


@stop_at_access_error(MAY_BE_INTACT)
def find_checkpoint(
    run: Run, damaged: Mapping[str, str] | None = None, path_of: PathOf = Path
) -> Checkpoint | None:
    """Returns the checkpoint that --load resumes from; None if the run initializes from scratch.

    Raises UserError if the checkpoint is of a different model, if its data or learning-rate schedule differ
    from this run's and no flag allows it, if --save belongs to another run, or if a file cannot be read now.
    damaged: path of each checkpoint to skip -> the reason.
    """
    config = run.config
    checkpoint = planned_checkpoint(config, damaged, path_of)
    if checkpoint is None and config.checkpoint.load and config.training.no_train:
        raise UserError(
            f"--load {config.checkpoint.load} holds no checkpoint: --eval-only needs one to evaluate"
        )
    if checkpoint is None and config.checkpoint.finetune:
        raise UserError(
            f"--load {config.checkpoint.load} holds no checkpoint: --finetune needs one to start from"
        )
    check_save_folder(checkpoint, config, path_of)
    if not config.training.no_train:
        check_first_sample(checkpoint, config)
        check_remaining_batches(config, start_of(checkpoint).consumed_samples)
    if checkpoint is not None:
        check_fits(checkpoint, run)
    return checkpoint


def _with_tokens(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Returns a checkpoint of another framework with the number of consumed tokens, computed from the
    consumed samples and --seq-length, if the checkpoint does not record its sequence length."""
    state = checkpoint.state
    if not checkpoint.is_external or state.consumed_tokens or "seq_length" in checkpoint.run.get("args", {}):
        return checkpoint
    tokens = state.consumed_samples * config.model.seq_length
    return replace(checkpoint, state=replace(state, consumed_tokens=tokens))


def check_fits(checkpoint: Checkpoint, run: Run) -> None:
    """Raises UserError if the run's model, data or schedule do not allow it to start from the checkpoint."""
    config, vocab_size = run.config, run.vocab.size
    check_replicas(checkpoint, config)
    reader = open_reader(checkpoint)
    model = source_config(reader, config)
    if checkpoint.is_external:
        reader.check_external(model, vocab_size)
    else:
        check_model(checkpoint, model, vocab_size)
        fingerprint = run.fingerprint_at(checkpoint.start_state)
        check_vocabulary(checkpoint, fingerprint)
        check_data(checkpoint, config, fingerprint)
    check_schedule(checkpoint, config)


def select_valid_checkpoint(
    checkpoint: Checkpoint | None,
    run: Run,
    heartbeat: Callable[[], None] = lambda: None,
    folders: Folders = FILE_SYSTEM,
) -> Checkpoint | None:
    """Returns the checkpoint that rank 0 passes, on all ranks; other ranks may pass None. If its files are
    damaged, returns the newest valid checkpoint before it. The ranks share the reading of the files.
    heartbeat: called after each file. folders: the folders of the run. Collective."""
    damaged: dict[str, str] = {}
    while True:
        checkpoint = share_checkpoint(checkpoint, run.config.parallel.local_rank == 0, folders.share)
        problem = None if checkpoint is None else find_damage(checkpoint, heartbeat, folders)
        if checkpoint is None or problem is None:
            return checkpoint
        damaged[str(checkpoint.folder)] = problem
        with errors_of_rank_0(f"--load {run.config.checkpoint.load}"):
            if dist.get_rank() == 0:
                checkpoint = find_checkpoint(run, damaged, folders.at)


@stop_at_access_error(MAY_BE_INTACT)
def find_damage(
    checkpoint: Checkpoint, heartbeat: Callable[[], None], folders: Folders = FILE_SYSTEM
) -> str | None:
    """Reads the files that must be intact. Returns the first problem; None if there is none. folders: the
    folders of the run. Collective."""
    reader = open_reader(checkpoint)

    def find_problem(name: str) -> str | None:
        return folders.fetch(checkpoint, name, heartbeat) or reader.file_problem(name)

    names: list[str] = []
    with errors_of_rank_0():
        if dist.get_rank() == 0:
            # The largest files come first, so that the ranks read about equally many bytes.
            sizes = {name: record["bytes"] for name, record in checkpoint.run.get("files", {}).items()}
            names = sorted(reader.files_to_verify(), key=lambda name: -sizes.get(name, 0))
    return first_problem(names, find_problem, heartbeat)


def open_on_all_ranks(folder: Path, folders: Folders) -> Checkpoint | None:
    """Returns the checkpoint in a folder as rank 0 sees it; None if a file is missing or of the wrong size.
    Raises UserError on every rank if rank 0 cannot read it now. Collective."""
    checkpoint = None
    with errors_of_rank_0(f"checkpoint {folder}"), suppress(UserError):
        if dist.get_rank() == 0:
            checkpoint = open_checkpoint(folder)
    return folders.share(checkpoint)
