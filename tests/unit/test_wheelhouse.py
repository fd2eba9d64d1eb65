"""Runs make wheelhouse and make setup WHEELHOUSE=... without a network: small wheels replace the packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Collection, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.make import ROOT, make

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
CUDA = {"torch", "triton", "nvidia-cudnn-cu13"}
BUILD = {"setuptools", "wheel"}


def names_of(requirements: Collection[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def needed(*extras: str) -> set[str]:
    """Returns the packages that a node with PyTorch needs."""
    requirements = [r for extra in extras for r in PROJECT["optional-dependencies"][extra]]
    return (names_of([*PROJECT["dependencies"], *requirements]) | BUILD | {"backport"}) - CUDA


def write_wheel(folder: Path, name: str, tag: str = "py3-none-any", requires: Sequence[str] = ()) -> None:
    """Writes a wheel with one empty module, in the version of constraints.txt."""
    version, module = PINNED.get(name, "1.0"), name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(folder / f"{module}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
        if name in BUILD:  # the editable installation runs them
            for file in distribution(name).files or ():
                if not file.parts[0].endswith((".dist-info", "..")) and file.suffix != ".pyc":
                    wheel.write(str(file.locate()), str(file))
            wheel.writestr(f"{info}/entry_points.txt", distribution(name).read_text("entry_points.txt") or "")
        else:
            wheel.writestr(f"{module}/__init__.py", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of wheels that pip uses as its only index."""
    folder = tmp_path_factory.mktemp("index")
    for name in (needed("bitsandbytes", "objectstore") | CUDA) - {"regex", "backport"}:
        requires = {
            "torch": ["nvidia-cudnn-cu13", "triton"],
            "transformers": ["torch>=2.4", "backport; python_version < '3.12'"],
        }
        write_wheel(folder, name, requires=requires.get(name, ()))
    write_wheel(folder, "backport")
    for number in (11, 12):
        tag = f"cp3{number}-cp3{number}-manylinux_2_17_x86_64.manylinux2014_x86_64"
        write_wheel(folder, "regex", tag)
    return folder


def collect(index: Path, folder: Path, *words: str) -> tuple[set[str], str]:
    """Runs the script of make wheelhouse. Returns the names of the packages that it collects, and its
    output."""
    command = [sys.executable, ".ci/wheelhouse.py", str(folder), *words]
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    env["PIP_NO_BUILD_ISOLATION"] = "0"  # sets the option --no-build-isolation
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0].replace("_", "-") for path in folder.iterdir()}, done.stdout


@pytest.mark.full
def test_the_wheelhouse_has_what_the_package_requires_but_no_torch(index: Path, tmp_path: Path) -> None:
    words = ("--python-version", "3.11", "--extras", "bitsandbytes")
    names, printed = collect(index, tmp_path, *words)
    assert names == needed("bitsandbytes")
    assert f"{len(names)} wheels" in printed and "Python 3.11" in printed
    assert len(list(tmp_path.glob("regex-*-cp311-cp311-*.whl"))) == 1


@pytest.mark.full
def test_the_wheelhouse_is_for_the_nodes_python_and_extras(index: Path, tmp_path: Path) -> None:
    """Markers are evaluated for the node's Python, and compiled wheels match it."""
    words = ("--python-version", "3.12", "--extras", "bitsandbytes,objectstore", "--torch")
    names, _ = collect(index, tmp_path, *words)
    assert names == (needed("bitsandbytes", "objectstore") | CUDA) - {"backport"}
    assert [path.name.split("-")[2] for path in tmp_path.glob("regex-*")] == ["cp312"]


# Replaces pip: prints the command, the wheels that the script has written, and the markers' values.
PIP = """import os, platform, sys
options = "--find-links", "--wheel-dir"
(folder,) = [word for option, word in zip(sys.argv, sys.argv[1:]) if option in options]
print(*sys.argv[1:], *sorted(os.listdir(folder)), platform.python_version(), platform.machine())
"""


