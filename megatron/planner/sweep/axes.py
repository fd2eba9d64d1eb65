"""The axes of a sweep (flags and their values), and the combinations of these values."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.config.config import OPTIONS, SETTINGS
from megatron.config.fields import setting_option
from megatron.config.flag_parser import make_parser
from megatron.config.foreign_flags import foreign_flags, rewrite
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import near_flags, unknown_flag
from megatron.errors import ConfigError

MAX_ROWS = 1000
_parser = cache(make_parser)
# Settings from which the global batch size is derived without --global-batch-size.
_BATCH_FACTORS = {
    *(f"parallel.{axis}_parallel_size" for axis in ("tensor_model", "context", "pipeline_model")),
    "batch.micro_batch_size",
}
# A negative number, such as -1 or -.5, is a value and not a flag.
_LIKE_A_FLAG = re.compile(r"-[^\d.]")
# Flags that the sweep itself appends to each command, see `run_words`.
SET_BY_SWEEP = ("training.exit_interval", "training.eval_iters", "logging.log_interval", "logging.log_bubble")
# Flags that a sweep does not accept -> the reason.
_REFUSED = {
    "training.dry_run": "use the plan command instead",
    "training.no_train": "a sweep measures training steps",
    "checkpoint.save": "the runs of a sweep save nothing, so that each starts from the same weights",
}


@dataclass(frozen=True)
class Axis:
    """A flag that is varied, and its values as they are typed on the command line."""

    flag: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A combination of values, and what is known about its configuration. It is an object of `rows` in
    sweep.json.

    settings: flag -> value as typed. words: the settings as words of a command line. numbers: digest of the
    settings on which the losses depend. tolerance: relative difference of losses that the precision allows.
    predicted: see `resolve.predict`. refused: the error if the configuration is invalid, otherwise None.
    """

    index: int
    settings: dict[str, str]
    words: list[str]
    processes: int = 0
    numbers: str = ""
    tolerance: float = 0.0
    tokens_per_step: int = 0
    predicted: dict[str, Any] | None = None
    refused: str | None = None

    @property
    def label(self) -> str:
        """The settings, such as '--partition-method memory --zero-stage 1'; 'the base command' if there are
        none."""
        words = (f"{flag} {shlex.quote(value)}" for flag, value in self.settings.items())
        return " ".join(words) or "the base command"


def split_command(argv: Sequence[str]) -> tuple[list[str], list[Axis], list[str]]:
    """Returns the parts of 'WORDS --vary FLAG V1 V2 ... -- BASE': the words outside of --vary, the axes, and
    the base command. The values of a flag end at the next word that begins with --. Raises ConfigError for
    --vary without a flag."""
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    words, base = argv[:end], rewrite(argv[end + 1 :])[0]
    rest: list[str] = []
    axes: list[Axis] = []
    while words:
        word = words.pop(0)
        if word != "--vary":
            rest.append(word)
            continue
        if not words or not words[0].startswith("--"):
            raise ConfigError("--vary without a flag: expected --vary FLAG VALUE VALUE ...")
        flag, values = words.pop(0), []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        axes.append(Axis(flag, tuple(values)))
    return rest, axes, base


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings in `words`: 'section.field' -> value. Raises one ConfigError that lists all
    mistakes."""
    return vars(_parser().parse_args(words))


def check_base(base: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of the base command. Raises one ConfigError that lists all mistakes, such as flags
    that a sweep does not accept."""
    mistakes = Mistakes()
    given = vars(_parser().collect(base, mistakes))
    mistakes.extend(
        f"{setting_option(name)} in the base command: {reason}. Remove it."
        for name, reason in _REFUSED.items()
        if name in given
    )
    mistakes.raise_all()
    return given


