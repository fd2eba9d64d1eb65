"""A run uses the index files that tools/prepare_indices.py has prepared."""

from __future__ import annotations

from pathlib import Path

from megatron.commands import prepare_indices
from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, RAMPED


def test_a_run_starts_with_the_indices_that_the_tool_prepared_for_its_flags(
    data: list[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    flags = [*MODEL, *ABSOLUTE, *RAMPED, *data, "--data-cache-path", str(cache), "--exit-interval", "2"]
    refused = pretrain([*flags, "--require-prepared-indices"], processes=2)
    assert refused.exit_code == 2
    assert "--require-prepared-indices: 3 of 3 indices are not prepared, such as " in refused.stderr
    assert "run tools/prepare_indices.py --world-size 2 with the flags of this run" in refused.stderr
    prepare_indices.main(["--world-size", "2", *flags])
    prepared = {path.name: path.stat().st_ino for path in cache.iterdir()}
    assert len(prepared) == 10
    run = pretrain([*flags, "--require-prepared-indices"], processes=2).ok()
    assert len(run.steps) == 2 and "rank 0 builds" not in run.stdout
    assert {path.name: path.stat().st_ino for path in cache.iterdir()} == prepared
