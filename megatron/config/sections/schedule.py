"""The learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag
from megatron.config.registries import LR_DECAY_STYLES, WSD_DECAY_STYLES


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning-rate schedule: linear warm-up, then decay to min_lr."""

    group: ClassVar[str] = "learning rate"

    lr: float = flag(
        above=0, help="maximum learning rate, reached at the end of the warm-up", group=COMMON_FLAGS
    )
    min_lr: float = flag(0.0, at_least=0, help="minimum learning rate, reached at the end of the decay")
    lr_decay_style: str = flag(
        "linear", choices=LR_DECAY_STYLES, help="learning-rate schedule after the warm-up"
    )
    lr_decay_iters: int | None = flag(
        None, at_least=1, help="iteration at which the decay ends (default: --train-iters)"
    )
    lr_decay_samples: int | None = flag(
        None, at_least=1, help="consumed samples at which the decay ends (default: --train-samples)"
    )
    lr_decay_tokens: int | None = flag(
        None, at_least=1, help="consumed tokens at which the decay ends; replaces --lr-decay-samples"
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        choices=WSD_DECAY_STYLES,
        help="with --lr-decay-style WSD: shape of the final decay from --lr to --min-lr. In the formulas 1 "
        "is --lr and 0 is --min-lr",
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        at_least=0,
        help="with --lr-decay-style WSD: length of the final decay in iterations; the decay ends at "
        "--lr-decay-iters; 0: no decay",
    )
    lr_wsd_decay_samples: int | None = flag(
        None,
        at_least=0,
        help="with --lr-decay-style WSD: length of the final decay in samples; the decay ends at "
        "--lr-decay-samples; 0: no decay",
    )
    lr_warmup_iters: int = flag(0, at_least=0, help="length of the linear warm-up in iterations")
    lr_warmup_samples: int = flag(0, at_least=0, help="length of the linear warm-up in samples")
    lr_warmup_fraction: float | None = flag(
        None, at_least=0, below=1, help="length of the warm-up as a fraction of the length of the decay"
    )
    override_lr_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
        help="if the checkpoint's learning-rate schedule differs from the flags, resume with the schedule "
        "of the flags (without this flag and --use-checkpoint-lr-scheduler, such a resume is an error)",
        excludes={
            "schedule.use_checkpoint_lr_scheduler": "the first selects the schedule of the flags, the "
            "second the checkpoint's"
        },
        used_with=("checkpoint.load",),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        aliases=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
        help="if the checkpoint's learning-rate schedule differs from the flags, resume with the "
        "checkpoint's schedule (see --override-lr-scheduler)",
        used_with=("checkpoint.load",),
    )
