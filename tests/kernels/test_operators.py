"""Compiled kernels are launched with the right arguments, and autograd functions keep the right inputs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron import torch_versions
from megatron.kernels import operators, triton_kernels
from megatron.kernels.operators import Launch, first_order, keep_input, take_input

NUMBERS = {"width": 3, "BLOCK": 64}


class Recorded:
    """An object with the interface of a function of Triton. `calls`: (who launched, tensors, further
    arguments)."""

    arg_names = ("total", "rows", "width", "BLOCK")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*tensors: torch.Tensor, **others: Any) -> Any:
            self.calls.append(("triton", tensors, others))
            return RecordedVariant(self.calls)

        return launch


class RecordedVariant:
    """An object with the interface of a compiled kernel."""

    def __init__(self, calls: list[tuple[str, tuple, Any]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.calls.append(("variant", arguments[:2], arguments[2:]))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    kernel = Recorded()
    monkeypatch.setattr(triton_kernels, "add_rows_kernel", kernel)
    return kernel


def test_the_variant_is_called_for_tensors_for_which_triton_has_chosen_it(recorded: Recorded) -> None:
    launch = Launch("triton_kernels.add_rows_kernel", (2, 5), {"num_warps": 4}, **NUMBERS)
    a, b, half = torch.zeros(40), torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)
    steps = (
        ("triton", (a, b)),
        ("variant", (b, a)),
        ("triton", (a, half)),  # a different dtype
        ("triton", (a, None)),
        ("triton", (a, b[1:])),  # not a multiple of 16 bytes
        ("triton", (a, b[1:])),
        ("variant", (a, b[4:])),
        ("variant", (a, half)),
        ("variant", (a, None)),
    )
    for _, tensors in steps:
        launch(*tensors)
    assert [who for who, _, _ in recorded.calls] == [who for who, _ in steps]
    for (who, found, others), (_, tensors) in zip(recorded.calls, steps, strict=True):
        assert all(x is y for x, y in zip(found, tensors, strict=True))
        assert others == ({**NUMBERS, "num_warps": 4} if who == "triton" else tuple(NUMBERS.values()))


@pytest.mark.parametrize(
    ("installed", "then"), [("3.9.4", "variant"), ("3.10.0", "triton"), ("4.0", "triton")]
)
def test_an_unknown_triton_launches_each_time(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, installed: str, then: str
) -> None:
    monkeypatch.setattr(torch_versions, "version", lambda package: installed)
    monkeypatch.setattr(operators, "launches_directly", torch_versions.launches_directly.__wrapped__)
    launch = Launch("triton_kernels.add_rows_kernel", (2, 5), {}, **NUMBERS)
    for _ in range(3):
        launch(torch.zeros(40), torch.zeros(40))
    assert [who for who, _, _ in recorded.calls] == ["triton", then, then]


def test_a_first_launch_for_another_than_the_current_device_is_an_error(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch = Launch("triton_kernels.add_rows_kernel", (2, 5), {}, **NUMBERS)
    for index in (0, 1):
        device = torch.device("cuda", index)
        on_gpu = SimpleNamespace(device=device, is_cuda=True, dtype=torch.float32, data_ptr=lambda: 64)
        with nullcontext() if index == 0 else pytest.raises(AssertionError, match="current device.*cuda:1"):
            launch(on_gpu, on_gpu)
    assert len(recorded.calls) == 1


def test_calls_with_other_numbers_and_grids_share_a_variant(recorded: Recorded) -> None:
    """Numbers of more than 31 bits are the exception: Triton passes them with a different type."""
    launch, x = Launch("triton_kernels.add_rows_kernel", None, {}, BLOCK=64), torch.zeros(40)
    for rows, grid in ((3, (1, 1)), (5, (2, 1)), (2**31, (3, 1)), (7, (0, 1)), (7, (1, 1))):
        launch(x, x, rows, grid=grid)
    assert [who for who, _, _ in recorded.calls] == ["triton", "variant", "triton", "variant"]
    assert recorded.calls[1][2] == (5, 64)


def test_tensors_without_memory_are_not_launched(recorded: Recorded) -> None:
    with FakeTensorMode():
        Launch("triton_kernels.add_rows_kernel", (2, 5), {}, **NUMBERS)(torch.zeros(3), torch.zeros(3))
    assert not recorded.calls


def test_kernels_of_fp8_are_not_specialized_for_numbers_of_rows() -> None:
    """The rows of experts change in each step, and each specialization would be compiled."""
    pytest.importorskip("triton")
    from megatron.kernels import fp8_triton

    for kernel, names in (("quantize", ("rows", "scale_pitch")), ("multiply_fp8", ("rows", "x_scale_block"))):
        parameters = getattr(getattr(fp8_triton, f"{kernel}_kernel"), "params", None)
        if parameters is not None:  # Triton's interpreter has none
            assert {each.name for each in parameters if each.do_not_specialize} == {*names}


def test_a_grid_without_programs_launches_nothing(recorded: Recorded) -> None:
    Launch("triton_kernels.add_rows_kernel", (0, 5), {}, **NUMBERS)(torch.zeros(3), torch.zeros(3))
    assert not recorded.calls


@first_order
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        keep_input(ctx, x)
        events.append("product")
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * grad * take_input(ctx), None


def test_a_kept_input_is_that_of_save_for_backward_but_hooks_get_it_at_once() -> None:
    """Fails if torch changes its private function that returns the active hooks."""
    events: list[str] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        events.append("pack")
        return x + 1  # a new tensor, to see that it is used

    x = torch.tensor([3.0, -2.0], requires_grad=True)
    with saved_tensors_hooks(pack, lambda packed: packed + 10):
        y = Square.apply(x, events)
    assert events == ["pack", "product"]
    (found,) = torch.autograd.grad(y.sum(), x)
    assert found.tolist() == [2 * 14.0, 2 * 9.0]
    (found,) = torch.autograd.grad(Square.apply(x, []).sum(), x)
    assert found.tolist() == [6.0, -4.0]


@pytest.mark.parametrize("hooks", [False, True])
def test_a_kept_input_is_freed_by_the_first_backward_pass(hooks: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    y = Square.apply(x, []).sum()
    if hooks:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            y = Square.apply(x, []).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        y.backward()


def test_a_kept_input_that_was_changed_in_place_is_an_error() -> None:
    """Fails if torch changes its private counter of in-place changes."""
    leaf = torch.ones(2, requires_grad=True)
    x = leaf * 2
    y = Square.apply(x, [])
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="Square has no second derivative"):
        torch.autograd.grad(Square.apply(x, []).sum(), x, create_graph=True)
