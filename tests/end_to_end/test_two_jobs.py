"""If two jobs start into one --save folder, one trains, and the other stops and names the first."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL

# --kill-switch-path ends the run, so the test does not depend on the speed of a step.
ENDLESS = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 100000 --log-interval 1".split()


def test_two_jobs_at_once_after_a_killed_one(data: list[str], tmp_path: Path) -> None:
    checkpoints, switch = tmp_path / "checkpoints", tmp_path / "stop"
    flags = [*MODEL, *ABSOLUTE, *ENDLESS, *data, "--eval-iters", "0", "--kill-switch-path", str(switch)]
    flags += ["--save", str(checkpoints), "--save-interval", "2"]

    def kill_once_saved(line: str, pids: list[int]) -> None:
        if line.startswith("saved "):
            os.kill(pids[0], signal.SIGKILL)

    killed = pretrain([*flags, "--load", str(checkpoints)], on_line=kill_once_saved)
    assert killed.exit_code == -signal.SIGKILL and list(checkpoints.glob("owner-000001-*.json"))

    runs: list[Run] = []

    def start() -> None:
        runs.append(pretrain([*flags, "--load", str(checkpoints)]))
        switch.touch()  # the first job to end is the rejected one

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, trained = runs
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert re.match(rf"error: --save {checkpoints} is in use by another run on \S+ \(process", refused.stderr)
    assert trained.exit_code == 0, trained.stderr
    assert f"{checkpoints} taken over from another run" in trained.stdout
    assert f"starting from {checkpoints / 'global_step2'}, iteration 2" in trained.stdout
    assert not list(checkpoints.glob("owner-*")) and not list(checkpoints.glob("saving-*"))

    # A run without --load leaves existing checkpoints unchanged.
    latest = (checkpoints / "latest").read_text()
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    forgotten = pretrain(flags)
    assert forgotten.exit_code == 2 and forgotten.stderr.count("\n") == 1, forgotten.stderr
    assert (
        "holds checkpoints of another run" in forgotten.stderr
        and "--overwrite-checkpoints" in forgotten.stderr
    )
    assert {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")} == before
    assert (checkpoints / "latest").read_text() == latest
