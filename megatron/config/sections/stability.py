"""What a run does about bad data, loss spikes, non-finite values and inconsistent replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag
from megatron.errors import ConfigError

SPIKE_POLICIES = ("warn", "skip", "rollback")


@dataclass(frozen=True, kw_only=True)
class StabilityConfig(Section):
    """Skipped iterations, the spike detector, and consistency checks."""

    group: ClassVar[str] = "stability"

    skip_train_iteration_range: tuple[str, ...] = flag(
        (),
        nargs="+",
        metavar="FIRST-LAST",
        help="skip the training step in these ranges of iterations (inclusive). Their samples and tokens "
        "count as consumed, and learning rate, batch size and sequence length advance; weights and optimizer "
        "states stay unchanged. No evaluation, save or exit before the end of a range",
    )
    max_consecutive_skips: int | None = flag(
        None,
        at_least=1,
        help="skip steps with a non-finite loss or gradient, and stop at the Nth consecutive skipped step. "
        "Default: fp32 and bf16 stop at the first one, fp16 when the loss scale is at its minimum; with "
        "--spike-policy skip it is --spike-window",
    )
    spike_policy: str | None = flag(
        None,
        choices=SPIKE_POLICIES,
        help="what to do at a loss or gradient norm spike. warn: log it; skip: skip the update; rollback: "
        "load the newest checkpoint in --save and skip the data from there to the spike",
    )
    spike_loss_factor: float = flag(
        1.5,
        above=1.0,
        help="a loss above X times the median over --spike-window is a spike",
        used_with=("stability.spike_policy",),
    )
    spike_grad_norm_factor: float = flag(
        10.0,
        above=1.0,
        help="a gradient norm (before clipping) above X times the median over --spike-window is a spike",
        used_with=("stability.spike_policy",),
    )
    spike_window: int = flag(
        50,
        at_least=2,
        help="number of latest updates in the median; no spike is detected before that many",
        used_with=("stability.spike_policy",),
    )
    max_rollbacks: int = flag(
        3,
        at_least=1,
        help="stop at a spike after N rollbacks (--spike-policy rollback)",
        used_with=("stability.spike_policy=rollback",),
    )
    check_invariants_interval: int | None = flag(
        None,
        at_least=1,
        help="every N iterations, check that replicas of parameters and optimizer states are equal on all "
        "ranks and that all values are finite; stop with the names of those that are not",
    )
    sync_tp_duplicated_parameters: bool = flag(
        False,
        help="after each step, average the parameters that are replicated over tensor-parallel ranks (norms, "
        "biases of row-parallel layers, position embeddings). They are equal by construction, so this only "
        "matters if a device computes wrong results",
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )

    @property
    def skipped_ranges(self) -> tuple[tuple[int, int], ...]:
        """--skip-train-iteration-range as (first, last), inclusive; ConfigError for an invalid range."""
        return tuple(_iteration_range(text) for text in self.skip_train_iteration_range)


def _iteration_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    try:
        numbers = int(first), int(last)
    except ValueError:
        numbers = 0, 0
    if not dash or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"--skip-train-iteration-range {text}: expected FIRST-LAST, such as 101-200, counted from 1, "
            "with FIRST not larger than LAST"
        )
    return numbers
