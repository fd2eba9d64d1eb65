"""The configuration in a checkpoint's `run.json`: its checks, and its use by --use-checkpoint-args.

This module imports neither torch nor DeepSpeed, except for a Hugging Face model: every rank uses it to parse
flags.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.discovery import (
    current_path,
    find_latest,
    find_universal,
    only_universal,
    open_checkpoint,
)
from megatron.checkpoint.files import MAY_BE_INTACT
from megatron.checkpoint.formats.registry import HUGGING_FACE, TORCHTITAN, format_of
from megatron.checkpoint.lineage.branch import find_branch_point, is_branch_of
from megatron.checkpoint.lineage.identity import read_latest
from megatron.checkpoint.record import RUN_FILE, Checkpoint
from megatron.config import CheckpointConfig, Config
from megatron.errors import UserError, is_access_error, one_line, stop_at_access_error
from megatron.files import HostileFileError
from megatron.object_store.store import is_url
from megatron.optimizer.batch_schedule import BEGIN, Progress

RUN_PARTS = ("config", "layout", "stages", "vocab_size", "eod")
# Largest accepted integer in a run's settings (tokens, samples, seeds).
_LARGEST_SIZE = 1 << 53


@dataclass(frozen=True)
class SavedConfig:
    """The configuration that a checkpoint records.

    source: folder of the checkpoint. progress: the progress of the checkpoint's run. is_branch_checkpoint:
    whether a run with --branch-at uses a checkpoint of the branch itself, because the branch point cannot be
    read any more.
    """

    source: str
    config: Config
    progress: Progress = BEGIN
    is_branch_checkpoint: bool = False


def check_run_file(checkpoint: Checkpoint) -> None:
    """Raises UserError if `run.json` is malformed or does not describe the model and its layout."""
    lacking = [part for part in RUN_PARTS if part not in checkpoint.run]
    if lacking:
        raise UserError(f"checkpoint {checkpoint.folder}: {RUN_FILE} lacks {', '.join(lacking)}")
    for part in ("config", "layout", "stages"):
        if not isinstance(checkpoint.run[part], dict):
            raise UserError(f"checkpoint {checkpoint.folder}: {part} in {RUN_FILE} is not a JSON object")
    try:
        config = Config.from_dict(checkpoint.run["config"])
        layers, parameters = config.model.num_layers, len(checkpoint.run.get("parameters") or ())
        if parameters and layers > parameters:
            raise HostileFileError(
                f"checkpoint {checkpoint.folder}: {RUN_FILE} has a config of {layers:,} layers, and only "
                f"{parameters:,} parameters"
            )
        if max(_sizes(checkpoint.run["config"])) > _LARGEST_SIZE:
            raise UserError(f"a number is larger than {_LARGEST_SIZE:,}")
    except HostileFileError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError, UserError) as error:
        raise UserError(
            f"checkpoint {checkpoint.folder}: the config in {RUN_FILE} cannot be read ({one_line(error)})"
        ) from error


def _sizes(settings: Any) -> Iterator[int]:
    yield 0
    for value in settings.values() if isinstance(settings, dict) else ():
        yield from _sizes(value)
        if isinstance(value, int):
            yield value


@stop_at_access_error(MAY_BE_INTACT)
def read_saved_config(options: CheckpointConfig) -> SavedConfig:
    """Returns the configuration of the checkpoint in --load, or of the branch point with --branch-at. If
    --load cannot be read, returns the configuration of the newest checkpoint that this run may have saved to
    --save. Reads only `run.json`, or config.json of a Hugging Face model. Raises UserError if there is no
    checkpoint.

    If the newest checkpoint is damaged, the run later loads an older one, and compares that checkpoint with
    the configuration.
    """
    if is_url(options.load or ""):
        flag = "--use-checkpoint-args" if options.branch_at is None else "--branch-at"
        raise UserError(
            f"{flag} with --load {options.load}: expected a folder of a file system; copy the checkpoint to "
            f"one, or remove {flag}"
        )
    load, save = Path(options.load or ""), options.save
    if format_of(load) in (HUGGING_FACE, TORCHTITAN):
        # The import is late: this module loads torch and transformers, which takes seconds.
        from megatron.checkpoint.huggingface.importer import read_flags

        return SavedConfig(str(load), read_flags(load))
    is_own = False
    try:
        if options.branch_at is not None:
            checkpoint = find_branch_point(options, with_files=False)
        elif options.universal_checkpoint:
            checkpoint = find_universal(load, with_files=False)
        elif (found := _newest(load) or only_universal(load, with_files=False)) is not None:
            checkpoint = found
        else:
            raise UserError(f"--load {load} holds no checkpoint")
    except (UserError, OSError) as error:
        if is_access_error(error):
            raise
        own = None
        if save is not None and Path(save).resolve() != load.resolve():
            own = _newest_or_none(Path(save))
        if options.branch_at is not None:
            if own is None or not is_branch_of(own, options):
                if isinstance(error, UserError):
                    raise
                raise UserError(f"--branch-at: --load {load} cannot be read ({error})") from error
        elif own is None:
            raise UserError(f"--use-checkpoint-args: {error}") from error
        checkpoint, is_own = own, True
    if checkpoint.is_external:
        raise UserError(
            f"--use-checkpoint-args: checkpoint {checkpoint.folder} was made by another framework and lacks "
            "the full configuration of the model: give the flags of the model"
        )
    check_run_file(checkpoint)
    return SavedConfig(
        str(checkpoint.folder),
        checkpoint.config,
        checkpoint.state,
        is_branch_checkpoint=is_own,
    )


def _newest_or_none(folder: Path) -> Checkpoint | None:
    try:
        return _newest(folder)
    except (UserError, OSError) as error:
        if is_access_error(error):
            raise
        return None


def _newest(folder: Path) -> Checkpoint | None:
    """Returns the checkpoint in `folder`, or the one that `latest` in it names; None if there is none."""
    if (folder / RUN_FILE).is_file():
        return open_checkpoint(folder, with_files=False)
    latest = read_latest(folder)
    if latest is not None and (current_path(folder, latest) / RUN_FILE).is_file():
        return open_checkpoint(current_path(folder, latest), with_files=False)
    return find_latest(folder) if folder.is_dir() else None
