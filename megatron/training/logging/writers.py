"""Where curves go besides the console: TensorBoard's event files, Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.config import Config, ConfigError


@dataclass(frozen=True)
class Position:
    """Where in the run a value belongs, and when it was measured (seconds since 1970)."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    when: float


class Writer(Protocol):
    """What takes values by their tags."""

    def write(self, values: Mapping[str, float], position: Position) -> None:
        """Takes the values of one step in."""

    def flush(self) -> None:
        """Lets readers see what has been written."""

    def close(self) -> None:
        """Ends the record of this start."""


def make_writers(config: Config) -> list[Writer]:
    """Those of --tensorboard-dir and --wandb-project; ConfigError for one that cannot be used."""
    writers: list[Writer] = []
    if config.logging.tensorboard_dir:
        writers.append(
            TensorBoardWriter(config.logging.tensorboard_dir, config.logging.tensorboard_queue_size)
        )
    if config.logging.wandb_project:
        writers.append(WandbWriter(config.logging.wandb_project, config.logging.wandb_name, config.to_dict()))
    return writers


class TensorBoardWriter:
    """Each value three times: over iterations, over samples and over tokens."""

    def __init__(self, folder: str, queue_size: int) -> None:
        # Imported only here: it takes a second, and most ranks need none.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder}: TensorBoard cannot be imported ({error}): install tensorboard, "
                "or leave the flag out"
            ) from None
        try:
            self._events = SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder} cannot be written ({error}): give a folder that can"
            ) from None

    def write(self, values: Mapping[str, float], position: Position) -> None:
        """See `Writer`."""
        axes = {
            "": position.iteration,
            " vs samples": position.consumed_samples,
            " vs tokens": position.consumed_tokens,
        }
        for tag, value in values.items():
            for axis, place in axes.items():
                self._events.add_scalar(tag + axis, value, place, walltime=position.when)

    def flush(self) -> None:
        """See `Writer`."""
        self._events.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._events.close()


class WandbWriter:
    """A run of Weights & Biases. A resumed job goes on in the same one if WANDB_RUN_ID is the same."""

    def __init__(self, project: str, name: str | None, settings: dict[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, name=name, config=settings, resume="allow")
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"--wandb-project {project}: no run could be started ({error}): log in with 'wandb login', "
                "or set WANDB_MODE=offline"
            ) from None
        # wandb's own step may not go back, and after a resume from an older checkpoint ours does.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, values: Mapping[str, float], position: Position) -> None:
        """See `Writer`."""
        place = {
            "iteration": position.iteration,
            "consumed samples": position.consumed_samples,
            "consumed tokens": position.consumed_tokens,
        }
        self._run.log({**values, **place})

    def flush(self) -> None:
        """wandb's own process sends what it has as it comes."""

    def close(self) -> None:
        """See `Writer`."""
        self._run.finish()
