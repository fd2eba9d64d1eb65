"""The learning rate over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over time: a linear warm-up, then a decay to min_lr."""

    group: ClassVar[str] = "learning rate"

    lr: float = flag(above=0, help="learning rate after the warm-up")
    min_lr: float = flag(0.0, at_least=0, help="learning rate at the end of the decay and after it")
    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine"), help="shape of the decay")
    lr_decay_iters: int | None = flag(
        None, at_least=1, help="step at which the decay ends (default: --train-iters)"
    )
    lr_decay_samples: int | None = flag(
        None, at_least=1, help="consumed samples at which the decay ends (default: --train-samples)"
    )
    lr_decay_tokens: int | None = flag(
        None, at_least=1, help="consumed tokens at which the decay ends, in place of --lr-decay-samples"
    )
    lr_warmup_iters: int = flag(0, at_least=0, help="steps of linear warm-up")
    lr_warmup_samples: int = flag(0, at_least=0, help="samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(
        None, at_least=0, below=1, help="warm-up as a fraction of the length of the decay"
    )
    override_lr_scheduler: bool = flag(
        False, help="resume with the learning-rate schedule of the flags where the checkpoint's is another"
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False, help="resume with the checkpoint's learning-rate schedule where the flags say another"
    )
