"""Device, dtype and installed packages decide between kernel and PyTorch. The reason is logged once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from megatron.kernels import selection


@pytest.fixture
def accelerator(monkeypatch):
    """Returns an accelerator that supports Triton. The logged decision is forgotten after the test."""
    found = SimpleNamespace(is_triton_supported=lambda: True)
    monkeypatch.setattr(selection, "get_accelerator", lambda: found)
    selection.forget_decisions()
    yield found
    selection.forget_decisions()


def test_cpu_tensors_use_pytorch_whatever_the_accelerator(accelerator):
    assert not selection.uses_kernels(torch.ones(1))


def test_a_supported_device_uses_kernels_for_their_dtypes_and_says_so_once(accelerator, caplog):
    on_device = {
        dtype: torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float64)
    }
    with caplog.at_level(logging.INFO):
        assert selection.uses_kernels(on_device[torch.bfloat16])
        assert selection.uses_kernels(on_device[torch.bfloat16])
        assert not selection.uses_kernels(on_device[torch.float64])
    assert caplog.messages == ["kernels: triton"]


@pytest.mark.parametrize("lacks,words", [("device", "compute capability 8.0"), ("package", "not installed")])
def test_without_a_supported_device_or_the_package_pytorch_is_used(
    accelerator, monkeypatch, caplog, lacks, words
):
    if lacks == "device":
        accelerator.is_triton_supported = lambda: False
    else:
        monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert words in selection.reason_against_kernels("cuda")
    with caplog.at_level(logging.INFO):
        assert selection._device_uses_kernels("cuda") is False
    assert caplog.messages[0].startswith("kernels: PyTorch, ") and words in caplog.messages[0]


def test_the_environment_selects_pytorch(accelerator, monkeypatch):
    monkeypatch.setenv("MEGATRON_KERNELS", "pytorch")
    assert selection.reason_against_kernels("cuda") == "MEGATRON_KERNELS=pytorch is set"


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_environment_selects_the_interpreter_for_cpu_tensors(accelerator, monkeypatch, interpreted):
    monkeypatch.setenv("MEGATRON_KERNELS", "interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    assert selection.uses_kernels(torch.ones(1)) == interpreted
    assert interpreted or selection.reason_against_kernels("cpu") == "TRITON_INTERPRET=1 is not set"


def test_the_simulated_accelerator_does_not_need_the_package(accelerator, monkeypatch):
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert selection.reason_against_kernels("sim") is None
