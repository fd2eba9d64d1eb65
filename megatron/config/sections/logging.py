"""What a run prints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What is printed and what goes to TensorBoard and Weights & Biases."""

    group: ClassVar[str] = "logging"

    log_interval: int = flag(100, at_least=1, help="steps between two lines of loss and speed")
    tensorboard_dir: str | None = flag(None, metavar="FOLDER", help="write TensorBoard events here")
    tensorboard_queue_size: int = flag(
        1000, at_least=1, help="events that TensorBoard's writer holds before a flush"
    )
    wandb_project: str | None = flag(
        None,
        metavar="NAME",
        help="write the curves to this project of Weights & Biases too (pip install wandb)",
    )
    wandb_name: str | None = flag(
        None, metavar="NAME", help="name of the run there (default: wandb's choice)"
    )
    log_timers_to_tensorboard: bool = flag(
        False, help="time of a whole step and rates (samples, tokens, TFLOPs) are curves too"
    )
    log_batch_size_to_tensorboard: bool = flag(False, help="the batch size is a curve too")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="the validation perplexity is a curve too")
    log_path: str | None = flag(
        None, metavar="FILE", help="add what the run prints to the end of this file, besides stdout"
    )
    log_level: str = flag("warning", choices=LOG_LEVELS, help="level of the log messages of global rank 0")
    log_level_replica: str = flag(
        "error", choices=LOG_LEVELS, help="level of the log messages of all other ranks"
    )
