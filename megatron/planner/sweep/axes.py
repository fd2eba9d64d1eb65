"""The axes of a sweep, and the combinations of their values."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.config.cli import make_parser
from megatron.config.fields import setting_option
from megatron.config.peer_flags import IGNORED_FLAGS, rewrite, unsupported
from megatron.errors import UserError

MAX_ROWS = 1000
# A negative number is a value.
_LIKE_A_FLAG = re.compile(r"-[^\d.]")
# Flags that decide what a sweep measures. The sweep sets the first ones itself, after the base command.
SET_BY_SWEEP = ("training.exit_interval", "training.eval_iters", "logging.log_interval", "logging.log_bubble")
_REFUSED = {
    "training.dry_run": "use the plan command instead",
    "training.simulate": "use pretrain_gpt.py --dry-run --simulate instead",
    "training.no_train": "a sweep measures training steps",
    "checkpoint.save": "the runs of a sweep save nothing, so that each starts from the same weights",
}


@dataclass(frozen=True)
class Axis:
    """A flag and the values that it takes, as typed."""

    flag: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A combination of values, and what is known of its configuration: an object of `rows` in sweep.json.

    settings: flag -> value as typed. words: the flags of the command line. numbers: digest of the settings on
    which the losses depend. tolerance: relative difference of losses that the precision explains. refused:
    the sentence of the configuration that refuses it.
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
        """'--partition-method memory --micro-batch-size 2'; 'the base command' without an axis."""
        words = (f"{flag} {shlex.quote(value)}" for flag, value in self.settings.items())
        return " ".join(words) or "the base command"


def split_command(argv: Sequence[str]) -> tuple[list[str], list[Axis], list[str]]:
    """Splits 'WORDS --vary FLAG V1 V2 ... -- BASE' into the other words, the axes and the base command.

    The word after --vary is the flag, although it begins with --. Its values end at the next word that begins
    with --.
    """
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
            raise UserError("--vary without a flag: expected --vary FLAG VALUE VALUE ...")
        flag, values = words.pop(0), []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        axes.append(Axis(flag, tuple(values)))
    return rest, axes, base


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """'section.field' -> value of the flags in `words`. Raises UserError for a word that is not a flag."""
    namespace, unknown = _parser().parse_known_args(list(words))
    if unknown:
        if instead := unsupported(unknown[0].split("=")[0]):
            raise UserError(f"{unknown[0]} in the command after -- is not supported: {instead}")
        raise UserError(f"unknown word '{unknown[0]}' in the command after --: see pretrain_gpt.py --help")
    return vars(namespace)


def check_base(base: Sequence[str]) -> dict[str, Any]:
    """The flags of the base command. Raises UserError for flags that a sweep cannot have."""
    given = given_flags(base)
    for name, reason in _REFUSED.items():
        if name in given:
            raise UserError(f"{setting_option(name)} in the base command: remove it, {reason}")
    return given


def make_rows(axes: Sequence[Axis], base: Sequence[str]) -> list[Row]:
    """The product of the axes; the last axis varies fastest. Raises UserError for an invalid axis."""
    given = check_base(base)
    names = [_check_axis(axis, given) for axis in axes]
    for first, second in itertools.combinations(range(len(axes)), 2):
        if names[first] == names[second]:
            raise UserError(
                f"--vary {axes[first].flag} and --vary {axes[second].flag} are the same flag: give all "
                "values to one"
            )
    if (count := math.prod(len(axis.values) for axis in axes)) > MAX_ROWS:
        raise UserError(f"the axes have {count:,} combinations: expected {MAX_ROWS:,} at most")
    rows = []
    for index, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        settings = {axis.flag: value for axis, value in zip(axes, values, strict=True)}
        words = [word for flag, value in settings.items() for word in _words_of(flag, value)]
        rows.append(Row(index, settings, words))
    return rows


def checked_row(settings: Mapping[str, str], base: Sequence[str]) -> Row:
    """The row of settings that were read from a file. UserError if no --vary could have made it."""
    (row,) = make_rows([Axis(flag, (value,)) for flag, value in settings.items()], base)
    return row


def num_processes(words: Sequence[str]) -> int:
    """The processes of a run: --world-size, or tensor x pipeline size without that flag."""
    given = given_flags(words)
    sizes = [given.get(f"parallel.{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline")]
    return int(given.get("parallel.world_size") or sizes[0] * sizes[1])


def _words_of(flag: str, value: str) -> list[str]:
    """The words of a flag on the command line: none for the value '', and for a switch that is off.
    UserError for a value that the command line would take for another flag."""
    action = _actions()[flag]
    if _is_switch(action):
        return [flag] if value == "on" else []
    if value == "":
        return []
    try:
        words = shlex.split(value) if action.nargs is not None else [value]
    except ValueError as error:
        raise UserError(f"--vary {flag} {value}: a quotation mark is open ({error})") from error
    if any(_LIKE_A_FLAG.match(word) for word in words):
        raise UserError(f"--vary {flag} {value}: a value cannot begin with a dash, remove it")
    return [flag, *words]


def run_words(base: Sequence[str], words: Sequence[str], steps: int) -> list[str]:
    """The flags of a run of `steps` steps, without evaluation, that logs every step and its bubble."""
    own = ["--exit-interval", str(steps), "--eval-iters", "0", "--log-interval", "1", "--log-bubble"]
    return [*base, *words, *own]


def _check_axis(axis: Axis, base: Mapping[str, Any]) -> str:
    """The axis's 'section.field'. base: the flags of the base command."""
    action = _actions().get(axis.flag)
    if action is None:
        nearest = difflib.get_close_matches(axis.flag, _actions(), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see pretrain_gpt.py --help"
        raise UserError(f"--vary {axis.flag}: unknown flag, {hint}")
    name = action.dest
    if name in _REFUSED or name in SET_BY_SWEEP:
        reason = _REFUSED.get(name, "the sweep sets it")
        raise UserError(f"--vary {axis.flag} is not possible: {reason}")
    if any(axis.flag == flag.name for flag in IGNORED_FLAGS):
        raise UserError(f"--vary {axis.flag}: the flag is ignored, it changes nothing")
    if not axis.values:
        raise UserError(f"--vary {axis.flag} has no value: expected --vary FLAG VALUE VALUE ...")
    if len(set(axis.values)) < len(axis.values):
        raise UserError(f"--vary {axis.flag} has a value twice: remove one")
    if _is_switch(action) and not set(axis.values) <= {"on", "off"}:
        raise UserError(f"--vary {axis.flag} {' '.join(axis.values)}: expected the values on and off")
    # A value is appended to the base command and replaces its value. A flag cannot be taken away in this way.
    takes_away = "off" if _is_switch(action) else ""
    if name in base and takes_away in axis.values:
        raise UserError(
            f"{axis.flag} is in the base command, and a value of --vary omits it: remove it there"
        )
    return name


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs in (0, "?")


@cache
def _parser() -> argparse.ArgumentParser:
    return make_parser()


def _actions() -> Mapping[str, argparse.Action]:
    return {name: action for action in _parser()._actions for name in action.option_strings}