@pytest.mark.parametrize(
    ("words", "builds", "downloads"),
    [
        (
            ("--python-version", "3.11", "--extras", "bitsandbytes"),
            r"deepspeed torch-\S+\+node\S+ triton-",
            rf"--python-version 3\.11 .*{ROOT}\[bitsandbytes\] torch-\S+\+node\S+ triton-\S+ 3\.11\.0 x86_64",
        ),
        (
            ("--python-version", "3.12", "--extras", "eval", "--torch", "--machine", "aarch64"),
            r"deepspeed rouge-score sqlitedict word2number [\d.]+ ",
            rf"--python-version 3\.12 .*_2_28_aarch64.*{ROOT}\[eval\] 3\.12\.0 aarch64",
        ),
    ],
    ids=["beside torch", "with torch, for Arm"],
)
def test_pip_is_asked_for_the_nodes_wheels(
    words: tuple[str, ...], builds: str, downloads: str, tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    command = [sys.executable, ".ci/wheelhouse.py", str(tmp_path), *words]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    wheel, download, _ = subprocess.check_output(command, cwd=ROOT, env=env, text=True).splitlines()
    assert wheel.startswith("wheel ") and re.search(builds, wheel)
    assert download.startswith("download ") and re.search(downloads, download)


def test_a_wheelhouse_for_no_python_version_is_refused() -> None:
    command = [sys.executable, ".ci/wheelhouse.py", "unused", "--python-version", "312"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "PYTHON_VERSION 312: expected a version such as 3.12" in done.stderr


def test_make_collects_the_wheelhouse_without_the_environment_of_the_run() -> None:
    printed = make("--dry-run", "wheelhouse", "PYTHON_VERSION=3.12", "PLATFORM=aarch64", "TORCH=1")
    command = re.sub(r"\s+", " ", printed.replace("\\\n", ""))
    assert ".ci/wheelhouse.py wheelhouse --extras 'bitsandbytes' --torch --python-version 3.12" in command
    assert "--machine aarch64" in command and ".venv" not in command
    assert subprocess.run(["git", "check-ignore", "-q", "wheelhouse/x"], cwd=ROOT).returncode == 0


def test_setup_from_a_wheelhouse_asks_no_index() -> None:
    printed = make("--dry-run", "setup", "WHEELHOUSE=w", "VENV=/nonexistent")
    assert "-m venv --system-site-packages /nonexistent" in printed and "'.[bitsandbytes]'" in printed
    installs = [part for part in re.split(r"\n|\|\|", printed) if "pip install" in part]
    assert installs and all("--no-index --find-links w " in part for part in installs)


@pytest.mark.full
@pytest.mark.parametrize("node_has", ["torch", "no torch"])
def test_setup_installs_from_a_wheelhouse(node_has: str, index: Path, tmp_path: Path) -> None:
    """The node's torch stays, although its version differs from the pinned version."""
    clone, node, wheels = tmp_path / "clone", tmp_path / "node", tmp_path / "wheels"
    clone.mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copy(ROOT / "pretrain_gpt.py", clone)
    (clone / "megatron").mkdir()
    (clone / "megatron" / "__init__.py").write_text('__version__ = "1.0"\n')
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    has_torch = node_has == "torch"
    collect(index, wheels, "--extras", "bitsandbytes", *([] if has_torch else ["--torch"]))
    site = (
        node / "lib" / f"python{version}" / "site-packages"
    )  # what the environment sees beside its own folder
    if has_torch:
        info = site / "torch-2.99.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").touch()
    env = {"PYTHONUSERBASE": str(node), "PYTHONPATH": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    make("setup", f"WHEELHOUSE={wheels}", f"PYTHON={sys.executable}", folder=clone, **env)
    packages = ("torch", "deepspeed", "paritron")
    program = f"from importlib.metadata import version; print(*map(version, {packages}))"
    command = [clone / ".venv" / "bin" / "python", "-c", program]
    versions = subprocess.check_output(command, cwd=tmp_path, env={**os.environ, **env}, text=True).split()
    assert versions == ["2.99.0" if has_torch else PINNED["torch"], PINNED["deepspeed"], "1.0"]
