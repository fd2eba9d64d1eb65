"""Tests the error of a rank that cannot allocate memory."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.arguments import parse_args
from megatron.cluster.devices import allocator_settings
from megatron.cluster.exit_codes import RankStopped
from megatron.config import Config
from megatron.training.out_of_memory import (
    _fragmentation_hint,
    explained_out_of_memory,
    is_out_of_memory,
    memory_flags,
)

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


def test_sentence_has_stage_measurement_device_and_flags() -> None:
    config = config_of("--world-size 2 --micro-batch-size 4 --pipeline-model-parallel-size 2")
    with pytest.raises(RankStopped) as caught, explained_out_of_memory(config, 1):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
    sentence = str(caught.value)
    assert caught.value.exit_code == 2 and not caught.value.on_all_ranks and "\n" not in sentence
    assert "Tried to allocate 2.00 GiB" in sentence and "more lines" not in sentence
    memory = r"measured on stage 1: (resident|allocated) \d+\.\d\d GiB, .*, the device has \d+\.\d\d GiB; "
    assert re.search(memory, sentence)
    assert sentence.endswith(
        "try --recompute-granularity selective --recompute-modules layernorm mlp_act, --micro-batch-size 2, "
        "--checkpoint-activations (--dry-run with --gpu KIND or --device-memory GIB plans the memory with "
        "each)"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Unfused attention stores its scores. ZeRO-2 and 3 do not support a pipeline.
        (
            "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 0 "
            "--micro-batch-size 2 --attention-dropout 0.1 --gpu v100-32gb",
            "zero-stage 1, sequence-parallel, recompute-granularity selective, micro-batch-size 1, "
            "checkpoint-activations, tensor-model-parallel-size 4, pipeline-model-parallel-size 4, "
            "cpu-offload",
        ),
        # Without replicas ZeRO shards nothing. Listed stages fit only one number of ranks.
        (
            "--world-size 2 --pipeline-model-parallel-size 2 --partition-method stages:4,4 "
            "--micro-batch-size 1 --checkpoint-activations",
            "cpu-offload",
        ),
        ("--world-size 1 --micro-batch-size 1 --checkpoint-activations --cpu-offload", ""),
        (
            "--world-size 2 --micro-batch-size 1 --checkpoint-activations --cpu-offload --seq-length 16384 "
            "--max-position-embeddings 16384",
            "zero-stage 1, context-parallel-size 2, "
            "tensor-model-parallel-size 2, pipeline-model-parallel-size 2",
        ),
        (
            "--world-size 2 --micro-batch-size 1 --checkpoint-activations --zero-stage 1 --embed-layernorm",
            "zero-stage 2, tensor-model-parallel-size 2, pipeline-model-parallel-size 2, "
            "use-bnb-optimizer, cpu-offload",
        ),
        # EP doubles up to the number of experts and of ranks of a stage. TP needs sequence parallelism.
        (
            "--world-size 8 --micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 4 "
            "--zero-stage 1",
            "expert-model-parallel-size 8, recompute-granularity selective --recompute-modules layernorm "
            "moe_act, zero-stage 2, checkpoint-activations, "
            "tensor-model-parallel-size 2 --sequence-parallel, pipeline-model-parallel-size 2, cpu-offload",
        ),
        (
            "--world-size 8 --micro-batch-size 1 --num-experts 4 --expert-model-parallel-size 4 "
            "--zero-stage 1 --tensor-model-parallel-size 2 --sequence-parallel "
            "--pipeline-model-parallel-size 2",
            "recompute-granularity selective --recompute-modules layernorm moe_act, checkpoint-activations, "
            "tensor-model-parallel-size 4 --sequence-parallel, pipeline-model-parallel-size 4, cpu-offload",
        ),
        # First the scores are recomputed, then everything that selective recomputation supports, then whole
        # layers.
        (
            "--world-size 1 --micro-batch-size 1 --attention-dropout 0.1 --gpu v100-32gb "
            "--recompute-granularity selective --cpu-offload",
            "recompute-granularity selective --recompute-modules core_attn layernorm mlp_act, "
            "recompute-granularity full",
        ),
        (
            "--world-size 1 --micro-batch-size 1 --compile --cpu-offload",
            "checkpoint-activations",
        ),
    ],
)
def test_flags_that_the_others_allow_are_in_the_order_in_which_to_try_them(flags: str, expected: str) -> None:
    found = list(memory_flags(config_of(flags)))
    assert ", ".join(flag.removeprefix("--") for flag, _ in found) == expected
    for flag, changed in found:
        assert changed == config_of(f"{flags} {flag}")


def test_sentence_without_a_flag_asks_for_devices() -> None:
    config = config_of("--world-size 1 --micro-batch-size 1 --checkpoint-activations --cpu-offload")
    with pytest.raises(RankStopped, match="; try more devices$"), explained_out_of_memory(config, 0):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def test_sentence_has_the_line_of_nccl_that_names_the_memory() -> None:
    config = config_of("--world-size 1 --micro-batch-size 4")
    with (
        pytest.raises(RankStopped, match="^out of memory: Cuda failure 2 'out of memory'; measured"),
        explained_out_of_memory(config, 0),
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


@pytest.mark.parametrize("is_built", [False, True])
def test_other_errors_pass(is_built: bool) -> None:
    config = config_of("--world-size 1 --micro-batch-size 4") if is_built else None
    for error in (ZeroDivisionError("x"), RuntimeError("NCCL error: connection refused")):
        with pytest.raises(type(error), match=f"^{error}$"), explained_out_of_memory(config):
            raise error


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
    with pytest.raises(RankStopped, match="before the model was built") as caught, explained_out_of_memory():
        raise error
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
