"""The error of a rank that cannot allocate memory."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.cluster.devices import allocator_settings
from megatron.cluster.exit_codes import OutOfMemory
from megatron.config import Config, parse_args
from megatron.planner.memory.fit import memory_flags
from megatron.planner.memory.stage_memory import planned_bytes
from megatron.planner.stages import plan_stages
from megatron.training.out_of_memory import (
    _fragmentation_hint,
    early_out_of_memory,
    explained_out_of_memory,
    is_out_of_memory,
)

VOCAB = 50_000
MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings "
    "1024 --global-batch-size 64 --lr 1e-3 --train-iters 10 --bf16 --dry-run"
).split()


NCCL_ERROR = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)


def config_of(flags: str) -> Config:
    return parse_args([*MODEL, *flags.split()], {})


def names(flags: str) -> list[str]:
    """The flags that are named for a run with these flags; each reduces the plan."""
    config = config_of(flags)
    planned = max(planned_bytes(config, VOCAB, plan_stages(config, VOCAB)))
    found = memory_flags(config, VOCAB, planned)
    assert all(size < planned for _, size in found)
    assert [size for _, size in found] == sorted(size for _, size in found)
    return [flag for flag, _ in found]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Activations dominate.
        ("--world-size 1 --micro-batch-size 16", {"--checkpoint-activations", "--micro-batch-size 8"}),
        # The state dominates, and there are replicas to share it.
        (
            "--world-size 8 --micro-batch-size 1 --checkpoint-activations",
            {"--zero-stage 3", "--zero-stage 2"},
        ),
        # A pipeline refuses ZeRO-2 and 3.
        (
            "--world-size 8 --micro-batch-size 1 --checkpoint-activations --pipeline-model-parallel-size 2",
            {"--cpu-offload", "--zero-stage 1"},
        ),
        ("--world-size 2 --micro-batch-size 16 --tensor-model-parallel-size 2", {"--checkpoint-activations"}),
    ],
)
def test_flags_that_fit_the_layout_are_named(flags: str, expected: set[str]) -> None:
    found = names(flags)
    assert expected <= set(found) and len(found) <= 3


def test_flags_that_are_set_or_not_possible_are_not_named() -> None:
    found = names("--world-size 1 --micro-batch-size 1 --checkpoint-activations --cpu-offload")
    assert not any(re.match("--(micro|checkpoint|cpu|zero|tensor|pipeline)", flag) for flag in found)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (torch.distributed.DistBackendError(NCCL_ERROR), True),
        (torch.distributed.DistBackendError("ncclUnhandledCudaError\nCuda failure 1 'invalid value'"), False),
        (MemoryError(), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_kinds_of_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_sentence_has_plan_measurement_and_flags() -> None:
    config = config_of("--world-size 2 --micro-batch-size 4 --pipeline-model-parallel-size 2")
    plan = plan_stages(config, VOCAB)
    planned = planned_bytes(config, VOCAB, plan)
    with pytest.raises(OutOfMemory) as caught, explained_out_of_memory(config, VOCAB, plan, 1):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
    sentence = str(caught.value)
    assert caught.value.exit_code == 2 and not caught.value.on_all_ranks and "\n" not in sentence
    assert "Tried to allocate 2.00 GiB" in sentence and "more lines" not in sentence
    assert f"stage 1 is planned with {planned[1] / 2**30:.2f} GiB" in sentence
    assert re.search(r"measured (resident|allocated) \d+\.\d\d GiB", sentence)
    assert sentence.count(" GiB planned)") == 3


def test_sentence_has_the_line_of_nccl_that_names_the_memory() -> None:
    config = config_of("--world-size 1 --micro-batch-size 4")
    plan = plan_stages(config, VOCAB)
    with (
        pytest.raises(OutOfMemory, match="^out of memory: Cuda failure 2 'out of memory'; stage 0"),
        explained_out_of_memory(config, VOCAB, plan, 0),
    ):
        raise torch.distributed.DistBackendError(NCCL_ERROR)


@pytest.mark.parametrize(
    "name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", None]
)
def test_expandable_segments_are_not_named_if_they_are_set(name, monkeypatch) -> None:
    for variable in allocator_settings():
        monkeypatch.delenv(variable)
    if name is not None:
        monkeypatch.setenv(name, "expandable_segments:True")
    hint = _fragmentation_hint({"peak reserved": 50, "peak allocated": 10}, 80)
    assert ("expandable_segments" in hint) is (name is None)


def test_other_errors_pass() -> None:
    config = config_of("--world-size 1 --micro-batch-size 4")
    with (
        pytest.raises(ZeroDivisionError),
        explained_out_of_memory(config, VOCAB, plan_stages(config, VOCAB), 0),
    ):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(NCCL_ERROR),
        MemoryError(),
    ],
    ids=repr,
)
def test_out_of_memory_before_the_plan_has_exit_code_2(error: BaseException) -> None:
    with pytest.raises(OutOfMemory, match="before the model was built") as caught, early_out_of_memory():
        raise error
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_other_errors_before_the_plan_stay() -> None:
    with pytest.raises(RuntimeError, match="^NCCL error: connection refused$"), early_out_of_memory():
        raise RuntimeError("NCCL error: connection refused")
