"""Types the commands of a tutorial in order, and compares their output with the output on the page."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.command import ROOT, environment
from tests.support.forked import run_script

ITERATIONS = r"(--(?:train-iters|(?:exit|save|eval|log)-interval|lr-warmup-iters) |\bglobal_step)(\d+)\b"
"""Numbers of a command that the tests may divide: iterations, in flags and in names of checkpoints."""
NUMBER = r"\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. kind: the word after the fence, such as 'bash'."""

    kind: str
    text: str


@dataclass(frozen=True)
class Typed:
    """A command of a page, and what it printed on stdout and stderr."""

    command: str
    output: str

    def number(self, pattern: str) -> float:
        """Returns the number that the group of the pattern finds last in the output."""
        found = re.findall(pattern, self.output)
        assert found, f"{pattern} is not in the output of {self.command}\n{self.output}"
        return float(found[-1].replace(",", ""))


def blocks_of(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page in order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(kind, text) for kind, text in found]


def type_tutorial(page: Path, fewer: int = 1) -> list[Typed]:
    """Types the `bash` and `python` blocks of a page in the working directory. Returns what each printed.

    fewer: by how much the numbers of iterations in the commands are divided.
    A `text` block shows output of the `bash` or `python` block before it. The test fails if a command fails,
    or if a line of a `text` block is not a line of that output. Numbers may differ, and `...` stands for any
    text. Blocks of other kinds, such as `sh`, are not typed.
    """
    typed: list[Typed] = []
    latest: list[Typed] = []
    for block in blocks_of(page):
        if block.kind == "text":
            check_shown(block.text, [line for one in latest for line in one.output.splitlines()])
        elif block.kind in ("bash", "python"):
            latest = type_block(block, fewer)
            typed += latest
    return typed


def type_block(block: Block, fewer: int) -> list[Typed]:
    """Types the commands of a `bash` block, or runs the program of a `python` block."""
    if block.kind == "python":
        script = Path("block.py")
        script.write_text(block.text)
        return [Typed(block.text, run_python([str(script.absolute())]))]
    lines = block.text.replace("\\\n", " ").splitlines()
    return [Typed(line, type_command(with_fewer_iterations(line, fewer))) for line in lines if line.strip()]


def with_fewer_iterations(command: str, fewer: int) -> str:
    """Returns the command with its numbers of iterations divided by `fewer`, and rounded up."""

    def divided(match: re.Match[str]) -> str:
        return f"{match[1]}{math.ceil(int(match[2]) / fewer)}"

    return re.sub(ITERATIONS, divided, command)


def type_command(command: str) -> str:
    """Runs a command of the form `.venv/bin/python ...` and returns what it printed."""
    python, *words = shlex.split(command)
    assert python == ".venv/bin/python", command
    return run_python(words[1:] if words[0] == "-u" else words)


def run_python(words: list[str]) -> str:
    """Runs what follows the interpreter in processes that are forked from one that has done the imports.

    The launcher `torch.distributed.run --standalone --nproc_per_node N` becomes N forked processes.
    """
    processes = 0
    if words[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]:
        processes, words = int(words[4]), words[5:]
    if words[0] == "-m":
        module = importlib.util.find_spec(words[1])
        assert module is not None and module.origin is not None, words[1]
        words = [module.origin, *words[2:]]
    script, *flags = words
    ended = run_script(ROOT / script, flags, environment(), processes)
    assert set(ended.exit_codes) == {0}, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


def check_shown(shown: str, printed: list[str]) -> None:
    """Checks that each shown line, up to its numbers and `...`, is a line of what was printed."""
    for line in filter(str.strip, shown.splitlines()):
        assert any(matches(line, one) for one in printed), f"{line}\nis not in\n" + "\n".join(printed)


def matches(shown: str, printed: str) -> bool:
    """Whether a printed line has the text of a shown line."""
    parts = re.split(rf"(\.\.\.|{NUMBER}|\s+)", shown.strip())
    pattern = "".join(_pattern_of(part) for part in parts if part)
    return re.fullmatch(pattern, printed.strip()) is not None


def _pattern_of(part: str) -> str:
    if part == "...":
        return ".*"
    if part.isspace():
        return r"\s+"
    return NUMBER if re.fullmatch(NUMBER, part) else re.escape(part)
