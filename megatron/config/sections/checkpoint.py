"""Where checkpoints are saved and loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag

_LOAD = {"checkpoint.load": "set --load to the folder of the checkpoint"}


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoint folders, the save interval, and what may differ on resume."""

    group: ClassVar[str] = "checkpointing"

    save: str | None = flag(
        None,
        metavar="FOLDER",
        help="save checkpoints in this folder, at the end of the run and on exit",
        group=COMMON_FLAGS,
    )
    load: str | None = flag(
        None,
        metavar="FOLDER",
        help="resume from this folder, or from what was saved in --save since; the same folder as --save: "
        "initialize from scratch if it is empty or absent",
        group=COMMON_FLAGS,
    )
    save_interval: int | None = flag(
        None,
        at_least=1,
        help="iterations between checkpoints",
        needs={"checkpoint.save": "set the checkpoint folder, or remove it"},
    )
    universal_checkpoint: bool = flag(
        False,
        aliases=("--universal_checkpoint",),
        help="--load contains a universal checkpoint, made by tools/ds_to_universal.py, "
        "tools/convert_huggingface.py, DeepSpeed or for BLOOM",
        needs=_LOAD,
    )
    load_huggingface: str | None = flag(
        None,
        metavar="FOLDER",
        help="start a new training from the model of Hugging Face transformers in this folder: --load FOLDER "
        "--finetune --use-checkpoint-args, where the flags of the model and the tokenizer come from the "
        "folder; the same command, given again, resumes from --save",
    )
    finetune: bool = flag(
        False,
        help="start a new training from the weights of --load: iteration 0, fresh optimizer, learning-rate "
        "schedule and data; the same command, given again, resumes from --save",
        needs=_LOAD,
        excludes={
            "training.no_train": "an evaluation (--eval-only) does not train; remove --finetune, and add "
            "--override-data to evaluate on other data",
            "schedule.use_checkpoint_lr_scheduler": "fine-tuning starts the flags' schedule, remove one",
        },
    )
    branch_at: int | None = flag(
        None,
        at_least=1,
        metavar="ITERATION",
        help="start a decay branch: resume the checkpoint of this iteration in --load, of a stable phase, in "
        "a new run in --save whose learning rate decays from there on over --lr-wsd-decay-iters or -samples; "
        "the same command, given again, resumes from --save. See docs/schedules.md",
    )
    no_load_optim: bool = flag(
        False,
        help="do not load the optimizer's moments and loss scale from --load; iteration, data and schedule "
        "continue, and fp32 weights are loaded; the same command, given again, resumes from --save",
        used_with=("checkpoint.load",),
        unused_with=("checkpoint.finetune",),
    )
    use_checkpoint_args: bool = flag(
        False,
        help="take the flags of the model and of the tokenizer from the checkpoint in --load; a flag of the "
        "model that is given too must have the same value",
    )
    override_data: bool = flag(
        False,
        help="resume with other data than the checkpoint's, at the same number of consumed samples",
        used_with=("checkpoint.load",),
    )
    allow_replica_mismatch: bool = flag(
        False,
        aliases=("--allow-drift",),
        help="resume from a checkpoint in which replicas of a parameter differ; the first rank's copy is "
        "used",
        used_with=("checkpoint.load",),
    )
    keep_last: int | None = flag(
        None,
        at_least=1,
        help="after each save, delete the run's earlier checkpoints in --save except the newest N, but never "
        "the newest one that can be resumed",
        used_with=("checkpoint.save",),
    )
    save_retain_interval: int | None = flag(
        None,
        at_least=1,
        metavar="STEPS",
        help="--keep-last keeps every checkpoint at a multiple of STEPS",
        used_with=("checkpoint.keep_last",),
    )
    overwrite_checkpoints: bool = flag(
        False,
        help="start although --save holds checkpoints of another run; each is replaced when a new checkpoint "
        "of the same name is complete",
        used_with=("checkpoint.save",),
    )

    @property
    def saves_beside_load(self) -> bool:
        """Whether --save is the folder of checkpoints that --load is, or that --load is one of."""
        if self.load is None or self.save is None:
            return False
        load = os.path.realpath(self.load)
        return os.path.realpath(self.save) in (load, os.path.dirname(load))
