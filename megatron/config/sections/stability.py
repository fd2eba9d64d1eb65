"""What a run does when training goes wrong: bad data, spikes, numbers that are not finite, drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import ConfigError
from megatron.config.fields import Section, flag

SPIKE_POLICIES = ("warn", "skip", "rollback")


@dataclass(frozen=True, kw_only=True)
class TroubleConfig(Section):
    """Steps that are not taken, and what is looked for."""

    group: ClassVar[str] = "trouble"

    skip_train_iteration_range: tuple[str, ...] = flag(
        (),
        nargs="+",
        metavar="FIRST-LAST",
        help="take no step in these iterations (inclusive; any number of ranges). They count, their samples "
        "and tokens are consumed unread, and learning rate, batch size and sequence length move on as if "
        "they had been trained; weights and moments stay. There is no evaluation, save or exit before the "
        "last of a range",
    )
    max_consecutive_skips: int | None = flag(
        None,
        at_least=1,
        help="a step whose loss or gradient is not finite is skipped, and the run stops at the Nth step in a "
        "row without an update. Without this flag, fp32 and bf16 stop at the first such step, and fp16 once "
        "the loss scale cannot be lowered any more. For --spike-policy skip the default is --spike-window",
    )
    spike_policy: str | None = flag(
        None,
        choices=SPIKE_POLICIES,
        help="what to do about a step whose loss or grad norm is far above those of the steps before. warn: "
        "say so; skip: do not make the step's update; rollback: go back to the weights of the run's newest "
        "checkpoint in --save, and skip the data from there to the spike",
    )
    spike_loss_factor: float = flag(
        1.5, above=1.0, help="a spike is a loss of more than X times the median over --spike-window"
    )
    spike_grad_norm_factor: float = flag(
        10.0,
        above=1.0,
        help="a spike is a grad norm, before clipping, of more than X times the median over --spike-window",
    )
    spike_window: int = flag(
        50, at_least=2, help="the last N steps that were taken; a spike is found once there are so many"
    )
    max_rollbacks: int = flag(
        3, at_least=1, help="the run stops at a spike after N rollbacks of --spike-policy rollback"
    )
    check_invariants_interval: int | None = flag(
        None,
        at_least=1,
        help="every N steps, compare all copies of parameters and optimizer state over the ranks (tied "
        "embedding, what tensor ranks hold alike, replicas) and look for values that are not finite; stop "
        "with the names of what drifted",
    )
    sync_tp_duplicated_parameters: bool = flag(
        False,
        help="after each step, give the parameters that all tensor ranks hold alike (norms, biases of "
        "row-parallel layers, positions) the mean of the ranks' values. Their gradients are equal here, so "
        "this changes nothing unless a device computes wrongly",
    )

    @property
    def skipped_ranges(self) -> tuple[tuple[int, int], ...]:
        """--skip-train-iteration-range as (first, last), both skipped; ConfigError for what is no range."""
        return tuple(_iteration_range(text) for text in self.skip_train_iteration_range)


def _iteration_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    try:
        numbers = int(first), int(last)
    except ValueError:
        numbers = 0, 0
    if not dash or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"--skip-train-iteration-range {text}: expected FIRST-LAST, such as 101-200, both "
            "iterations counted from 1, the first not larger than the last"
        )
    return numbers
