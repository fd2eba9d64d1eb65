"""The flags of the section stability."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError, parse_args, read_command_line
from tests.unit.config.command_lines import SMALL


def test_any_number_of_ranges_is_read() -> None:
    flags = ["--skip-train-iteration-range", "13251-14000", "16_651-19500", "5-5"]
    stability = parse_args([*SMALL, *flags], {}).stability
    assert stability.skipped_ranges == ((13251, 14000), (16651, 19500), (5, 5))
    assert parse_args(SMALL, {}).stability.skipped_ranges == ()


@pytest.mark.parametrize("text", ["200-101", "0-5", "17", "a-b", "3-", "1-2-3"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--skip-train-iteration-range {text}: expected FIRST-LAST"):
        parse_args([*SMALL, "--skip-train-iteration-range", text], {})


def test_a_rollback_needs_checkpoints() -> None:
    flags = [*SMALL, "--spike-policy", "rollback"]
    with pytest.raises(ConfigError, match="--spike-policy rollback without --save and --save-interval"):
        parse_args([*flags, "--save", "there"], {})
    assert parse_args([*flags, "--save", "there", "--save-interval", "5"], {}).stability.max_rollbacks == 3


def test_flags_without_effect_are_noted() -> None:
    notes = read_command_line([*SMALL, "--spike-window", "9", "--sync-tp-duplicated-parameters"], {}).notes
    assert {note.split(":")[0] for note in notes} == {
        "--spike-window has no effect without --spike-policy",
        "--sync-tp-duplicated-parameters has no effect with --tensor-model-parallel-size 1",
    }
