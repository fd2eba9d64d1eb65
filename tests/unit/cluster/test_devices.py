"""Tests the device of a process, the table of GPUs, and the flags that select a GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.arguments import parse_args
from megatron.cluster.devices import (
    H100_80GB,
    TF32_VARIABLES,
    check_fp32_variables,
    choose_device,
    device_index,
    device_memory_bytes,
    find_gpu,
    set_deterministic_variables,
    set_library_defaults,
    set_max_connections,
)
from megatron.cluster.processes import _check_backend, _use_deterministic_algorithms, use_exact_products
from megatron.config import ParallelConfig
from megatron.config.registries import GPUS
from megatron.errors import UserError
from megatron.training.build import run_of_layout
from megatron.units import GIB
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S
from tests.unit.config.command_lines import RUN, SMALL


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3), (3, 8, 3)],  # (3, 1, 0): srun --gpus-per-task=1
)
def test_device_is_chosen_among_the_visible_ones(local_rank: int, visible: int, expected: int) -> None:
    assert device_index(local_rank, visible) == expected


def test_one_visible_device_is_the_one_that_deepspeed_selects_again() -> None:
    env = {"LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert choose_device(1, env) == 0
    assert env == {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


def test_fewer_devices_than_processes_are_one_sentence() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "n7"}
    with pytest.raises(UserError) as caught:
        device_index(2, 2, env)
    for part in ("LOCAL_RANK 2", "2 devices", "n7", "CUDA_VISIBLE_DEVICES=0,1", "--gpus-per-task=1"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "given", "expected", "noted"),
    [
        ({"tensor_model_parallel_size": 2}, None, "1", False),
        ({"tensor_model_parallel_size": 2}, "1", "1", False),
        ({"tensor_model_parallel_size": 2}, "8", "8", True),
        ({}, None, None, False),
        ({"tensor_model_parallel_size": 2, "zero_stage": 3}, None, None, False),
        ({"tensor_model_parallel_size": 2, "zero_stage": 1}, None, "1", False),
    ],
)
def test_max_connections_follow_the_layout_unless_set(parallel, given, expected, noted) -> None:
    env = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    note = set_max_connections(ParallelConfig(**parallel), env)
    assert env.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected and bool(note) is noted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ({"NCCL_ALGO": "^NVLS"}, {"NCCL_ALGO": "^NVLS", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ({"NCCL_ALGO": "NVLS"}, "NCCL_ALGO NVLS: .* Expected one of Ring, Tree,"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG :0:0: .* Expected one of :4096:8,"),
    ],
)
def test_deterministic_mode_sets_variables_and_refuses_others(given, expected) -> None:
    env = dict(given)
    with nullcontext() if isinstance(expected, dict) else pytest.raises(UserError, match=expected):
        set_deterministic_variables(env)
        assert env == expected


def test_deterministic_mode_refuses_operations_that_are_not() -> None:
    values, index = torch.zeros(3), torch.tensor([0, 0])
    values.put_(index, torch.ones(2))
    try:
        _use_deterministic_algorithms()
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            values.put_(index, torch.ones(2))
        assert not torch.empty(1000).isnan().all(), "new tensors are not filled"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("name", TF32_VARIABLES)
def test_fp32_needs_ieee_products_in_the_environment(name: str) -> None:
    check_fp32_variables({"PATH": "/bin", name: "0"})
    with pytest.raises(UserError, match=f"{name} 1: .* Expected 0. Unset the variable"):
        check_fp32_variables({name: "1"})


def test_products_are_ieee_products_whatever_allowed_others_before() -> None:
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("medium")
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    try:
        use_exact_products()
        assert (torch.get_float32_matmul_precision(), matmul.fp32_precision) == ("highest", "ieee")
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision("highest")


def test_deterministic_mode_of_a_checkpoint_ends_with_training() -> None:
    """tools/evaluate.py does not set cuBLAS's variable, so its first product on a GPU would be rejected."""
    saved: Any = SimpleNamespace(config=parse_args([*SMALL, "--deterministic-mode"]), vocab_size=128, eod=0)
    assert saved.config.training.deterministic_mode
    assert not run_of_layout(saved, ParallelConfig()).config.training.deterministic_mode


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_are_kept(name: str) -> None:
    given = {name: "max_split_size_mb:64", "TRITON_CACHE_DIR": "/scratch", "TORCH_NCCL_ENABLE_TIMING": "0"}
    env = dict(given)
    set_library_defaults(env)
    assert env == given


