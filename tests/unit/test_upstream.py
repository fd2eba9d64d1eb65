"""The patches of docs/upstream apply to the installed DeepSpeed. Their tests pass with the patches, and fail
without them."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest

from megatron.engine import workarounds
from tests.end_to_end.command import ROOT

UPSTREAM = ROOT / "docs" / "upstream"
PATCHES = sorted(UPSTREAM.glob("*.patch"))
INSTALLED = Path(deepspeed.__file__).parent


def changed_files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def copy_of_deepspeed(folder: Path) -> Path:
    """Returns a package `deepspeed` in `folder` with copies of the files that a patch changes, and links to
    all others."""
    changed = {name for patch in PATCHES for name in changed_files(patch) if name.startswith("deepspeed/")}
    for name in changed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED.parent / name, folder / name)
    for parent in {folder / path for name in changed for path in Path(name).parents if path.name}:
        for entry in (INSTALLED.parent / parent.relative_to(folder)).iterdir():
            if entry.name != "__pycache__" and not (parent / entry.name).exists():
                (parent / entry.name).symlink_to(entry)
    return folder


def apply(patch: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The folder is outside of a git repository, so paths are relative to it.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(
        ["git", "apply", "-v", *options, str(patch)], cwd=folder, env=env, capture_output=True, text=True
    )


def failed_tests(folder: Path) -> tuple[set[str], int]:
    """Returns the test files that fail with the package in `folder`, and the number of tests that pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    run = subprocess.run(
        [*command, "--continue-on-collection-errors", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    failed = set(re.findall(r"^FAILED \S*?(test_\w+\.py)::", run.stdout, re.MULTILINE))
    passed = re.search(r"(\d+) passed", run.stdout)
    assert failed or passed, run.stdout + run.stderr
    return failed, int(passed[1]) if passed else 0


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_to_the_installed_version(patch: Path, tmp_path: Path) -> None:
    checked = apply(patch, copy_of_deepspeed(tmp_path), "--check")
    assert checked.returncode == 0, checked.stderr
    assert "Skipped patch" not in checked.stderr
    assert any(name.startswith("tests/unit/") for name in changed_files(patch))


@pytest.mark.full
def test_the_tests_of_the_patches_pass_with_them_and_fail_without(tmp_path: Path) -> None:
    folder = copy_of_deepspeed(tmp_path)
    for patch in PATCHES:
        applied = apply(patch, folder)
        assert applied.returncode == 0, applied.stderr
    names = {Path(name).name for patch in PATCHES for name in changed_files(patch) if "/test_" in name}
    assert len(names) == len(PATCHES) == 3
    failed, passed = failed_tests(folder)
    assert failed == set() and passed >= 10
    for name in {name for patch in PATCHES for name in changed_files(patch) if name.startswith("deepspeed/")}:
        shutil.copy(INSTALLED.parent / name, folder / name)
    assert failed_tests(folder)[0] == names


def test_the_page_lists_every_patch_and_the_version() -> None:
    page = (UPSTREAM / "README.md").read_text()
    assert all(f"[{patch.name}]({patch.name})" in page for patch in PATCHES)
    assert f"DeepSpeed {deepspeed.__version__}" in page


def test_workarounds_and_what_refers_to_them_agree() -> None:
    described = inspect.getdoc(workarounds) or ""
    removed = {
        int(number)
        for numbers in re.findall(r"^([\d, ]+)\. Removed", described, re.MULTILINE)
        for number in numbers.split(", ")
    }
    entries = {int(number) for number in re.findall(r"^(\d+)\. ", described, re.MULTILINE)} - removed
    assert entries | removed == set(range(1, max(entries) + 1))
    code = inspect.getsource(workarounds).split('"""', 2)[2]
    code += (ROOT / "tests" / "distributed" / "test_workarounds.py").read_text()
    page = (UPSTREAM / "README.md").read_text()
    referred = {int(number) for number in re.findall(r"[Ee]ntry (\d+)", code + page)}
    assert referred <= entries, "a reference to an entry that does not exist"
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for path in re.findall(r"tests/[\w/]+\.py", described):
        assert ROOT / path in files, f"workarounds.py names {path}, which does not exist"
    for name in re.findall(r"\b(test_\w+)(?!\.py|\w)", described):
        assert any(f"def {name}(" in text for text in files.values()), f"workarounds.py names {name}: no test"
