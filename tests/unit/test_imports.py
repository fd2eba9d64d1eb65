"""Imports between packages point down. `megatron.testing` is what tests and benchmarks share."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT

TESTING = ROOT / "megatron" / "testing"
FORBIDDEN = {
    "tests": ("benchmarks",),
    "benchmarks": ("tests",),
    "megatron/testing": ("tests", "benchmarks"),
    "megatron": ("tests", "benchmarks", "megatron.testing"),
    "tools": ("tests", "benchmarks", "megatron.testing"),
}
# The packages and modules of `megatron`, from the lowest. Each imports those of lower levels only.
LEVELS = (
    ("text_table", "units", "config"),
    ("files", "kernels"),
    ("mapped_file",),
    ("mpu", "page", "pipeline", "tokenizer"),
    ("data", "model", "optimizer"),
    ("engine", "planner"),
    ("checkpoint", "cluster"),
    ("training",),
    ("simulation",),
    ("sweep",),
    ("testing",),
)


def imported_modules(path: Path) -> Iterator[str]:
    """The full name of every module that a file imports; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_no_test_code_that_is_not_shared_with_it(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    if folder == "megatron":
        files = [path for path in files if TESTING not in path.parents]
    assert files
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imported_modules(path)
        if any(f"{module}.".startswith(f"{name}.") for name in FORBIDDEN[folder])
    ]
    assert found == []


def test_every_package_has_a_level() -> None:
    package = ROOT / "megatron"
    names = [path.stem for path in package.iterdir() if path.stem not in ("__init__", "__pycache__")]
    assert sorted(names) == sorted(name for level in LEVELS for name in level)


@pytest.mark.parametrize("package", [name for level in LEVELS for name in level])
def test_imports_of_a_package_point_down(package: str) -> None:
    """Imports inside functions and for type checking are included."""
    (level,) = (index for index, names in enumerate(LEVELS) if package in names)
    allowed = {package, *(name for names in LEVELS[:level] for name in names)}
    path = ROOT / "megatron" / package
    files = list(path.rglob("*.py")) or [path.with_suffix(".py")]
    found = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imported_modules(file)
        if module.startswith("megatron.") and module.split(".")[1] not in allowed
    ]
    assert found == []