def test_the_kernel_cache_is_on_the_node_and_nobody_else_can_write_to_it(tmp_path, monkeypatch) -> None:
    """Triton loads libraries from the cache. Other users who can write to its folder could make a run execute
    their code."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = {"SLURMD_NODENAME": "n7"}
    set_library_defaults(env)
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    folder = Path(env.pop("TRITON_CACHE_DIR"))
    assert folder == tmp_path / f"megatron-{os.getuid()}" / "triton" / "n7"
    (base,) = tmp_path.iterdir()
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    base.chmod(0o777)
    set_library_defaults(env)
    assert "TRITON_CACHE_DIR" not in env


def test_a_file_system_without_programs_holds_no_kernel_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    env: dict[str, str] = {}
    set_library_defaults(env)
    assert "TRITON_CACHE_DIR" not in env


@pytest.mark.parametrize(
    ("backend", "stages", "on_cpu", "words"),
    [
        ("nccl", 1, True, "--distributed-backend nccl needs GPUs"),
        (
            "gloo",
            2,
            False,
            "--distributed-backend gloo cannot send tensors of a GPU to another pipeline stage",
        ),
        ("gloo", 1, False, None),
        ("gloo", 2, True, None),
        (None, 2, False, None),
    ],
)
def test_a_backend_that_cannot_work_is_rejected(backend, stages, on_cpu, words) -> None:
    parallel = ParallelConfig(distributed_backend=backend, pipeline_model_parallel_size=stages)
    with nullcontext() if words is None else pytest.raises(UserError, match=words):
        _check_backend(parallel, on_cpu=on_cpu)


_STOP_AT_IMPORT = """
import os, runpy, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "deepspeed"):
            connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
            print(name, connections, "TRITON_CACHE_DIR" in os.environ, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Stop())
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


def test_variables_are_set_before_cuda_can_be_probed(tmp_path) -> None:
    for name in ("x.bin", "x.idx", "v", "m"):
        (tmp_path / name).touch()
    flags = ["--tensor-model-parallel-size", "2", "--data-path", f"{tmp_path}/x"]
    flags += ["--vocab-file", f"{tmp_path}/v", "--merge-file", f"{tmp_path}/m"]
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
    env = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    found = subprocess.run(
        [sys.executable, "-c", _STOP_AT_IMPORT, *RUN, *flags],
        cwd=ROOT,
        env={**env, **launched},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert found.stdout == "torch 1 True\n", found.stderr


def config_of(*flags: str):
    return parse_args([*SMALL, "--dry-run", *flags], {})


@pytest.mark.parametrize("name", GPUS)
def test_a_device_offers_less_memory_than_its_name_says_and_no_rate_is_below_fp32(name):
    gpu = find_gpu(config_of("--gpu", name))
    nominal = int(name.split("-")[1].removesuffix("gb"))
    # 80 GB are 80 GiB less what the driver keeps, or for some devices 80e9 bytes.
    assert 0.98 * nominal * 1e9 < gpu.memory_bytes < nominal * GIB
    assert set(gpu.peak_flops) == {"fp32", "tf32", "fp16", "bf16", "fp8"}
    assert min(gpu.peak_flops.values()) == gpu.peak_flops["fp32"]
    assert gpu.peak_flops["fp8"] in (
        gpu.peak_flops["fp32"],
        pytest.approx(2 * gpu.peak_flops["fp16"], rel=1e-3),
    )
    # Typical GPUs have 100 to 320 FLOPs in 16 bit per byte of bandwidth.
    assert 100 < gpu.peak_flops["fp16"] / gpu.bandwidth < 320
    assert device_memory_bytes(config_of("--gpu", name)) == gpu.memory_bytes


def test_memory_can_be_given_in_gib():
    assert device_memory_bytes(config_of("--device-memory", "23.5")) == 23.5 * GIB
    assert find_gpu(config_of("--device-memory", "23.5")) is None
    assert device_memory_bytes(config_of()) is None


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--gpu a100", ["--gpu is 'a100'", "a100-80gb"]),
        ("--device-memory 0", ["--device-memory", "0"]),
        ("--device-memory 80gb", ["--device-memory", "80gb"]),
        ("--gpu h100-80gb --device-memory 80", ["--gpu h100-80gb", "--device-memory 80", "remove"]),
    ],
)
def test_wrong_values_are_refused_with_the_value(flags, parts):
    with pytest.raises(UserError) as caught:
        config_of(*flags.split())
    assert all(part in str(caught.value) for part in parts)


def test_an_operation_takes_at_least_as_long_as_its_products_and_as_its_bytes():
    assert H100_80GB.least_seconds(989.4e12, 3.35e12, "bf16") == pytest.approx(1)
    assert H100_80GB.least_seconds(989.4e12, 6.7e12, "bf16") == pytest.approx(2)
    assert H100_80GB.least_seconds(989.4e12, 0, "fp32") == pytest.approx(989.4 / 67)
