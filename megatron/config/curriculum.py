"""The sequence-length curriculum: `curriculum_learning` with type seqlen in a DeepSpeed JSON file.

The sequence length is a pure function of the iteration, as in DeepSpeed's CurriculumScheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from megatron.errors import ConfigError

SOURCE = "the DeepSpeed config's curriculum_learning"
_SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete")
# The sequence length of every step is computed at the start.
_MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class LengthCurriculum:
    """The sequence length over the run, in tokens. Samples are truncated to it.

    fixed_linear, fixed_root: the length grows from min_length to max_length over total_steps, with the root
    of degree root_degree, and is rounded down to multiples of `multiple`. fixed_discrete: the length is
    lengths[i] up to step last_steps[i], then lengths[-1].
    """

    schedule: str
    min_length: int
    max_length: int
    total_steps: int = 1
    multiple: int = 1
    root_degree: int = 1
    lengths: tuple[int, ...] = ()
    last_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lengths", "last_steps"):  # lists after a JSON round trip
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def length_at(self, iteration: int) -> int:
        """Returns the sequence length in step `iteration`, counted from 1."""
        if self.schedule == "fixed_discrete":
            for length, last in zip(self.lengths, self.last_steps, strict=False):
                if iteration <= last:
                    return length
            return self.lengths[-1]
        if iteration >= self.total_steps:
            return self.max_length
        way = (iteration / self.total_steps) ** (1.0 / self.root_degree)
        length = int(way * (self.max_length - self.min_length) + self.min_length)
        return max(length - length % self.multiple, self._first)

    @property
    def _first(self) -> int:
        return -(-self.min_length // self.multiple) * self.multiple

    @property
    def steps(self) -> int:
        """The first step with the final sequence length."""
        return self.last_steps[-1] + 1 if self.schedule == "fixed_discrete" else self.total_steps

    def all_lengths(self) -> list[int]:
        """Returns all sequence lengths of the run, ascending."""
        return sorted({self.length_at(step) for step in range(1, self.steps + 1)})

    def describe(self) -> str:
        """Returns one sentence for the startup log."""
        return (
            f"curriculum: sequence length {self.length_at(1)} at first, {self.length_at(self.steps)} from "
            f"step {self.steps:,} on ({self.schedule}); evaluations use the full sequence length"
        )


def read_curriculum(section: Mapping[str, Any]) -> LengthCurriculum | None:
    """Returns the curriculum of a JSON section, or None if it is off. Raises ConfigError for invalid
    settings."""
    if section.get("enabled") is not True:
        return None
    for key in ("curriculum_type", "schedule_type", "schedule_config", "min_difficulty", "max_difficulty"):
        if key not in section:
            raise ConfigError(f"{SOURCE} has no {key}: add it to the file")
    kind, schedule, details = (section[k] for k in ("curriculum_type", "schedule_type", "schedule_config"))
    if kind != "seqlen":
        raise ConfigError(f"{SOURCE}.curriculum_type is {kind!r}: expected 'seqlen'")
    if schedule not in _SCHEDULES:
        raise ConfigError(f"{SOURCE}.schedule_type is {schedule!r}: expected one of {', '.join(_SCHEDULES)}")
    if not isinstance(details, Mapping):
        raise ConfigError(f"{SOURCE}.schedule_config is {details!r}: expected an object in braces")
    shortest, longest = (_number(section, key) for key in ("min_difficulty", "max_difficulty"))
    if shortest > longest:
        raise ConfigError(
            f"{SOURCE}: min_difficulty {shortest} is larger than max_difficulty {longest}: swap them"
        )
    if schedule == "fixed_discrete":
        return _with_bounded_steps(_discrete(details, shortest, longest))
    multiple = _number(details, "difficulty_step")
    if longest % multiple:
        raise ConfigError(
            f"{SOURCE}: max_difficulty {longest} is not a multiple of difficulty_step {multiple} and would "
            "never be reached: change one of them"
        )
    return _with_bounded_steps(
        LengthCurriculum(
            schedule,
            shortest,
            longest,
            total_steps=_number(details, "total_curriculum_step"),
            multiple=multiple,
            root_degree=_number(details, "root_degree") if schedule == "fixed_root" else 1,
        )
    )


def _with_bounded_steps(curriculum: LengthCurriculum) -> LengthCurriculum:
    if curriculum.steps > _MAX_STEPS:
        raise ConfigError(
            f"{SOURCE} reaches its final sequence length in step {curriculum.steps:,}: expected at most "
            f"{_MAX_STEPS:,}"
        )
    return curriculum


def _discrete(details: Mapping[str, Any], shortest: int, longest: int) -> LengthCurriculum:
    lengths, steps = (
        tuple(value) if isinstance(value, list) else ()
        for value in (details.get("difficulty"), details.get("max_step"))
    )
    fits = (
        0 < len(steps) == len(lengths) - 1
        and all(_is_count(number) for number in (*lengths, *steps))
        and list(lengths) == sorted(lengths)
        and list(steps) == sorted(steps)
        and shortest <= lengths[0]
        and lengths[-1] == longest
    )
    if not fits:
        raise ConfigError(
            f"{SOURCE}.schedule_config: fixed_discrete expects ascending integers, 'difficulty' from "
            f"min_difficulty {shortest} or more to max_difficulty {longest}, and 'max_step', one fewer"
        )
    return LengthCurriculum("fixed_discrete", shortest, longest, lengths=lengths, last_steps=steps)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(section: Mapping[str, Any], key: str) -> int:
    value = section.get(key)
    if not _is_count(value):
        raise ConfigError(f"{SOURCE}: {key} is {value!r}: expected a positive integer")
    return value
