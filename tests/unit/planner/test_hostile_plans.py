"""Files of --partition-profile that no run wrote."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.arguments import parse_args
from megatron.pipeline.layer_times import read_layer_times
from tests.unit.config.command_lines import SMALL
from tests.unit.hostile import refusal


def read(path: Path) -> object:
    words = ["--partition-method", "profile", "--partition-profile", str(path)]
    return read_layer_times(parse_args([*SMALL, *words], {}), 1000)


def test_a_hostile_pipe_device_or_deep_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name in ("pipe", "zero", "deep"):
        assert f"--partition-profile {tmp_path / name} cannot be read" in refusal(
            lambda n=name: read(tmp_path / n)
        )
