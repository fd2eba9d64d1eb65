"""How a run handles bad data, loss spikes, non-finite values and inconsistent replicas."""

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
        help="inclusive ranges of iterations to skip, such as 13251-14000. The samples and tokens of these "
        "iterations count as consumed, and learning rate, batch size and sequence length advance. Weights "
        "and optimizer states do not change. Log lines, checks, evaluations, saves and exits inside a range "
        "happen once, at its end",
    )
    max_consecutive_skips: int | None = flag(
        None,
        at_least=1,
        help="skip steps with a non-finite loss or gradient, and stop at the Nth consecutive skipped step "
        "(default: an fp32 or bf16 run stops at the first such step, an fp16 run when the loss scale is at "
        "its minimum). With --spike-policy skip, N also limits the consecutive skipped spikes (default: "
        "--spike-window)",
    )
    spike_policy: str | None = flag(
        None,
        choices=SPIKE_POLICIES,
        help="what to do at a spike of the loss or the gradient norm (default: nothing, spikes are not "
        "searched for)\n"
        "warn: log it\n"
        "skip: skip the update\n"
        "rollback: load the newest checkpoint in --save, and skip the data from that checkpoint to the spike",
    )
    spike_loss_factor: float = flag(
        1.5,
        above=1.0,
        help="with --spike-policy: a loss above this factor times the median loss of --spike-window is a "
        "spike",
        used_with=("stability.spike_policy",),
    )
    spike_grad_norm_factor: float = flag(
        10.0,
        above=1.0,
        help="with --spike-policy: a gradient norm (before clipping) above this factor times the median "
        "norm of --spike-window is a spike",
        used_with=("stability.spike_policy",),
    )
    spike_window: int = flag(
        50,
        at_least=2,
        help="with --spike-policy: number of latest updates in the median. No spike is detected before this "
        "many updates",
        used_with=("stability.spike_policy",),
    )
    max_rollbacks: int = flag(
        3,
        at_least=1,
        help="with --spike-policy rollback: number of rollbacks; the next spike stops the run",
        used_with=("stability.spike_policy=rollback",),
    )
    check_invariants_interval: int | None = flag(
        None,
        at_least=1,
        help="every N iterations, check that replicas of parameters and optimizer states are equal on all "
        "ranks and that all values are finite (default: never). At a difference the run stops and names the "
        "affected tensors",
    )
    sync_tp_duplicated_parameters: bool = flag(
        False,
        help="after each step, average the parameters that are replicated across tensor-parallel ranks "
        "(norms, biases of row-parallel layers, position embeddings). Without the flag the replicas are "
        "equal too, unless a device computes wrong results",
        unused_with=("parallel.tensor_model_parallel_size=1",),
    )

    @property
    def skipped_ranges(self) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of --skip-train-iteration-range as inclusive (first, last). Raises ConfigError
        for an invalid range."""
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
