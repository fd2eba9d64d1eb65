"""Where checkpoints are written and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Where checkpoints go, where they come from, and how often they are made."""

    group: ClassVar[str] = "checkpointing"

    save: str | None = flag(None, metavar="FOLDER", help="write checkpoints here, at every exit at least")
    load: str | None = flag(
        None, metavar="FOLDER", help="resume from here; an empty or absent folder: start afresh"
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
        None, at_least=1, help="delete all complete checkpoints in --save but this many, after each new one"
    )
