"""Without the checkpoint a tool cannot know the length of the run that it plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.checkpoint.selection import planned_length
from megatron.commands.verify_dataset import sample_report, sampled_run
from megatron.config.mistakes import Mistakes
from megatron.errors import UserError
from tests.unit.config.command_lines import SMALL


def length_of(words: list[str]) -> str:
    return planned_length(read_command_line(words, {}).config)[2]


def sample_of(words: list[str]) -> str:
    return next(sample_report(0, "train", sampled_run(words, Mistakes())))


@pytest.mark.parametrize("find", [length_of, sample_of])
def test_a_length_that_an_object_store_determines_is_an_error(find: Callable[[list[str]], str]) -> None:
    with pytest.raises(UserError, match="s3://bucket/run: .* copy the checkpoint to a file system"):
        find([*SMALL, "--load", "s3://bucket/run"])


def test_a_sample_of_a_run_with_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    load = str(tmp_path / "absent")
    with pytest.raises(UserError, match="does not exist"):
        sample_of([*SMALL, "--load", load])
    assert sample_of([*SMALL, "--load", load, "--save", load]) == f"--load {load} does not exist here"
    assert length_of([*SMALL, "--load", load]) == f"{load} does not exist here"
