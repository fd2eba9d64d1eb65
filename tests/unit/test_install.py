"""The documented installations use published builds of PyTorch. Unusable GPUs are an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from megatron.arguments import parse_args
from megatron.cluster import processes
from megatron.cluster.devices import MIN_DRIVER, check_gpus
from megatron.errors import UserError
from tests.support.make import ROOT, make, run_make
from tests.unit.config.command_lines import SMALL

# PyTorch's version -> index below https://download.pytorch.org/whl -> cuDNN of that build. Source: "Release
# Compatibility Matrix" in pytorch/pytorch's RELEASE.md.
PUBLISHED = {
    "2.11": {"cpu": "", "cu126": "9.10.2", "cu128": "9.17.1", "cu130": "9.17.1"},
    "2.12": {"cpu": "", "cu126": "9.10.2", "cu130": "9.20.0", "cu132": "9.20.0"},
    "2.13": {"cpu": "", "cu126": "9.10.2", "cu130": "9.20.0", "cu132": "9.20.0"},
    "2.14": {"cpu": "", "cu126": "9.10.2", "cu130": "9.24.0", "cu132": "9.24.0"},
}
# The build on PyPI for Linux. Source: the requirement of cuda-toolkit in the METADATA of its x86-64 wheels.
ON_PYPI = {"2.11": "cu130", "2.12": "cu130", "2.13": "cu130", "2.14": "cu130"}
# Each text from which a user installs. The log and the changelog describe earlier builds.
PATHS = [
    ROOT / name for name in ("README.md", "Dockerfile", "Makefile", "CONTRIBUTING.md", "constraints.txt")
]
PATHS += sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "LOG.md")
PATHS += [*(ROOT / "examples").rglob("*.sh"), *(ROOT / "examples").rglob("*.md"), *(ROOT / ".ci").iterdir()]
INSTALL = (ROOT / "docs" / "cluster.md").read_text().partition("\n## Install\n")[2].partition("\n#")[0]


def pinned_minor() -> str:
    """Returns the minor version of PyTorch in constraints.txt."""
    (minor,) = re.findall(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return minor


def builds_asked_for(text: str) -> set[str]:
    """Returns the builds ('cu126') that a text names as an index, a setting, an image or a CUDA version."""
    names = re.findall(r"download\.pytorch\.org/whl/(\w+)|\bGPU=(cu\w+)|\b(cu1\d\d)\b", text)
    versions = re.findall(r"nvidia/cuda:(\d+)\.(\d+)|\bCUDA (\d+)\.(\d+)", text)
    return {next(filter(None, found)) for found in names} | {
        "cu" + "".join(filter(None, found)) for found in versions
    }


def unpublished(text: str, minor: str) -> set[str]:
    """Returns the builds that a text names and that PyTorch has not published in the version `minor`."""
    return builds_asked_for(text) - PUBLISHED[minor].keys()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_asks_only_for_published_builds(path: Path) -> None:
    minor = pinned_minor()
    assert not unpublished(path.read_text(), minor), f"not published for PyTorch {minor}"
    assert set(re.findall(r"\btorch==(\d+\.\d+)\.", path.read_text())) <= {minor}


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("pip install torch --index-url https://download.pytorch.org/whl/cu128", "cu128"),
        ("make setup GPU=cu118", "cu118"),
        ("FROM nvidia/cuda:12.8.1-devel-ubuntu24.04", "cu128"),
        ("PyTorch for CUDA 12.8", "cu128"),
    ],
)
def test_a_build_that_was_not_published_is_found(text: str, build: str) -> None:
    assert unpublished(text, "2.13") == {build}


def test_the_table_of_builds_is_that_of_the_pinned_version() -> None:
    published = PUBLISHED[pinned_minor()]
    row = r"^\| .*? \| (\d+) or newer \| `make setup GPU=(\w+)` \| (.*?) \| (\S+) \| (\S+) \|$"
    rows = re.findall(row, INSTALL, re.MULTILINE)
    assert [row[1] for row in rows] == ["1", "cu126"]
    for driver, variable, index, cuda, cudnn in rows:
        build = ON_PYPI[pinned_minor()] if index == "PyPI" else index.strip("`").rpartition("/")[2]
        assert variable in ("1", build) and build == "cu" + cuda.replace(".", "")
        assert int(driver) == MIN_DRIVER[cuda.partition(".")[0]]
        assert published[build].rpartition(".")[0] == cudnn


def test_the_readme_and_the_dockerfile_name_the_driver_of_the_default_build() -> None:
    cuda = ON_PYPI[pinned_minor()][2:4]
    for name in ("README.md", "Dockerfile"):
        text = " ".join((ROOT / name).read_text().split())
        assert f"driver {MIN_DRIVER[cuda]} or newer (CUDA {cuda})" in text.replace("driver is", "driver")


# --- make setup ---


@pytest.mark.parametrize(
    ("variables", "installs"),
    [
        ([], "--force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"),
        (["GPU=1"], "--force-reinstall torch"),
        (["GPU=cu126"], "--force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
    ],
)
def test_setup_installs_the_build_that_was_asked_for(variables: list[str], installs: str) -> None:
    (line,) = re.findall(
        r"^.*--no-deps.*$", make("--dry-run", "setup", "VENV=/nonexistent", *variables), re.MULTILINE
    )
    assert line.strip().endswith(installs)
    assert ("--no-index" in line) == (not variables)  # a CPU build from find-links comes first


def test_setup_removes_the_distribution_with_the_old_name_before_it_installs_the_new_one() -> None:
    """Both distributions install files of the same names. A later removal of the old distribution would
    delete the new commands."""
    printed = make("--dry-run", "setup", "VENV=/nonexistent")
    before, found, _ = printed.partition("--editable")
    assert found and "pip uninstall -qq --yes megatron-gpt-pretraining" in before


def stub_python(venv: Path, reaction: str) -> str:
    """Writes a program that replaces an environment's Python and logs its commands. Returns the setting for
    make."""
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >>{venv}/log\ncase "$*" in {reaction};; esac\n')
    program.chmod(0o755)
    return f"VENV={venv}"


SEES_NO_TORCH = "*sys.prefix*) exit 1"
OTHER_VERSIONS = "--what-if=constraints.txt"


@pytest.mark.parametrize(
    ("before", "command", "torch_of", "extras"),
    [
        (["GPU=1"], "", None, None),
        (["GPU=1"], OTHER_VERSIONS, "--no-deps torch", "dev,bitsandbytes"),
        (["GPU=1", "GPU=cu126"], "GPU=1", "--no-deps --force-reinstall torch", "dev,bitsandbytes"),
        (["GPU=1"], "GPU=0", "--no-deps --force-reinstall torch --no-index", "dev,bitsandbytes"),
        (["GPU=0"], "", None, None),
        (["GPU=1 EXTRAS=eval"], OTHER_VERSIONS, "--no-deps torch", "eval"),
        (["GPU=1 EXTRAS=eval"], "EXTRAS=dev", None, "dev"),
        (["WHEELHOUSE=w"], "", None, None),
        (["WHEELHOUSE=w"], OTHER_VERSIONS, "--no-index --find-links w --no-deps torch", "bitsandbytes"),
        (["EXTRAS=dev"], "WHEELHOUSE=w", None, "bitsandbytes"),
    ],
)
def test_later_commands_keep_what_was_set_up(
    before: list[str], command: str, torch_of: str | None, extras: str | None, tmp_path: Path
) -> None:
    venv = stub_python(tmp_path / "venv", SEES_NO_TORCH)
    for words in before:
        make("setup", venv, *words.split())
    log = tmp_path / "venv" / "log"
    log.unlink()
    make("setup", venv, *command.split())
    commands = log.read_text() if log.exists() else ""
    (torch_line,) = re.findall(r".*--no-deps.*", commands) or [None]
    assert torch_line == torch_of or torch_line.rstrip().endswith(torch_of)
    assert re.findall(r"--editable \.\[(.*)\]", commands) == ([extras] if extras else [])
    wheelhouse = make("--dry-run", "wheelhouse", venv)
    assert "--extras 'bitsandbytes'" in wheelhouse and ".ci/wheelhouse.py wheelhouse" in wheelhouse


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_build_without_cuda_is_an_error_with_gpu(cuda: str | None, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0+cpu'\ncuda = {cuda!r}\n")
    venv = stub_python(tmp_path / "venv", f'-c*) exec {sys.executable} "$@"')
    done = run_make("setup", "GPU=1", venv, PYTHONPATH=str(tmp_path))
    message = "error: GPU=1: expected a PyTorch with CUDA, found 2.13.0+cpu."
    assert (done.returncode != 0) == (message in done.stderr) == (cuda is None), done.stderr


def test_a_node_without_a_visible_torch_is_told_the_remedies(tmp_path: Path) -> None:
    venv = stub_python(tmp_path / "venv", f"{SEES_NO_TORCH};; *--no-deps*) exit 1")
    done = run_make("setup", "WHEELHOUSE=w", venv)
    assert done.returncode != 0 and "error: neither w nor python3 has PyTorch." in done.stderr
    assert "VENV=/opt/venv" in done.stderr and "make wheelhouse TORCH=1" in done.stderr


def test_the_image_copies_nothing_that_git_ignores() -> None:
    ignored, left_out = (
        {line.removeprefix("**/").strip("/") for line in (ROOT / name).read_text().splitlines()}
        for name in (".gitignore", ".dockerignore")
    )
    assert ignored | {".git"} == left_out


# --- GPUs that cannot be used ---


@pytest.fixture
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Patches PyTorch to be a CUDA build without usable GPUs. Returns the files of a machine with two
    GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return {"devices": tmp_path, "driver_file": tmp_path / "version"}


# Driver's version -> lines of /proc/driver/nvidia/version.
DRIVERS = {
    "535.104.05": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
    "570.86.15": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
    "an unknown one": "",
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_that_is_too_old_is_an_error(driver: str, old_driver: dict[str, Path]) -> None:
    old_driver["driver_file"].write_text(f"{DRIVERS[driver]}\nGCC version:  gcc 11.4.0\n")
    with pytest.raises(UserError) as error:
        check_gpus({"SLURMD_NODENAME": "n7"}, **old_driver)
    needs = f"CUDA 13.0 needs driver {MIN_DRIVER['13']} or newer, found {driver}."
    assert "2 NVIDIA GPU(s) of n7" in str(error.value) and needs in str(error.value)


@pytest.mark.parametrize(
    "env", [{"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}]
)
def test_the_cpu_may_be_chosen(env: dict[str, str], old_driver: dict[str, Path]) -> None:
    check_gpus(env, **old_driver)


def test_a_machine_without_gpus_and_a_cpu_build_use_the_cpu(
    old_driver: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old_driver["devices"].joinpath("nvidia0").unlink()
    check_gpus({"CUDA_VISIBLE_DEVICES": "0"}, **{**old_driver, "devices": old_driver["devices"] / "none"})
    monkeypatch.setattr(torch.version, "cuda", None)
    check_gpus({}, **old_driver)


def test_a_gpu_that_can_be_used_is_no_error(
    old_driver: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_gpus({}, **old_driver)


def test_a_run_checks_its_gpus_before_it_connects(
    old_driver: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "check_gpus", lambda: check_gpus({}, **old_driver))
    with pytest.raises(UserError, match="cannot use the 2 NVIDIA GPU"):
        processes.connect(parse_args(SMALL, {}))
