"""Creates the output folders of a run before it starts, and checks that they are writable."""

import importlib.util
import os
from pathlib import Path

from megatron.cluster.processes import is_main_process
from megatron.config import Config, ConfigError
from megatron.files import open_own, open_stream


def make_output_folders(config: Config) -> None:
    """Creates --save and, on rank 0, the folders of its logs. Raises ConfigError if one is not writable, or
    if --wandb-project is set without wandb."""
    if config.checkpoint.save:
        _make_writable("--save", config.checkpoint.save)
    if not is_main_process():
        return
    logging, parallel = config.logging, config.parallel
    if logging.tensorboard_dir:
        _make_writable("--tensorboard-dir", logging.tensorboard_dir)
    for option, file in (
        ("--partition-profile", parallel.partition_profile),
        ("--network-figures", parallel.network_figures),
    ):
        if file:
            _make_writable(option, os.path.dirname(file) or ".")
            if os.path.isdir(file):
                raise ConfigError(f"{option} {file} is a folder: set a file")
    if logging.log_path:
        try:
            os.makedirs(os.path.dirname(logging.log_path) or ".", exist_ok=True)
            # A stream stays open until the process ends: the reader of a pipe would see its end, and exit.
            if open_stream(Path(logging.log_path)) is None:
                os.close(open_own(logging.log_path, os.O_APPEND))
        except OSError as error:
            raise ConfigError(
                f"--log-path {logging.log_path} cannot be written ({error.strerror}): set another file"
            ) from error
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"--wandb-project {logging.wandb_project}: wandb is not installed: pip install wandb, or omit "
            "the flag"
        )


def _make_writable(option: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} cannot be created ({error.strerror}): set another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} is not writable for this user: set another folder")
