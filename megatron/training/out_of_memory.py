"""Writes the error of a rank that cannot allocate memory, with its measured memory and the flags that reduce
the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megatron.arguments import validate
from megatron.cluster.devices import allocator_settings
from megatron.cluster.exit_codes import RankStopped
from megatron.config import Config
from megatron.config.fields import setting_option, value_text
from megatron.config.sections.training import RECOMPUTE_MODULES, recomputation
from megatron.errors import UserError
from megatron.model.attention.choice import Implementation, training_attention
from megatron.pipeline.partition_method import parse_partition_method
from megatron.training.startup_report import local_memory
from megatron.units import GIB

_MAX_FLAGS = 3
UNPREDICTED = frozenset({"--use-bnb-optimizer", "--cpu-offload"})
"""Flags of `memory_flags` that change the training, or whose time the planner does not predict."""
# The memory is fragmented if the allocator reserves at least this fraction of the device without using it.
_FRAGMENTED_SHARE = 0.1
# Texts of a failed allocation in errors that are not a torch.OutOfMemoryError: of PyTorch's allocators (c10,
# ATen/cuda/Exceptions.h), of CUDA's libraries by their status (CUBLAS_STATUS_ALLOC_FAILED,
# CUDNN_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED), and of NCCL's "Last error"
# ("Cuda failure 2 'out of memory'" in its src/include/checks.h; older versions have no number).
_MESSAGE = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|Cuda failure.*'out of memory'"
    r"|STATUS_(INTERNAL_ERROR_(DEVICE|HOST)_)?ALLOC(ATION)?_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


@contextmanager
def explained_out_of_memory(config: Config | None = None, pipeline_rank: int = 0) -> Iterator[None]:
    """Raises RankStopped for an allocation that fails in the block. config: None before the model is built:
    when the process first uses its device, in the preflight, and while layers are timed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if config is None:
            sentence = (
                f"out of memory before the model was built: {_cause(error)}; check that no other process "
                "uses the device, and reduce --micro-batch-size if --partition-method profile was timing "
                "layers"
            )
        else:
            sentence = describe_out_of_memory(error, config, pipeline_rank)
        raise RankStopped(sentence) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is a failed allocation, on the device or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return _MESSAGE.search(str(error)) is not None


def describe_out_of_memory(error: BaseException, config: Config, pipeline_rank: int) -> str:
    """Returns one sentence: the allocation, the measured memory of this rank, and flags that reduce it."""
    measured = local_memory()
    total = get_accelerator().total_memory()
    found = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in measured.items())
    flags = [flag for flag, _ in islice(memory_flags(config), _MAX_FLAGS)]
    remedy = (
        f"{', '.join(flags)} (--dry-run with --gpu KIND or --device-memory GIB plans the memory with each)"
        if flags
        else "more devices"
    )
    return (
        f"out of memory: {_cause(error)}; measured on stage {pipeline_rank}: {found}, the device has "
        f"{total / GIB:.2f} GiB; try {_fragmentation_hint(measured, total)}{remedy}"
    )


def _cause(error: BaseException) -> str:
    """Returns the line of an error that describes the allocation. In errors of NCCL, it is the last line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next(filter(_MESSAGE.search, lines), lines[0]).strip().rstrip(". ")


def _fragmentation_hint(measured: dict[str, int], total: int) -> str:
    unused = measured.get("peak reserved", 0) - measured.get("peak allocated", 0)
    expandable = any("expandable_segments" in value for value in allocator_settings().values())
    if expandable or unused < _FRAGMENTED_SHARE * total:
        return ""
    return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (the memory is fragmented), "


def memory_flags(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (text of a flag with its value and the flags that it needs, configuration with the flag) for
    each flag that may reduce the memory and that the flags of the run allow. The model and the global batch
    sizes do not change.

    The flag that typically costs the least time comes first. (The planner sorts the flags by the time that it
    predicts.)
    """
    for change in _candidates(config):
        changed = config.with_settings(change)
        try:
            validate(changed)
        except UserError:
            continue
        given = {setting_option(name): value for name, value in change.items() if value}
        text = " ".join(name + ("" if one is True else f" {value_text(one)}") for name, one in given.items())
        removed = [setting_option(name) for name in change if config.value(name) and not change[name]]
        yield text + (f" without {' '.join(removed)}" if removed else ""), changed


def stores_scores(config: Config) -> bool:
    """Returns whether layers store attention scores, if the scores are not recomputed."""
    return training_attention(config) == Implementation.UNFUSED


def cheap_modules(config: Config) -> tuple[str, ...]:
    """Returns the modules of --recompute-modules that save memory: the modules that are recomputed already,
    attention scores if they are stored, and norms and activations without --compile (the compiler decides
    which of these to store)."""
    model, training = config.model, config.training
    wanted = set(training.recomputed_modules)
    wanted |= {"core_attn"} if stores_scores(config) else set()
    if not training.compile:
        wanted |= {"layernorm"} if model.normalizes_inputs else set()
        wanted |= {"mlp_act"} if model.has_dense_mlp else set()
        wanted |= set() if model.num_experts is None else {"moe_act"}
    return tuple(module for module in RECOMPUTE_MODULES if module in wanted)


def _candidates(config: Config) -> Iterator[Mapping[str, Any]]:
    """Yields dictionaries 'section.field' -> value of settings that may reduce the memory."""
    parallel, training, micro_batch = config.parallel, config.training, config.batch.micro_batch_size
    stage, last_stage = parallel.zero_stage + 1, 3 if parallel.pipeline_model_parallel_size == 1 else 1
    shards_more = parallel.dp_cp_size > 1 and stage <= last_stage
    if training.uses_cuda_graph:  # a CUDA graph keeps the memory of the activations between the passes
        yield {"training.cuda_graph_impl": "none"}
    if shards_more and stage == 1:
        yield {"parallel.zero_stage": stage}
    if config.model.num_experts is not None:
        yield {"parallel.expert_model_parallel_size": 2 * parallel.expert_model_parallel_size}
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    modules = cheap_modules(config)
    # Recomputes only the scores, because stored scores take most of the memory.
    if stores_scores(config) and not training.recomputes("core_attn"):
        modules = ("core_attn",)
    if not training.recomputes_layers and modules != training.recomputed_modules:
        yield recomputation(modules)
    if micro_batch > 1:
        yield {"batch.micro_batch_size": micro_batch // 2}
    if shards_more and stage > 1:
        yield {"parallel.zero_stage": stage}
    if training.recompute_granularity == "selective":
        yield {**recomputation(), "training.recompute_granularity": "full"}
    elif not training.recomputes_layers:
        yield {"training.checkpoint_activations": True}
    if config.is_long_enough_for(2 * parallel.context_parallel_size):
        yield {"parallel.context_parallel_size": 2 * parallel.context_parallel_size}
    # Experts need sequence parallelism with tensor parallelism.
    further = {} if config.model.num_experts is None else {"parallel.sequence_parallel": True}
    yield {"parallel.tensor_model_parallel_size": 2 * parallel.tensor_model_parallel_size, **further}
    if not parse_partition_method(parallel.partition_method).stages:
        yield {"parallel.pipeline_model_parallel_size": 2 * parallel.pipeline_model_parallel_size}
    if not parallel.cpu_offload:
        # 8-bit moments are proposed only with the embedding norm: a published run without it stagnated.
        if config.model.embed_layernorm and not config.optimizer.use_bnb_optimizer:
            yield {"optimizer.use_bnb_optimizer": True}
        yield {"parallel.cpu_offload": True}
