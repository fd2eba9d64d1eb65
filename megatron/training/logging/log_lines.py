"""The console lines that users' scripts parse, in the format of Megatron-DeepSpeed: written and read here.

Needs no torch, so that a tool which reads logs starts at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# exp() of a loss above this is no perplexity any more; the peers cap it here too.
_LARGEST_LOSS_FOR_PERPLEXITY = 20.0

_TRAINING_START = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_VALIDATION_START = re.compile(r"([\w.-]+) loss at ([^|]*?)\s*\|")
_ITERATION = re.compile(r"iteration (\d+)")

# Names that do not follow from the text of the field; all others become lower_snake_case.
_NAMES = {
    "elapsed time per iteration (s)": "seconds_per_iteration",
    "TFLOPs": "tflops_per_device",
    "throughput per GPU (TFLOP/s/GPU)": "tflops_per_device",
    "lm loss value": "lm_loss",
}
_MILLISECONDS = "elapsed time per iteration (ms)"


ParsedLine = dict[str, int | float | str]


@dataclass(frozen=True)
class IntervalSummary:
    """What one training line says about the steps since the line before it.

    lm_loss: mean over the steps that moved the weights; None if there were none.
    learning_rate, global_batch_size, seq_length, loss_scale, grad_norm: of the last step. seq_length: None
    where it is always the same; loss_scale: None without fp16.
    skipped, not_finite: steps that left the weights unchanged; steps whose loss was not finite.
    """

    iteration: int
    total_iterations: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float
    learning_rate: float
    global_batch_size: int
    seq_length: int | None
    lm_loss: float | None
    loss_scale: float | None
    grad_norm: float | None
    skipped: int
    not_finite: int
    samples_per_second: float
    tokens_per_second: float
    tflops_per_device: float


def format_training_line(summary: IntervalSummary) -> str:
    """The line of one log interval, without a newline."""
    fields = [
        f"iteration {summary.iteration:8d}/{summary.total_iterations:8d}",
        f"consumed samples: {summary.consumed_samples:12d}",
        f"consumed tokens: {summary.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {_two_digits(summary.seconds_per_iteration)}",
        f"learning rate: {summary.learning_rate:.3E}",
        f"global batch size: {summary.global_batch_size:5d}",
    ]
    if summary.lm_loss is not None:
        fields.append(f"lm loss: {summary.lm_loss:.6E}")
    if summary.seq_length is not None:
        fields.append(f"curriculum seqlen: {summary.seq_length:5d}")
    if summary.loss_scale is not None:
        fields.append(f"loss scale: {summary.loss_scale:.1f}")
    if summary.grad_norm is not None:
        fields.append(f"grad norm: {summary.grad_norm:.3f}")
    fields += [
        f"number of skipped iterations: {summary.skipped:3d}",
        f"number of nan iterations: {summary.not_finite:3d}",
        f"samples per second: {summary.samples_per_second:.3f}",
        f"TFLOPs: {_two_digits(summary.tflops_per_device)}",
    ]
    return " " + " | ".join(fields) + " |"


def format_validation_lines(name: str, at: str, loss: float) -> list[str]:
    """The three lines of one evaluation: ` {name} loss at {at} | ...` between two rules of dashes."""
    line = f" {name} loss at {at} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """exp(loss), for losses up to 20 nats; that of 20 beyond."""
    return math.exp(min(_LARGEST_LOSS_FOR_PERPLEXITY, loss))


def parse_log_line(line: str) -> ParsedLine | None:
    """What a training or validation line says, ours or a peer's; None for any other line.

    'kind' is 'training' or 'validation'. Field names are in lower_snake_case ('consumed_samples', 'lm_loss',
    'grad_norm'), times in seconds ('seconds_per_iteration', from the peers' milliseconds too). A validation
    line has 'name' and 'at', and 'iteration' where `at` tells it. Whatever stands before the line (a
    launcher's prefix, a date) is passed over; so are fields that are cut off or hold no number.
    """
    start = _TRAINING_START.search(line)
    if start:
        fields = _fields(line[start.end() :])
        head: ParsedLine = {
            "kind": "training",
            "iteration": int(start[1]),
            "total_iterations": int(start[2]),
        }
        return {**head, **fields} if fields else None
    start = _VALIDATION_START.search(line)
    if start:
        fields = _fields(line[start.end() :])
        head = {"kind": "validation", "name": start[1], "at": start[2]}
        iteration = _ITERATION.search(start[2])
        if iteration:
            head["iteration"] = int(iteration[1])
        return {**head, **fields} if "lm_loss" in fields else None
    return None


def _fields(text: str) -> ParsedLine:
    """The `name: value` fields of a line, each ended by a bar."""
    fields: ParsedLine = {}
    for field in text.split("|")[:-1]:  # what follows the last bar is cut off
        label, _, value = field.rpartition(":")
        label = label.strip()
        number = _number(value.strip())
        if not label or number is None:
            continue
        if label == _MILLISECONDS:
            fields["seconds_per_iteration"] = number / 1000
        else:
            fields[_NAMES.get(label) or re.sub(r"\W+", "_", label.lower()).strip("_")] = number
    return fields


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _two_digits(value: float) -> str:
    """Two digits after the point, as the peers print; four below 1, where two would say little."""
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"
