"""The commands of the documentation are accepted by the parsers of the programs that they start."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron.arguments import read_command_line
from megatron.config import ConfigError
from megatron.config.flag_parser import make_parser
from megatron.planner.command import RunFlagsParser
from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "slurm" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md")
PAGES += sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PYTHON = ".venv/bin/python"
LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")


def commands_of(page: Path) -> list[str]:
    """Returns the commands in `bash` blocks and in indented paragraphs that run Python. Lines that end with a
    backslash are joined."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fenced = [line for block in blocks for line in block.splitlines() if line.strip()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return fenced + re.findall(r"^ {4}(\S*python3? .*)$", prose, re.MULTILINE)


COMMANDS = [
    pytest.param(page, command, id=f"{page.relative_to(ROOT)}: {' '.join(command.split()[:3])}")
    for page in PAGES
    for command in commands_of(page)
]


def parse(words: list[str]) -> None:
    """Parses the words after the interpreter as the program does. An error is raised as an exception."""
    if words[:1] == ["-u"]:
        words = words[1:]
    if words[0] == "-m":
        module, words = words[1], words[2:]
        if module in LAUNCHERS:
            launched = get_args_parser().parse_args(words)
            parse([launched.training_script, *launched.training_script_args])
        elif words:
            parse_as_main(module, words)
        else:
            assert importlib.util.find_spec(module), f"there is no {module}"
        return
    program, *flags = words
    assert (ROOT / program).is_file(), f"there is no {program}"
    if program == "pretrain_gpt.py":
        make_parser().parse_args(flags)
        if "--dry-run" in flags:
            read_command_line(flags, {})
    elif program.startswith("tools/"):
        tool = importlib.import_module("megatron.commands." + Path(program).stem).build_parser()
        parsed = tool.parse_args(flags)
        if isinstance(tool, RunFlagsParser):
            parsed.mistakes.raise_all()
            make_parser().parse_args(parsed.training)
    else:
        source = (ROOT / program).read_text()
        flags = [flag for flag in flags if flag.startswith("--")]
        if "parse_known_args" in source:  # further words are flags of a run
            flags = [flag for flag in flags if flag not in make_parser()._option_string_actions]
        assert all(f'"{flag}"' in source for flag in flags)


def parse_as_main(module: str, words: list[str]) -> None:
    """Runs the module's `main` up to the end of its `parse_args`."""

    class Parsed(Exception):
        pass

    real = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser) -> None:
        real(parser)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_documented_command_is_accepted_by_its_parser(page: Path, command: str) -> None:
    if "$FLAGS" in command:
        assert "`$FLAGS`" in page.read_text(), "the page does not explain $FLAGS"
        command = command.replace("$FLAGS", shlex.join([*MODEL, *ABSOLUTE, *SHORT]))
    words = shlex.split(re.sub(r"\$\w+", "1", command.partition(" > ")[0]))
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] in ("sbatch", "bash"):
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] == PYTHON, f"expected {PYTHON}, got {words[0]}"
        parse([word for word in words[1:] if word != "--help"])


@pytest.mark.parametrize(
    "command",
    ["tools/generate.py --laod x", "pretrain_gpt.py --hiden-size 8", "-m megatron.cluster.diagnosis x"],
)
def test_an_unknown_flag_or_a_missing_argument_is_found(command: str) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        parse(shlex.split(command))
