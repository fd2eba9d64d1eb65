"""Tests the names that differ between versions of torch and Triton, and that all private names are listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch

from megatron import torch_versions
from megatron.cluster.exit_codes import exit_on_error
from megatron.cluster.rank_reports import RankReport
from megatron.engine import device_progress
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import exit_on_user_error
from megatron.kernels import operators, selection
from megatron.model.pipeline_module import GPTModelPipe
from megatron.planner.simulation import processes
from megatron.planner.simulation.device import _with_all_heads
from megatron.torch_versions import OPTIONAL, REQUIRED
from tests.end_to_end.command import ROOT

LIBRARIES = ("torch", "triton", "deepspeed")
SOURCES = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *ROOT.glob("*.py")]
# Private attributes of argparse, namedtuple, numpy, s3fs and sys.
OTHERS = {"_ActionsContainer", "_ArgumentGroup", "_option_string_actions", "_asdict", "_bit_generator"}
OTHERS |= {"_call_s3", "_current_frames", "_getframe"}
LISTED = {
    (owner.removesuffix("()"), name)
    for owners in (*OPTIONAL.values(), *REQUIRED.values())
    for owner, names in owners.items()
    for name in names.split()
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for each private name of `LIBRARIES` in a program, and ("", name) for each
    private attribute of an object of unknown type. own: names that this repository defines."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield from of_libraries(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                imported[alias.asname or alias.name] = path = f"{node.module}.{alias.name}"
                yield from of_libraries(path)
    for node in ast.walk(tree):
        owner, name = attribute(node)
        parts = [name]
        while isinstance(owner, ast.Attribute):
            parts.append(owner.attr)
            owner = owner.value
        base = imported.get(owner.id, "") if isinstance(owner, ast.Name) else ""
        if base.split(".")[0] in LIBRARIES:
            yield from of_libraries(".".join([base, *reversed(parts)]))
        elif is_private(name) and name not in own and not isinstance(node, ast.Tuple):
            yield "", name


def attribute(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Returns the object and the name of `object.name`, `getattr(object, "name")` and (object, "name")."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    pair = node.elts if isinstance(node, ast.Tuple) else []
    if isinstance(node, ast.Call):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        pair = node.args if function in ("getattr", "setattr", "hasattr", "delattr", "object") else []
    if len(pair) >= 2 and isinstance(pair[1], ast.Constant) and isinstance(pair[1].value, str):
        return pair[0], pair[1].value
    return None, ""


def of_libraries(path: str) -> Iterator[tuple[str, str]]:
    owner, _, name = path.rpartition(".")
    if path.split(".")[0] in LIBRARIES and any(map(is_private, path.split("."))):
        yield owner, name


def names_defined_in(trees: list[ast.Module]) -> set[str]:
    """Returns the names of functions, classes and variables, and of the attributes of self, cls and ctx."""
    defined = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if getattr(node.value, "id", "") in ("self", "cls", "ctx"):
                defined.add(node.attr)
    return defined


def overridden() -> set[tuple[str, str]]:
    """Returns the private methods and tables of DeepSpeed that classes of this repository replace."""
    return {
        (f"{base.__module__}.{base.__qualname__}", name)
        for kind in (GPTEngine, GPTModelPipe)
        for own in kind.__mro__
        if own.__module__.startswith("megatron.")
        for base in own.__mro__
        if base.__module__.startswith("deepspeed.")
        for name in vars(own).keys() & vars(base).keys()
        if is_private(name)
    }


def used_names() -> dict[tuple[str, str], str]:
    """Returns the private names that the sources use, each with a file."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    own = names_defined_in(list(trees.values())) - {name for _, name in LISTED}
    used = {
        use: str(path.relative_to(ROOT)) for path, tree in trees.items() for use in private_names(tree, own)
    }
    return used | dict.fromkeys(overridden(), "an override")


