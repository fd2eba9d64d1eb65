"""Saves local checkpoints through the command line. `tests/distributed` tests them on several nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT


def flags_of(folder: Path, data: list[str]) -> list[str]:
    save = str(folder / "save")
    local = ["--save-local", str(folder / "disk"), "--save-local-interval", "5"]
    return [*MODEL, *ABSOLUTE, *SHORT, *data, "--save", save, "--load", save, *local]


def test_a_run_that_resumes_from_a_local_checkpoint_at_its_end_still_saves(
    data: list[str], tmp_path: Path
) -> None:
    """The run has crashed between its last local save and its save to --save."""
    flags, save = flags_of(tmp_path, data), tmp_path / "save"
    first = pretrain(flags, processes=2).ok()
    assert "global_step5 on the nodes' disks, " in first.stdout
    assert (
        "note: --save-local: the run has one node, so its local checkpoints are not mirrored" in first.stdout
    )
    shutil.rmtree(save / "global_step5")
    (save / "latest").unlink()
    (save / "latest.json").unlink()
    again = pretrain(flags, processes=2).ok()
    assert "global_step5, iteration 5 (local checkpoint, no checkpoint in --save)" in again.stdout
    assert again.steps == [] and (save / "latest").read_text() == "global_step5"
    third = pretrain(flags, processes=2).ok()
    assert f"starting from {save}/global_step5, iteration 5\n" in third.stdout


def test_a_new_run_does_not_delete_the_local_checkpoints_of_another(data: list[str], tmp_path: Path) -> None:
    flags, save = flags_of(tmp_path, data), tmp_path / "save"
    pretrain(flags).ok()
    shutil.rmtree(save / "global_step5")
    load = flags.index("--load")
    refused = pretrain(flags[:load] + flags[load + 2 :])
    assert refused.exit_code == 2
    (error,) = refused.errors
    assert f"--save {save} holds checkpoints of another run (local global_step5), and this is a new" in error


def test_a_file_in_the_place_of_save_local_is_one_sentence(data: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = flags_of(tmp_path, data)
    flags[flags.index("--save-local") + 1] = str(tmp_path / "file")
    run = pretrain(flags, processes=2)
    assert run.exit_code == 2 and len(run.errors) == 1
    assert f": --save-local {tmp_path}/file/save-" in run.errors[0]
