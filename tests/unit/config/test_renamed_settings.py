"""Configs and command lines of earlier versions: former names are understood."""

from __future__ import annotations

import json

from megatron.config import Config, parse_args
from tests.unit.config.command_lines import SMALL


def test_the_config_of_an_older_checkpoint_has_its_values_under_the_new_names() -> None:
    settings = json.loads(json.dumps(parse_args([*SMALL, "--spike-window", "9"], {}).to_dict()))
    settings["trouble"] = settings.pop("stability")
    del settings["checkpoint"]["allow_replica_mismatch"]
    settings["checkpoint"]["allow_drift"] = True
    config = Config.from_dict(settings)
    assert config.stability.spike_window == 9
    assert config.checkpoint.allow_replica_mismatch is True


def test_the_old_spelling_of_a_flag_sets_the_renamed_field() -> None:
    assert parse_args([*SMALL, "--load", "x", "--allow-drift"], {}).checkpoint.allow_replica_mismatch is True
