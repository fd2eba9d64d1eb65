"""The device of a process, and the variables that CUDA, PyTorch's allocator and Triton read.

`GPU` has the memory, the peak rates and the bandwidth of a device that --gpu can name. The rates (dense,
without 2:4 sparsity) and bandwidths are from NVIDIA's data sheets for the SXM modules:

    V100   "NVIDIA Tesla V100 GPU Accelerator", 2018 (SXM2; no bf16 and no TF32 units)
    A100   "NVIDIA A100 Tensor Core GPU", 1758950-r4, 2021 (SXM4; 1,555 and 2,039 GB/s)
    H100   "NVIDIA H100 Tensor Core GPU", 2022 (SXM5, HBM3)
    H200   "NVIDIA H200 Tensor Core GPU", 2024 (SXM5; the H100's rates)
    B200   "NVIDIA Blackwell Architecture Technical Brief", 2024 (HGX B200, 1,000 W)
    GB200  "NVIDIA GB200 NVL72" (one of its 72 GPUs, 1,200 W); the memory is an assumption

The memory is `torch.cuda.get_device_properties(0).total_memory`, the total that the driver offers to
programs. The values are from PyTorch's out-of-memory errors in public issues, not from own measurements. This
total is less than the memory in the data sheet, and differs by up to 0.1 GiB between drivers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cluster.launch import node_name, private_temporary_folder
from megatron.config import Config, ParallelConfig
from megatron.config.registries import GPUS
from megatron.errors import UserError
from megatron.units import GIB

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Current and former names of the variable that sets PyTorch's allocator.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Variables that --deterministic-mode needs -> accepted values (Megatron-LM's); the first value is the
# default. In-switch reductions (NVLS) are excluded, because their order of summation varies.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}
# Variables that make fp32 products TF32 products; some container images set them. cuBLAS obeys the first one
# whatever the program sets. The second one changes PyTorch's default, which the program sets again.
TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
# Values of CUDA_VISIBLE_DEVICES that hide all devices; Slurm sets the last one.
_NO_DEVICE = ("", "-1", "NoDevFiles")
# Major version of CUDA -> the oldest driver that supports it (NVIDIA, "CUDA Compatibility", minor version
# compatibility).
MIN_DRIVER = {"12": 525, "13": 580}


def device_index(local_rank: int, num_visible: int, env: Mapping[str, str] = os.environ) -> int:
    """Returns the index of this process's device among the visible devices.

    Processes that each see one device (srun --gpus-per-task=1) all use index 0. Raises UserError if there
    are fewer devices than processes on the node.
    """
    if num_visible == 1:
        return 0
    if local_rank < num_visible:
        return local_rank
    raise UserError(
        f"LOCAL_RANK {local_rank} has no device: {num_visible} devices are visible on {node_name(env)} "
        f"(CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', 'unset')}): start at most {num_visible} "
        "processes per node (--nproc_per_node, --ntasks-per-node), or give each task its own device (srun "
        "--gpus-per-task=1)"
    )


def choose_device(num_visible: int, env: MutableMapping[str, str] = os.environ) -> int:
    """Returns `device_index` of LOCAL_RANK, and sets LOCAL_RANK to it.

    DeepSpeed's engine selects the device with the index LOCAL_RANK. If mpirun has set its own variable for
    the local rank, both must be equal. Afterwards only `config.parallel.local_rank` has the rank of this
    process on its node.
    """
    index = device_index(int(env["LOCAL_RANK"]), num_visible, env)
    for name in ("LOCAL_RANK", _MPI_LOCAL_RANK):
        if name in env:
            env[name] = str(index)
    return index


def device_id(accelerator: Any, index: int, env: Mapping[str, str] = os.environ) -> str:
    """Returns a name that is equal in two processes only if they share a device; "" on a CPU."""
    if accelerator.device_name() == "cpu":
        return ""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    # MIG slices of one GPU differ only in CUDA_VISIBLE_DEVICES.
    return f"{node_name(env)} {uuid} {env.get('CUDA_VISIBLE_DEVICES', '')}"


def check_gpus(
    env: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
    driver_file: Path = Path("/proc/driver/nvidia/version"),
) -> None:
    """Raises UserError if PyTorch is built for CUDA, but cannot use the machine's NVIDIA GPUs.

    Without this check, DeepSpeed would select the CPU. A user who wants the CPU sets DS_ACCELERATOR, or sets
    CUDA_VISIBLE_DEVICES to no device.
    """
    import torch

    built_for, gpus = torch.version.cuda, list(devices.glob("nvidia[0-9]*"))
    wants_cpu = env.get("DS_ACCELERATOR", "cuda") != "cuda" or env.get("CUDA_VISIBLE_DEVICES") in _NO_DEVICE
    if built_for is None or not gpus or wants_cpu or torch.cuda.is_available():
        return
    least = MIN_DRIVER.get(built_for.partition(".")[0])
    text = driver_file.read_text() if driver_file.exists() else ""
    found = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)", text)
    raise UserError(
        f"PyTorch {torch.__version__} cannot use the {len(gpus)} NVIDIA GPU(s) of {node_name(env)}: CUDA "
        f"{built_for} needs {f'driver {least} or newer' if least else 'a newer driver'}, found "
        f"{found[1] if found else 'an unknown one'}. Update the driver, install PyTorch for an older CUDA "
        "(docs/cluster.md), request a GPU (srun --gpus-per-task=1), start the container with GPUs (apptainer "
        "--nv), or set DS_ACCELERATOR=cpu to use the CPU."
    )


def set_max_connections(parallel: ParallelConfig, env: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS to 1 if the layout needs it. Returns a warning if the user has set a
    value other than 1.

    Must be called before DeepSpeed is imported: the import initializes the CUDA driver to count devices.
    """
    if not parallel.needs_one_queue:
        return None
    if env.setdefault(_CONNECTIONS, "1") == "1":
        return None
    return (
        f"{_CONNECTIONS} is {env[_CONNECTIONS]}: expected 1, so that tensor-parallel communication overlaps "
        "with GEMMs"
    )


def set_deterministic_variables(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables of --deterministic-mode that are not set. Raises UserError for a value with which
    cuBLAS or NCCL are not deterministic. Must be called before CUDA is initialized."""
    for name, accepted in _DETERMINISTIC.items():
        if env.setdefault(name, accepted[0]) not in accepted:
            raise UserError(
                f"{name} {env[name]}: not deterministic, as --deterministic-mode needs it. Expected one of "
                f"{', '.join(accepted)}. Unset the variable, or remove the flag."
            )


def check_fp32_variables(env: Mapping[str, str] = os.environ) -> None:
    """Raises UserError for a variable that turns fp32 products into TF32 products. Runs in fp32 call it."""
    for name in TF32_VARIABLES:
        if env.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name} {env[name]}: products in fp32 would be rounded to TF32 (relative errors of about "
                "3e-4), and layouts would differ. Expected 0. Unset the variable, or add --bf16."
            )


def set_library_defaults(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets variables that PyTorch and Triton read when they are imported, unless the user has set them.

    PyTorch's allocator uses expandable segments, so that changing sizes (a batch-size ramp-up, a curriculum,
    an evaluation) do not fragment the memory. NCCL's calls record their start time, which the report of a
    hang needs. Triton caches compiled kernels on the node. Triton's default cache is the home folder, where
    hundreds of ranks on a network file system disturb each other (EBUSY, FileNotFoundError).
    """
    if not allocator_settings(env):
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    env.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    folder = private_temporary_folder()
    # Triton loads libraries from its cache, so the file system must allow programs. $TMPDIR may be on a
    # network file system, too.
    if folder is not None and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
        env.setdefault("TRITON_CACHE_DIR", str(folder / "triton" / node_name(env)))


def allocator_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns name -> value of the environment variables that set PyTorch's allocator."""
    return {name: env[name] for name in _ALLOCATOR_VARIABLES if name in env}


_TERA = 1e12


@dataclass(frozen=True)
class GPU:
    """A GPU model.

    memory_bytes: what programs can allocate. peak_flops: dtype ('fp32', 'tf32', 'fp16', 'bf16', 'fp8') ->
    dense FLOP/s of GEMMs; a dtype without units on the device has the rate of fp32. bandwidth: bandwidth of
    the device memory, in bytes per second.
    """

    memory_bytes: int
    peak_flops: dict[str, float]
    bandwidth: float

    def least_seconds(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Returns the roofline time, in seconds, of an operation that computes `flops` in GEMMs and reads and
        writes `moved_bytes`. No kernel is faster."""
        return max(flops / self.peak_flops[dtype], moved_bytes / self.bandwidth)


def _gpu(
    memory_gib: float, fp32: float, tf32: float, fp16: float, bf16: float, fp8: float, bandwidth_tb_s: float
) -> GPU:
    """Returns the GPU with these rates in TFLOP/s (fp32 to fp8)."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16, "fp8": fp8}
    return GPU(
        round(memory_gib * GIB), {name: rate * _TERA for name, rate in rates.items()}, bandwidth_tb_s * _TERA
    )


#                      GiB   fp32   tf32   fp16   bf16    fp8   TB/s
V100_16GB = _gpu(    15.77,  15.7,  15.7,   125,  15.7,  15.7,   0.9)  # fmt: skip
V100_32GB = _gpu(    31.74,  15.7,  15.7,   125,  15.7,  15.7,   0.9)  # fmt: skip
A100_40GB = _gpu(    39.50,  19.5,   156,   312,   312,  19.5, 1.555)  # fmt: skip
A100_80GB = _gpu(    79.25,  19.5,   156,   312,   312,  19.5, 2.039)  # fmt: skip
H100_80GB = _gpu(    79.11,    67, 494.7, 989.4, 989.4,  1979,  3.35)  # fmt: skip
H200_141GB = _gpu(  139.72,    67, 494.7, 989.4, 989.4,  1979,   4.8)  # fmt: skip
B200_180GB = _gpu(  178.35,    80,  1100,  2250,  2250,  4500,   8.0)  # fmt: skip
GB200_186GB = _gpu( 184.31,    80,  1250,  2500,  2500,  5000,   8.0)  # fmt: skip


# PyTorch's name of a device -> the device of --gpu.
GPU_NAMES = {
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA GB200": "gb200-186gb",
}


def gpu_of_process() -> GPU | None:
    """Returns the device of this process; None if its rates are not known."""
    import torch

    kind = GPU_NAMES.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if kind is None else GPUS.load(kind)


def find_gpu(config: Config) -> GPU | None:
    """Returns the device that --gpu names; None without the flag."""
    return None if config.training.gpu is None else GPUS.load(config.training.gpu)


def device_memory_bytes(config: Config) -> int | None:
    """Returns the memory of one device, from --gpu or --device-memory; None if neither is given."""
    gpu, gib = find_gpu(config), config.training.device_memory
    if gpu is not None:
        return gpu.memory_bytes
    return None if gib is None else round(gib * GIB)
