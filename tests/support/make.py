"""Runs make without the settings of an outer make or of CI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("EXTRAS", "GPU", "WHEELHOUSE", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")


def run_make(*words: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**{name: value for name, value in os.environ.items() if name not in SETTINGS}, **env}
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, env=env)


def make(*words: str, folder: Path = ROOT, **env: str) -> str:
    """Returns what make prints. Fails the test if make fails."""
    done = run_make(*words, folder=folder, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout
