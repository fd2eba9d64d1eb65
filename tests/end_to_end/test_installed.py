"""Installs a wheel of the package outside of the checkout. Checks its files and commands, and trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from megatron import __version__
from tests.end_to_end.command import ROOT, environment
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT
from tests.support import HANG_TIMEOUT_S

SOURCES = ("megatron", "pretrain_gpt.py", "pyproject.toml", "setup.py", "README.md", "LICENSE")
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("[a-z]*.py"))
COMMANDS = ["megatron-pretrain-gpt", *(f"megatron-{name.replace('_', '-')}" for name in TOOLS)]


def execute(*words: object, cwd: Path) -> str:
    """Runs a program. Returns what it printed. Fails the test if the program fails."""
    ended = subprocess.run(
        [str(word) for word in words],
        **{"cwd": cwd, "env": environment(), "capture_output": True, "text": True, "timeout": HANG_TIMEOUT_S},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel as `make dist` does; returns its path.

    It is built in a copy, because setuptools writes beside the sources and reads an older build.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    recipe = (ROOT / "Makefile").read_text().partition("\ndist: setup\n")[2].partition("\n\n")[0]
    execute("bash", "-ec", recipe.replace("$(VENV)/bin/python", sys.executable), cwd=folder)
    (path,) = (folder / "dist").glob("*.whl")
    assert (folder / "dist" / f"paritron-{__version__}.tar.gz").is_file()
    return path


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the programs of an environment with the wheel, which sees this environment's packages but not
    the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    execute(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    own = execute(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # Python does not read a .pth file that it finds through a second .pth file, such as an editable
    # installation's.
    (Path(own.strip()) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    execute(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", "--ignore-installed", wheel),
        cwd=folder,
    )
    return python.parent


def test_the_wheel_has_all_files_of_the_package_and_no_others(wheel: Path) -> None:
    assert wheel.name.startswith(f"paritron-{__version__}-")
    packed = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    files = [path for path in (ROOT / "megatron").rglob("*") if path.is_file()]
    tracked = [str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"]
    assert sorted(packed) == sorted([*tracked, "pretrain_gpt.py"])


def test_every_command_is_installed_and_prints_its_help(programs: Path, tmp_path: Path) -> None:
    load = (
        "import sys; from importlib.metadata import distribution\n"
        "for command in distribution('paritron').entry_points:\n"
        "    sys.argv = [command.name, '--help']\n"
        "    try: command.load()()\n"
        "    except SystemExit as end: assert not end.code, command\n"
        # Importing dynamo would double the time of every start.
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    printed = execute(programs / "python", "-c", load, cwd=tmp_path)
    for command in COMMANDS:
        assert (programs / command).is_file()
        assert f"usage: {command}" in printed
    assert "megatron-plan --search" in printed and "python tools/" not in printed


def test_an_installed_wheel_trains_resumes_and_generates(
    programs: Path, data: list[str], tmp_path: Path
) -> None:
    package = execute(programs / "python", "-c", "import megatron; print(*megatron.__path__)", cwd=tmp_path)
    assert Path(package.strip()).is_relative_to(programs.parent)
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--save", "checkpoints", "--load", "checkpoints"]
    flags += ["--save-interval", "3", "--exit-interval", "3"]
    printed = execute(programs / "megatron-pretrain-gpt", *flags, cwd=tmp_path)
    assert "iteration        3/       5" in printed
    launch = [programs / "python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    layout = ["--pipeline-model-parallel-size", "2"]
    printed = execute(*launch, "-m", "pretrain_gpt", *flags, *layout, cwd=tmp_path)
    assert "iteration        4/       5" in printed and "iteration        5/       5" in printed
    generate = [programs / "megatron-generate", "--load", "checkpoints", "--prompt", "def main("]
    assert execute(*generate, "--max-new-tokens", "4", cwd=tmp_path).startswith("def main(")