def test_every_private_name_that_the_sources_use_is_listed() -> None:
    used = used_names()
    assert len(used) > 40
    names = {name for _, name in LISTED}
    listed = [f"{owner}.{name}." for owner, name in LISTED]
    unlisted = {}
    for (owner, name), path in used.items():
        use = f"{owner}.{name}."
        known = [x for x in listed if x.startswith(use) or (use.startswith(x) and not is_private(name))]
        if not known and use not in listed and not (owner == "" and name in names | OTHERS):
            unlisted[owner, name] = path
    assert not unlisted, "private names: list them in megatron/torch_versions.py, with what happens without"
    assert names <= {name for _, name in used}, "listed in megatron/torch_versions.py, but not used"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._new(1)", [("torch._C", "_new"), ("torch", "_C")]),
        ("import torch.nn.functional as F\nF._new", [("torch.nn.functional", "_new")]),
        ("from torch._new import function", [("torch._new", "function")]),
        ("import triton._new", [("triton", "_new")]),
        ("from deepspeed import comm as dist\ndist._new()", [("deepspeed.comm", "_new")]),
        ("from torch import nn\npatches = [(nn.Module, '_new', 1)]", [("torch.nn.Module", "_new")]),
        ("import torch\ngetattr(torch._C, '_new', None)", [("torch._C", "_new"), ("torch", "_C")]),
        ("def f(x):\n    return x._new", [("", "_new")]),
        ("def f(x):\n    return setattr(x, '_new', 1)", [("", "_new")]),
        ("import torch\ntorch.new\ndef f(self):\n    self._own.__dict__, ('a', '_new')", []),
    ],
)
def test_the_search_finds_private_names(source: str, found: list[tuple[str, str]]) -> None:
    assert list(private_names(ast.parse(source), {"_own"})) == found


def owner_of(path: str) -> Any:
    """Returns a module, or an attribute of a module."""
    try:
        return importlib.import_module(path)
    except ImportError:
        owner, _, name = path.rpartition(".")
        return getattr(owner_of(owner), name)


@pytest.mark.parametrize("owner", sorted({o for owners in REQUIRED.values() for o in owners}))
def test_the_installed_versions_have_the_names_without_replacement(owner: str) -> None:
    found = owner_of(owner.removesuffix("()"))
    for name in (n for owners in REQUIRED.values() for n in owners.get(owner, "").split()):
        if owner.endswith("()"):  # set on instances
            assert name in inspect.getsource(inspect.getmodule(found) or found)
        else:
            assert hasattr(found, name)


def removed_from_torch() -> None:
    from torch.utils.backend_registration import _RemovedModule  # noqa: F401


@pytest.fixture
def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.16.0a0+git1", "triton": "3.9.1", "deepspeed": "0.19.8"}
    monkeypatch.setattr(torch_versions, "version", versions.__getitem__)
    monkeypatch.setitem(REQUIRED, "planning", {"torch.ops.aten": "_removed"})  # type: ignore[misc]


