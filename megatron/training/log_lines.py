"""Formats and parses the console lines, in the format of Megatron-DeepSpeed.

The module does not import torch, so that tools that parse logs start at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.files import HostileFileError, open_regular

# The perplexity is at most the exp() of this loss, as in Megatron-LM.
_LARGEST_LOSS_FOR_PERPLEXITY = 20.0

# A longer line is read in pieces. This program's own lines have a few hundred characters.
_MAX_LINE_BYTES = 8192
_MAX_LOG_BYTES = 1 << 32
_LARGEST_INTEGER = 2**63

# Matching takes time linear in the length of a line, because no part of the text is tried from more than one
# start.
_TRAINING_START = re.compile(r"iteration\s+(\d{1,18})\s*/\s*(\d{1,18})\s*\|")
_VALIDATION_START = re.compile(r"(?<![\w.-])([\w.-]+) loss at ([^|]{0,200})\|")
_ITERATION = re.compile(r"iteration (\d{1,18})")

# Text of a field in the line -> name of the field, for names that are not the text in lower_snake_case.
_NAMES = {
    "elapsed time per iteration (s)": "seconds_per_iteration",
    "TFLOPs": "tflops_per_device",
    "throughput per GPU (TFLOP/s/GPU)": "tflops_per_device",
    "lm loss value": "lm_loss",
}
# Formats of the values that expert layers record, in the order of the line. All other recorded values follow
# them.
_FORMATS = {
    "MaxVio": ".3f",
    "tokens per expert, min": ".1f",
    "tokens per expert, mean": ".1f",
    "tokens per expert, max": ".1f",
    "experts without tokens": ".3f",
    "load balancing loss": ".6E",
    "router z-loss": ".6E",
    "expert bias norm": ".3E",
}
_OF_LAYER = re.compile(r"(?:layer (\d+) )?(.*)")
_MILLISECONDS = "elapsed time per iteration (ms)"


ParsedLine = dict[str, int | float | str]


@dataclass(frozen=True)
class IntervalSummary:
    """The values of one training line, for the steps since the previous line.

    lm_loss: mean over the steps that updated the weights; None without such a step. learning_rate,
    global_batch_size, seq_length, loss_scale, grad_norm: values of the last step. seq_length: None without a
    curriculum. loss_scale: None without fp16. skipped: number of steps without an update. not_finite: number
    of steps with a non-finite loss. recorded: values that the model recorded, by name.
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
    recorded: Mapping[str, float] = field(default_factory=dict)


def format_training_line(summary: IntervalSummary) -> str:
    """Returns the line of one log interval, without a newline."""
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
    fields += _recorded_fields(summary.recorded)
    fields += [
        f"number of skipped iterations: {summary.skipped:3d}",
        f"number of nan iterations: {summary.not_finite:3d}",
        f"samples per second: {summary.samples_per_second:.3f}",
        f"TFLOPs: {_two_digits(summary.tflops_per_device)}",
    ]
    return " " + " | ".join(fields) + " |"


def _recorded_fields(recorded: Mapping[str, float]) -> list[str]:
    """Returns the fields of the values that the model recorded: first the values of all layers, then of layer
    0, 1, ..."""
    found = []
    for name, value in recorded.items():
        layer, kind = _OF_LAYER.findall(name)[0]
        place = [*_FORMATS].index(kind) if kind in _FORMATS else len(_FORMATS)
        found.append((int(layer or -1), place, f"{name}: {value:{_FORMATS.get(kind, '.6E')}}"))
    return [text for *_, text in sorted(found)]


def format_validation_lines(name: str, at: str, loss: float) -> list[str]:
    """Returns the three lines of one evaluation: ` {name} loss at {at} | ...` between two lines of dashes."""
    line = f" {name} loss at {at} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """Returns exp(min(loss, 20)). loss: loss in nats per token."""
    return math.exp(min(_LARGEST_LOSS_FOR_PERPLEXITY, loss))


def parse_log_line(line: str) -> ParsedLine | None:
    """Parses a training or validation line of this repository, Megatron-LM or Megatron-DeepSpeed. Returns
    None for any other line.

    'kind' is 'training' or 'validation'. Field names are in lower_snake_case ('consumed_samples', 'lm_loss',
    'grad_norm'). 'seconds_per_iteration' is in seconds, even if the line has milliseconds. A validation line
    has 'name' and 'at', and 'iteration' if `at` contains it. Text before the line (a launcher's prefix, a
    date) and fields that are incomplete or not a number are ignored.
    """
    start = _TRAINING_START.search(line)
    if start:
        fields = _fields(line[start.end() :])
        head: ParsedLine = {"kind": "training", "iteration": int(start[1]), "total_iterations": int(start[2])}
        return {**fields, **head} if fields else None
    start = _VALIDATION_START.search(line)
    if start:
        fields = _fields(line[start.end() :])
        fields.pop("iteration", None)
        head = {"kind": "validation", "name": start[1], "at": start[2].rstrip()}
        iteration = _ITERATION.search(start[2])
        if iteration:
            head["iteration"] = int(iteration[1])
        return {**fields, **head} if "lm_loss" in fields else None
    return None


def _fields(text: str) -> ParsedLine:
    """Returns the `name: value` fields of a line. Each field ends with a bar."""
    fields: ParsedLine = {}
    for part in text.split("|")[:-1]:  # a part without a final bar is incomplete
        label, _, value = part.rpartition(":")
        label = label.strip()
        number = parse_number(value.strip())
        if not label or number is None:
            continue
        if label == _MILLISECONDS:
            fields["seconds_per_iteration"] = number / 1000
        else:
            fields[_NAMES.get(label) or re.sub(r"\W+", "_", label.lower()).strip("_")] = number
    return fields


def parse_number(text: str) -> int | float | None:
    """Returns the number in a part of a line, or None if the part is not a number."""
    try:
        number = int(text)
        if abs(number) < _LARGEST_INTEGER:
            return number
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _two_digits(value: float) -> str:
    """Returns the value with two decimals, as in Megatron-LM, or with four if it is below 1."""
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def read_log_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a console log. Raises OSError if the file cannot be read or is not a regular file
    (a device, a pipe), and HostileFileError if the file is longer than any log."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MAX_LOG_BYTES:
            raise HostileFileError(f"{path} has more than {_MAX_LOG_BYTES:,} bytes: give a part of it")
        while line := file.readline(_MAX_LINE_BYTES):
            yield from line.decode(errors="replace").splitlines()
