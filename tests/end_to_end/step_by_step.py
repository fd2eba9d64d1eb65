"""pretrain_gpt.py that waits after each training line until the test answers with a line on stdin.

A test that kills or signals a run at a step needs a run that is still at that step.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.training.log_lines import parse_log_line  # noqa: E402


class WaitingOutput:
    """A stdout that waits at the end of a training line until a byte arrives on stdin."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._line += text
        if self._line.endswith("\n"):
            line, self._line = self._line, ""
            if (parse_log_line(line.rstrip("\n")) or {}).get("kind") == "training":
                self._stream.flush()
                os.read(0, 1)
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.stdout = WaitingOutput(sys.stdout)
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
