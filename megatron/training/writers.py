"""Curve writers: TensorBoard event files and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from megatron.checkpoint.record import TrainingState
from megatron.config import Config, ConfigError

_LARGEST_STEP = 2**62


class Writer(Protocol):
    """An output for values with tags."""

    def write(self, values: Mapping[str, float], state: TrainingState, when: float) -> None:
        """Writes the values of one training state. when: time of the measurement, Unix time in seconds."""

    def flush(self) -> None:
        """Makes the written values visible to readers."""

    def close(self) -> None:
        """Closes the output of this process."""


def make_writers(config: Config) -> list[Writer]:
    """Returns the writers of --tensorboard-dir and --wandb-project. Raises ConfigError if a writer cannot be
    used."""
    writers: list[Writer] = []
    if config.logging.tensorboard_dir:
        writers.append(
            TensorBoardWriter(
                config.logging.tensorboard_dir,
                config.logging.tensorboard_queue_size,
                hides=not config.training.no_train,
            )
        )
    if config.logging.wandb_project:
        settings = config.to_dict()
        logging = config.logging
        writers.append(
            WandbWriter(config.logging.wandb_project, logging.wandb_name, settings, logging.wandb_save_dir)
        )
    return writers


class TensorBoardWriter:
    """Writes each value three times: by iterations, by samples and by tokens.

    A resumed run repeats the steps after its checkpoint. The first point of a tag in this process therefore
    hides the points of earlier processes at this and later steps. TensorBoard's reader in Rust always hides
    such points; its reader in Python hides them in files of version 1 if points are out of order.
    SummaryWriter's `purge_step` cannot be used, because it would compare iterations with numbers of samples
    and tokens. hides: False for an evaluation, which repeats no step.
    """

    def __init__(self, folder: str, queue_size: int, hides: bool = True) -> None:
        # TensorBoard is imported late, because the import takes a second and most ranks do not need it.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder}: TensorBoard cannot be imported ({error}): install tensorboard, "
                "or remove the flag"
            ) from None
        self._tags: set[str] = set()
        self._hides = hides
        try:
            self._events = SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {folder} is not writable ({error}): set another folder"
            ) from None

    def write(self, values: Mapping[str, float], state: TrainingState, when: float) -> None:
        axes = {
            "": state.iteration,
            " vs samples": state.consumed_samples,
            " vs tokens": state.consumed_tokens,
        }
        for tag, value in values.items():
            hide = self._hide_later_points if self._hides and tag not in self._tags else nullcontext
            self._tags.add(tag)
            for axis, place in axes.items():
                with hide():
                    self._events.add_scalar(tag + axis, value, place, walltime=when)

    @contextmanager
    def _hide_later_points(self) -> Iterator[None]:
        """Makes the point that the block adds hide the points of earlier processes at its step and later
        steps."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer: Any = self._events.file_writer
        writer.add_event(Event(file_version="brain.Event:1"))
        writer.add_event(Event(step=_LARGEST_STEP, summary=Summary()))  # so that the point is out of order
        yield
        writer.add_event(Event(file_version="brain.Event:2"))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandbWriter:
    """Writes to a run of Weights & Biases. A resumed job with an equal WANDB_RUN_ID continues that run."""

    def __init__(
        self, project: str, name: str | None, settings: dict[str, Any], folder: str | None = None
    ) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, name=name, config=settings, dir=folder, resume="allow")
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"--wandb-project {project}: wandb could not start a run ({error}): log in with 'wandb "
                "login' or set WANDB_MODE=offline"
            ) from None
        # wandb's own step must not decrease, but the iteration does after a resume from an older checkpoint.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, values: Mapping[str, float], state: TrainingState, when: float) -> None:
        counts = {"consumed samples": state.consumed_samples, "consumed tokens": state.consumed_tokens}
        self._run.log({**values, "iteration": state.iteration, **counts})

    def flush(self) -> None:
        """Does nothing, because wandb's own process sends values as they come."""

    def close(self) -> None:
        self._run.finish()