@pytest.mark.parametrize("missing", [lambda: torch.ops.aten._removed, removed_from_torch])
def test_a_missing_name_of_an_unknown_version_is_one_sentence(
    new_torch: None, missing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for context in (exit_on_user_error({}), exit_on_error(RankReport(None, "0"))):
        with pytest.raises(SystemExit) as ended, context:
            missing()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and "Traceback" not in error
        assert "does not run with torch 2.16 (supported: 2.11 to 2.15): " in error
    succeeded, sentence = processes._answer(missing, ())
    assert not succeeded and "does not run with torch 2.16" in sentence


def test_other_errors_keep_their_traceback(new_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_versions.missing_name(AttributeError("x", name="y")) is None
    assert torch_versions.missing_name(ValueError("_removed")) is None
    error = AttributeError("x", name="_removed")
    assert torch_versions.missing_name(error)
    monkeypatch.setattr(
        torch_versions, "version", {"torch": "2.15.1", "triton": "3.6.0", "deepspeed": "0.19.9"}.get
    )
    assert torch_versions.missing_name(error) is None


@pytest.mark.parametrize(
    ("function", "new", "old"),
    [
        (torch_versions.all_gather_single, "all_gather_single", "all_gather_into_tensor"),
        (torch_versions.reduce_scatter_single, "reduce_scatter_single", "reduce_scatter_tensor"),
    ],
)
def test_collectives_have_the_name_of_the_torch_version(
    function: Any, new: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, new, lambda *args, **options: ("new", args, options), raising=False)
    monkeypatch.setattr(dist, old, lambda *args, **options: ("old", args, options))
    assert function(1, 2, 3, True) == ("new", (1, 2), {"group": 3, "async_op": True})
    monkeypatch.delattr(dist, new)
    assert function(1, 2, group=None) == ("old", (1, 2), {"group": None, "async_op": False})


@pytest.fixture
def operators_without_private_names(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delattr(_python_dispatch, "is_in_torch_dispatch_mode")
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    spec = spec_from_file_location("operators_copy", operators.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_private_names_operators_and_kept_inputs_are_slower(
    operators_without_private_names: Any,
) -> None:
    module = operators_without_private_names
    assert module.is_in_torch_dispatch_mode()

    @module.first_order
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            module.keep_input(ctx, x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad * module.take_input(ctx)

    x = torch.tensor([3.0, -2.0], requires_grad=True)
    with saved_tensors_hooks(lambda x: x + 1, lambda x: x + 10):
        (found,) = torch.autograd.grad(Square.apply(x).sum(), x)
    assert found.tolist() == [2 * 14.0, 2 * 9.0]


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [("3.6.0", "2.3.5", True), ("3.6.1", "2.4.0", False), ("3.6.0", "3.0", False), ("3.7.0", "2.5.2", True)],
)
def test_an_interpreter_that_numpy_breaks_is_not_chosen(
    triton: str, numpy: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", "interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch_versions, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    reason = selection.reason_against_kernels("cpu")
    assert reason is None if runs else reason is not None and "numpy<2.4" in reason


def recorder(*names: str) -> Any:
    entries = [{"profiling_name": name, "time_created_ns": int(name[-1])} for name in names]
    record = {"version": "2.10", "pg_config": {names[0]: 0}, "pg_status": {names[0]: 1}, "entries": entries}
    return lambda **_: pickle.dumps(record)


def test_a_flight_record_has_the_calls_of_all_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(**dumps: Any) -> Any:
        monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace(**dumps))
        return pickle.loads(device_progress.flight_record())

    gloo, nccl = recorder("gloo 1", "gloo 4"), recorder("nccl 2", "nccl 3")
    both = recorded(_dump_nccl_trace=nccl, _dump_fr_trace=gloo)
    assert [x["profiling_name"] for x in both["entries"]] == ["gloo 1", "nccl 2", "nccl 3", "gloo 4"]
    assert both["version"] == "2.10" and both["pg_status"] == {"gloo 1": 1, "nccl 2": 1}
    assert recorded(_dump_nccl_trace=nccl) == pickle.loads(nccl())
    assert recorded() == {} and device_progress.waiting_status() == {"waits_in": ""}


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_flops_of_attention_are_counted_with_all_heads(suffix: str) -> None:
    """Before torch 2.13 the formula rejects keys with fewer heads."""
    query, key = torch.empty(2, 8, 5, 16, device="meta"), torch.empty(2, 2, 7, 16, device="meta")
    gradient = [query] if suffix else []
    found = _with_all_heads(f"_scaled_dot_product_flash_attention{suffix}", [*gradient, query, key, key, 0.0])
    assert [x.shape[1] for x in found[:-1]] == [8] * (3 + len(gradient))
    assert [x.shape[2] for x in found[-3:-1]] == [7, 7]
    assert _with_all_heads("bmm", [query, key]) == [query, key]