def make_rows(axes: Sequence[Axis], base: Sequence[str]) -> list[Row]:
    """Returns a row for each combination of the axes' values; the last axis varies fastest. Raises one
    ConfigError that lists all mistakes in the axes and the base command."""
    mistakes, given, of_name = Mistakes(), dict[str, Any](), dict[str, Axis]()
    with mistakes.collect():
        given = check_base(base)
    for axis in axes:
        with mistakes.collect():
            first = of_name.setdefault(_check_axis(axis, given), axis)
            if first is not axis:
                raise ConfigError(
                    f"--vary {first.flag} and --vary {axis.flag} are the same flag. Set all values after one "
                    "--vary."
                )
    factors = [axis.flag for name, axis in of_name.items() if name in _BATCH_FACTORS and axis.values[1:]]
    # Without a base command, the script of --sbatch contains the other flags.
    if base and factors and "batch.global_batch_size" not in {*given, *of_name}:
        mistakes.add(
            f"--vary {factors[0]} without --global-batch-size: it is derived from the layout, so the rows "
            "would have different batches. Set it in the base command."
        )
    if (count := math.prod(len(axis.values) for axis in axes)) > MAX_ROWS:
        mistakes.add(f"the axes have {count:,} combinations. Expected {MAX_ROWS:,} at most.")
    mistakes.raise_all()
    rows = []
    for index, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        settings = {axis.flag: value for axis, value in zip(axes, values, strict=True)}
        words = [word for flag, value in settings.items() for word in _words_of(flag, value)]
        rows.append(Row(index, settings, words))
    return rows


def checked_row(settings: Mapping[str, str], base: Sequence[str]) -> Row:
    """Returns the row for settings that were read from a file. Raises ConfigError for settings that --vary
    does not accept, because another user may have written the file."""
    (row,) = make_rows([Axis(flag, (value,)) for flag, value in settings.items()], base)
    return row


def num_processes(words: Sequence[str]) -> int:
    """Returns the number of processes of a run: --world-size, or TP x CP x PP without that flag."""
    given = given_flags(words)
    sizes = (
        given.get(f"parallel.{axis}_parallel_size", 1)
        for axis in ("tensor_model", "context", "pipeline_model")
    )
    return int(given.get("parallel.world_size") or math.prod(sizes))


def _words_of(flag: str, value: str) -> list[str]:
    """Returns the words that set a flag on the command line: [] for the value '' or for a switch that is off.
    Raises ConfigError for a value that would be parsed as a flag."""
    setting = SETTINGS[OPTIONS[flag]]
    if setting.kind is bool:
        return [flag] if value == "on" else []
    if value == "":
        return []
    try:
        words = shlex.split(value) if setting.flag.nargs is not None else [value]
    except ValueError as error:
        raise ConfigError(f"--vary {flag} {value}: a quotation mark is not closed ({error})") from error
    if any(_LIKE_A_FLAG.match(word) for word in words):
        raise ConfigError(f"--vary {flag} {value}: a value cannot begin with a dash. Remove the dash.")
    return [flag, *words]


def run_words(base: Sequence[str], words: Sequence[str], steps: int) -> list[str]:
    """Returns the flags of one run: `steps` steps without evaluation, with a log line and the bubble of every
    step. base: the base command. words: the flags of the row."""
    own = ["--exit-interval", str(steps), "--eval-iters", "0", "--log-interval", "1", "--log-bubble"]
    return [*base, *words, *own]


def _check_axis(axis: Axis, base: Mapping[str, Any]) -> str:
    """Returns the setting of the axis as 'section.field'. Raises ConfigError if the flag cannot be varied, or
    a value is not valid. base: the settings of the base command."""
    name = OPTIONS.get(axis.flag)
    if name is None and axis.flag in foreign_flags().ignored:
        raise ConfigError(f"--vary {axis.flag}: the flag is ignored, so its value changes nothing")
    if name is None:
        raise ConfigError(f"--vary: {unknown_flag(axis.flag, near_flags(axis.flag, OPTIONS))}")
    is_switch = SETTINGS[name].kind is bool
    if name in _REFUSED or name in SET_BY_SWEEP:
        reason = _REFUSED.get(name, "the sweep sets it")
        raise ConfigError(f"--vary {axis.flag} is not possible: {reason}")
    if not axis.values:
        raise ConfigError(f"--vary {axis.flag} has no value. Expected --vary FLAG VALUE VALUE ...")
    if len(set(axis.values)) < len(axis.values):
        raise ConfigError(f"--vary {axis.flag} has a value twice. Remove one of the two.")
    if is_switch and not set(axis.values) <= {"on", "off"}:
        raise ConfigError(f"--vary {axis.flag} {' '.join(axis.values)}: expected the values on and off")
    # A value of an axis is appended to the base command, which overrides a value but cannot remove a flag.
    removes_flag = "off" if is_switch else ""
    if name in base and removes_flag in axis.values:
        raise ConfigError(
            f"--vary {axis.flag} has a value that removes the flag, but the base command sets it. Remove it "
            "from the base command."
        )
    for value in axis.values:
        _words_of(axis.flag, value)
    return name
