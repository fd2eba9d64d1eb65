"""What a run leaves behind: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Where checkpoints go, where they come from, and how often they are made."""

    group: ClassVar[str] = "checkpointing"

    save: str | None = flag(None, metavar="FOLDER", help="write checkpoints here, at every exit at least")
    load: str | None = flag(
        None,
        metavar="FOLDER",
        help="resume from here, or from what was saved in --save since; the same folder as --save: start "
        "afresh if it is empty or absent",
    )
    save_interval: int | None = flag(None, at_least=1, help="steps between two checkpoints")
    universal_checkpoint: bool = flag(
        False,
        aliases=("--universal_checkpoint",),
        help="--load holds a universal checkpoint: of tools/ds_to_universal.py, "
        "tools/convert_huggingface.py, DeepSpeed or BLOOM",
    )
    override_data: bool = flag(
        False, help="resume though the data are not those of the checkpoint, at the same number of samples"
    )
    allow_drift: bool = flag(
        False,
        help="resume though copies of a parameter on several ranks were not equal; the first rank's is taken",
    )
    keep_last: int | None = flag(
        None,
        at_least=1,
        help="after each new checkpoint delete those that it descends from but the newest N, the new one "
        "included; never the newest one that can be resumed",
    )
    save_retain_interval: int | None = flag(
        None, at_least=1, metavar="STEPS", help="--keep-last keeps every checkpoint of a multiple of STEPS"
    )
    overwrite_checkpoints: bool = flag(
        False,
        help="start although --save holds checkpoints of another run; each is replaced when a new one of its "
        "name is complete",
    )


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
