"""The sequence-length curriculum: `curriculum_learning` with type seqlen in a DeepSpeed JSON file.

The sequence length is a pure function of the iteration, as in DeepSpeed's CurriculumScheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "the DeepSpeed config's curriculum_learning"


@dataclass(frozen=True)
class LengthCurriculum:
    """The sequence length over the run, in tokens. Samples are truncated to it.

    With fixed_linear and fixed_root, the length grows from min_length to max_length over total_steps, with
    the root of degree root_degree, and is rounded down to multiples of `multiple`. With fixed_discrete, the
    length is lengths[i] up to step last_steps[i], and lengths[-1] after the last of these steps.
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
        shortest = -(-self.min_length // self.multiple) * self.multiple
        return max(length - length % self.multiple, shortest)

    @property
    def steps(self) -> int:
        """Returns the number of the first step with the final sequence length, counted from 1."""
        return self.last_steps[-1] + 1 if self.schedule == "fixed_discrete" else self.total_steps

    def all_lengths(self) -> list[int]:
        """Returns all sequence lengths of the run, ascending."""
        return sorted({self.length_at(step) for step in range(1, self.steps + 1)})

    def describe(self) -> str:
        """Returns one sentence about the curriculum for the log."""
        return (
            f"curriculum: sequence length {self.length_at(1)} at first, {self.length_at(self.steps)} from "
            f"step {self.steps:,} on ({self.schedule}); evaluations use the full sequence length"
        )
