"""What differs between versions of torch and Triton, and the private names that the program uses.

The program runs with the versions in `SUPPORTED`; the tests use the versions in constraints.txt. A private
name can change with any version. `OPTIONAL` lists the names that the program replaces if they are missing.
`REQUIRED` lists the names without a replacement: if one is missing, the feature that needs it fails with one
sentence (`missing_name`). tests/unit/test_torch_versions.py finds private names that are not listed. Tools
that do not need torch import this module, so it imports torch only inside functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Package -> first and last supported version, without patch numbers.
SUPPORTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9)), "deepspeed": ((0, 19), (0, 19))}
# Versions of Triton whose `CompiledKernel.__getitem__`, `JITFunction.run` and CUDA launcher were read: a
# compiled variant takes all arguments of the kernel by position, constants too.
DIRECT_LAUNCH = ((3, 6), (3, 7), (3, 8), (3, 9))

OPTIONAL: Mapping[str, Mapping[str, str]] = {
    "each operator is called through PyTorch's dispatcher": {
        "torch.utils._python_dispatch": "is_in_torch_dispatch_mode"
    },
    "linear layers keep their input with `save_for_backward`": {
        "torch._C._autograd": "_top_saved_tensors_default_hooks",
        "torch.Tensor": "_version",
    },
    "the report of a hang lacks the pending calls, or the ranks of their groups": {
        "torch._C._distributed_c10d": "_dump_nccl_trace _dump_fr_trace",
        "torch.distributed.distributed_c10d": "_resolve_process_group",
    },
    "the log does not name the back end of scaled_dot_product_attention": {"torch": "_fused_sdp_choice"},
    "each rank that fails reports itself as the first": {
        "torch.distributed.distributed_c10d": "_get_default_store"
    },
}
"""What the program does if the names are missing -> module or class -> private names."""

_ENGINE = "deepspeed.runtime.pipe.engine.PipelineEngine"
REQUIRED: Mapping[str, Mapping[str, str]] = {
    "the simulated device (--dry-run, tools/plan.py)": {
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "tree_map tree_map_only",
        "torch.utils.backend_registration": ("_DummyBackendModule _setup_privateuseone_for_python_backend"),
        "torch._subclasses.fake_tensor": "FakeTensor in_kernel_invocation_manager",
        "torch.testing._internal.distributed.fake_pg": "FakeStore _create_fake_pg",
        "torch.distributed.distributed_c10d": "_resolve_process_group",
        "torch._C._distributed_c10d": "FakeWork",
        "torch._C": "_swap_tensor_impl",
        "torch.ScriptObject": "_type",
        "torch._ops.OpOverload()": "_schema",
        "torch.nn.Module": "_apply",
        "torch.nn.Module()": "_buffers _parameters",
        "torch.nn.Parameter()": "_is_param",
        "torch.UntypedStorage": "_cdata",
        "torch.ops.aten": (
            "_fused_rms_norm_backward _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention"
        ),
    },
    "attention with a window in bf16 or fp16 (set MEGATRON_KERNELS=pytorch)": {
        "torch.ops.aten": "_flash_attention_backward _flash_attention_forward"
    },
    "reading or writing a checkpoint": {
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
        "torch._utils": "_rebuild_tensor_v2",
        "torch.UntypedStorage": "_cdata",
        "torch.serialization()": "_checkpoint_offset",
    },
    "a checkpoint in PyTorch's distributed format": {
        "torch.distributed.checkpoint.filesystem": "_StorageInfo"
    },
    "training": {
        "deepspeed.runtime.engine.DeepSpeedEngine": "_broadcast_model _configure_optimizer",
        _ENGINE: (
            "_INSTRUCTION_MAP _aggregate_total_loss _exec_backward_pass _exec_forward_pass "
            "_exec_load_micro_batch _exec_recv_activations _exec_recv_grads _exec_reduce_grads "
            "_exec_reduce_tied_grads _exec_schedule _exec_send_activations _exec_send_grads "
            "_inference_schedule _loss_stage_global_rank _train_schedule"
        ),
        f"{_ENGINE}()": "_compute_loss",
        "deepspeed.runtime.pipe.module.PipelineModule": (
            "_build _partition_layers _set_bounds _synchronize_tied_weights"
        ),
        "deepspeed.runtime.pipe.module.PipelineModule()": "_local_start _topo",
    },
    "a benchmark": {
        "triton.compiler.CompiledKernel()": "_run",
        "triton.runtime.jit.JITFunction": "_do_compile",
    },
}
"""Feature -> module or class (with () for attributes of instances) -> private names that the feature
needs."""


def missing_name(error: Exception) -> str | None:
    """Returns a sentence for an error that is due to a missing name of `REQUIRED` in an unsupported version;
    None for all other errors."""
    found = {package: _minor(package) for package in SUPPORTED}
    problems = [
        f"{package} {'.'.join(map(str, found[package]))} (supported: {'.'.join(map(str, first))} to "
        f"{'.'.join(map(str, last))})"
        for package, (first, last) in SUPPORTED.items()
        if found[package] and not first <= found[package] <= last
    ]
    if problems and isinstance(error, (AttributeError, ImportError)):
        for feature, owners in REQUIRED.items():
            if error.name in [name for owner, names in owners.items() for name in (owner, *names.split())]:
                return f"{feature} does not run with {' and '.join(problems)}: {error}"
    return None


def _minor(package: str) -> tuple[int, ...]:
    """Returns the first two numbers of the installed version; () if the package is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(package))[:2]))
    except PackageNotFoundError:
        return ()


@cache
def launches_directly() -> bool:
    """Returns whether `kernels.operators.Launch` may call the compiled kernels of the installed Triton."""
    return _minor("triton") in DIRECT_LAUNCH


def interpreter_problem() -> str | None:
    """Returns why Triton's interpreter does not run; None if it runs."""
    if _minor("triton") == (3, 6) and _minor("numpy") >= (2, 4):
        return "the interpreter of triton 3.6 needs numpy 2.3 or older (pip install 'numpy<2.4')"
    return None


def all_gather_single(full: Any, part: Any, group: Any, async_op: bool = False) -> Any:
    """Calls `torch.distributed.all_gather_single`, or before torch 2.13 the function with its former name."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, part, group=group, async_op=async_op)


def reduce_scatter_single(part: Any, full: Any, group: Any, async_op: bool = False) -> Any:
    """Calls `torch.distributed.reduce_scatter_single`, or before torch 2.13 the function with its former
    name."""
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, full, group=group, async_op=async_op)
