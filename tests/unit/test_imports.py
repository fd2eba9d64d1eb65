"""Packages import only lower packages. Tests and benchmarks share `tests.support`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT

SHARED = "tests.support"
FORBIDDEN = {
    "tests/support": ("tests", "benchmarks"),
    "benchmarks": ("tests",),
    "megatron": ("tests", "benchmarks"),
    "tools": ("tests", "benchmarks"),
}
"""Folder -> packages that it must not import. Benchmarks may import the shared part of the tests."""
# The packages and modules of `megatron`, from the lowest level. Each imports only packages of lower levels. A
# training run does not import the highest two levels, which plan a run and contain the other programs.
LEVELS = (
    ("torch_versions",),
    ("child_processes", "errors", "shares", "text_table", "units"),
    ("config",),
    ("deepspeed_names", "files", "kernels"),
    ("mapped_file", "object_store"),
    ("mpu", "tokenizer"),
    ("data", "model", "optimizer"),
    ("pipeline",),
    ("run",),
    ("engine",),
    ("checkpoint", "cluster"),
    ("arguments",),
    ("training",),
    ("planner",),
    ("commands",),
)


def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yields the full name of every module that a program imports. `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_no_test_code_that_is_not_shared_with_it(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    allowed = SHARED if folder in ("benchmarks", "tests/support") else None
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imported_modules(parse(path))
        if any(f"{module}.".startswith(f"{name}.") for name in FORBIDDEN[folder])
        and not (allowed and f"{module}.".startswith(f"{allowed}."))
    ]
    assert found == []


def test_what_a_test_imports_exists_also_in_functions_that_the_gate_does_not_run() -> None:
    """Checks the names of `megatron`, `tests` and `benchmarks` that tests and benchmarks import. The files of
    tests/reference also run with other programs, which have a package `megatron`, too."""
    known: dict[Path, set[str]] = {}

    def names_in(path: Path) -> set[str]:
        if path not in known:
            nodes = [*ast.walk(parse(path))]
            known[path] = {node.id for node in nodes if isinstance(node, ast.Name)}
            known[path] |= {
                getattr(node, "name", None) or "" for node in nodes
            }  # functions, classes, imports
        return known[path]

    missing = []
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for module in imported_modules(parse(path)) if path.parent.name != "reference" else ():
            parent, _, name = module.rpartition(".")
            if parent.partition(".")[0] not in ("megatron", "tests", "benchmarks"):
                continue
            place = ROOT.joinpath(*parent.split("."))
            files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
            is_module = (place / name).is_dir() or (place / f"{name}.py").is_file()
            if not is_module and not any(name in names_in(file) for file in files):
                missing.append(f"{path.relative_to(ROOT)}: {module}")
    assert not missing


def files_of(package: str) -> list[Path]:
    """Returns the files of a package or module of `megatron`."""
    path = ROOT / "megatron" / package
    return list(path.rglob("*.py")) or [path.with_suffix(".py")]


def test_every_package_has_a_level() -> None:
    package = ROOT / "megatron"
    # A folder without modules is what git leaves of a package that moved: its __pycache__.
    paths = [path for path in package.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]
    names = [path.stem for path in paths if path.stem != "__init__"]
    assert sorted(names) == sorted(name for level in LEVELS for name in level)


@pytest.mark.parametrize("package", [name for level in LEVELS for name in level])
def test_imports_of_a_package_point_down(package: str) -> None:
    """Imports inside functions and for type checking are included."""
    (level,) = (index for index, names in enumerate(LEVELS) if package in names)
    allowed = {package, *(name for names in LEVELS[:level] for name in names)}
    files = files_of(package)
    found = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imported_modules(parse(file))
        if module.startswith("megatron.") and module.split(".")[1] not in allowed
    ]
    assert found == []


def modules_imported(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yields the modules that a program imports when it runs: including inside functions, but not for type
    checking."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (name if name in modules else name.rpartition(".")[0] for name in imported_modules(node))
            yield from (name for name in names if name in modules)
        else:
            yield from modules_imported(node, modules)


def test_no_module_imports_itself_through_others() -> None:
    """Each round removes the modules that import no remaining module, then the modules that no remaining
    module imports. A cycle would remain."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / "megatron").rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}
    rest = {name: set(modules_imported(parse(path), modules)) - {name} for name, path in modules.items()}
    assert sum(map(len, rest.values())) > len(rest)
    while free := {name for name, imported in rest.items() if imported.isdisjoint(rest)}:
        rest = {name: imported for name, imported in rest.items() if name not in free}
    while unused := rest.keys() - set().union(*rest.values()):
        rest = {name: imported for name, imported in rest.items() if name not in unused}
    assert sorted(rest) == []


def test_a_training_run_names_no_module_that_plans() -> None:
    """Strings, from which a module could be imported, and comments are searched, too."""
    found = {
        str(file.relative_to(ROOT)): names
        for level in LEVELS[:-2]
        for package in level
        for file in files_of(package)
        if (names := re.findall(r"megatron\.planner\b[\w.]*", file.read_text()))
    }
    assert found == {}


def test_the_program_imports_no_module_that_plans_except_in_a_dry_run_and_to_partition_by_memory() -> None:
    tree = parse(ROOT / "pretrain_gpt.py")
    branches: list[ast.If | ast.FunctionDef] = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and ast.unparse(node.test).endswith(".training.dry_run"))
        or (isinstance(node, ast.FunctionDef) and node.name == "predict_memory")
    ]
    assert len(branches) == 2
    for node in branches:
        assert any("megatron.planner" in packages_imported(part) for part in node.body)
    for node in branches:
        node.body = []
    assert "megatron.planner" not in packages_imported(tree)


def packages_imported(tree: ast.AST) -> set[str]:
    """Returns the first two parts of the names of the modules that are imported in a part of a program."""
    return {".".join(module.split(".")[:2]) for module in imported_modules(tree)}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "megatron" / "commands").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_every_command_starts_as_a_module(path: Path) -> None:
    """Without this, `python -m megatron.commands.NAME` in a job script would do nothing and exit with code
    0."""
    last = ast.parse(path.read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"
    assert "main()" in ast.unparse(last)


def test_a_tool_needs_no_folder_on_the_search_path() -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, ROOT / "tools" / "job_report.py", "--help"]
    assert b"usage: job_report.py" in subprocess.run(command, env=environment, capture_output=True).stdout
