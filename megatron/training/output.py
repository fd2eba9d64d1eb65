"""The folders that a run writes to, tried before it starts: hours later would be late to learn of them."""

import os

from megatron.config import Config, ConfigError
from megatron.training.processes import is_main_process


def make_output_folders(config: Config) -> None:
    """Makes the folders of --save and, on rank 0, --tensorboard-dir and --partition-profile; ConfigError if
    one cannot be written."""
    if config.checkpoint.save:
        _make_writable("--save", config.checkpoint.save)
    if config.logging.tensorboard_dir and is_main_process():
        _make_writable("--tensorboard-dir", config.logging.tensorboard_dir)
    if config.parallel.partition_profile and is_main_process():
        _make_writable("--partition-profile", os.path.dirname(config.parallel.partition_profile) or ".")


def _make_writable(option: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} cannot be made ({error.strerror}): give a folder that can"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} cannot be written by this user: give a folder that can")
