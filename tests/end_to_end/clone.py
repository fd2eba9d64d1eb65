"""A folder that looks like a clone after `make setup`, and the documentation's commands that run in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.command import ROOT, environment
from tests.support import HANG_TIMEOUT_S


def commands_in(page: str) -> list[str]:
    """Returns the commands of all bash blocks of a page. Lines that end with a backslash are joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


def make_clone(folder: Path, corpus: Path) -> Path:
    """Makes a clone in the folder, with a user's my_text.jsonl in it. Returns the folder."""
    for part in ("benchmarks", "examples", "megatron", "pretrain_gpt.py", "tools"):
        (folder / part).symlink_to(ROOT / part)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        # Through a link Python would not find this environment's packages.
        script = folder / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
    (folder / "my_text.jsonl").write_bytes((corpus / "text.jsonl").read_bytes())
    return folder


def run(command: str, clone: Path, **env: str) -> str:
    """Runs a command in the clone. Returns what it printed. Fails the test if the command fails."""
    inherited = environment()
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{inherited['PATH']}"
    finished = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        env={**inherited, "PATH": path, **env},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout
