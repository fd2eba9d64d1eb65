"""The device of a process, and the variables that CUDA, PyTorch's allocator and Triton read."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from megatron.cluster.launch import node_name
from megatron.cluster.node_processes import private_temporary_folder
from megatron.config import ParallelConfig
from megatron.errors import UserError

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# The settings of PyTorch's allocator, by its current and former names.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


def device_index(local_rank: int, num_visible: int, env: Mapping[str, str] = os.environ) -> int:
    """The index of this process's device among the visible ones.

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

    DeepSpeed's engine selects the device LOCAL_RANK, which must be equal to mpirun's variable if that is set.
    Afterwards only `config.parallel.local_rank` has this process's rank on its node.
    """
    index = device_index(int(env["LOCAL_RANK"]), num_visible, env)
    for name in ("LOCAL_RANK", _MPI_LOCAL_RANK):
        if name in env:
            env[name] = str(index)
    return index


def device_id(accelerator: Any, index: int, env: Mapping[str, str] = os.environ) -> str:
    """A name that two processes have in common only if they use the same device; "" on a CPU."""
    if accelerator.device_name() == "cpu":
        return ""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    # Slices of one GPU (MIG) differ in the variable only.
    return f"{node_name(env)} {uuid} {env.get('CUDA_VISIBLE_DEVICES', '')}"


def set_max_connections(parallel: ParallelConfig, env: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS for the layout; returns a sentence if the user has set another value.

    With one hardware queue the GPU starts kernels in the order of their launches, so a tensor-parallel
    collective starts before the matrix product that it overlaps with (Megatron-LM requires this). The
    all-gathers of ZeRO-2 and 3 would wait for the computation instead. Call it before DeepSpeed is imported:
    the import initializes CUDA's driver to count devices.
    """
    if parallel.tensor_model_parallel_size == 1 or parallel.zero_stage >= 2:
        return None
    if env.setdefault(_CONNECTIONS, "1") == "1":
        return None
    return (
        f"{_CONNECTIONS} is {env[_CONNECTIONS]}: expected 1, so that tensor-parallel communication overlaps "
        "with matrix products"
    )


def set_library_defaults(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets what PyTorch and Triton read when they are imported, unless the user has set it.

    The allocator grows its segments, so that sizes that change (a batch-size ramp-up, a curriculum, an
    evaluation) do not fragment the memory. NCCL's calls record when they start, for the report of a hang.
    Triton keeps compiled kernels on the node: its default is the home folder, where hundreds of ranks on a
    network file system disturb each other (EBUSY, FileNotFoundError).
    """
    if not allocator_settings(env):
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    env.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    folder = private_temporary_folder()
    # Triton loads libraries from its cache. $TMPDIR may be on a network file system, too.
    if folder is not None and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
        env.setdefault("TRITON_CACHE_DIR", str(folder / "triton" / node_name(env)))


def allocator_settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that set PyTorch's allocator, by name."""
    return {name: env[name] for name in _ALLOCATOR_VARIABLES if name in env}
