"""Compiles the Triton kernels for GPUs on a machine without GPU, and reads their resources from the code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.kernels import gated, grouped_linear
from megatron.kernels.attention import AttentionMask, flash_attention
from megatron.kernels.cross_entropy import (
    logit_statistics_and_gradient_op,
    logit_statistics_op,
    write_logit_gradient_op,
)
from megatron.kernels.dropout import ShardOffsets, fused_dropout_add, part_offsets, shard_offsets
from megatron.kernels.embedding import add_rows_op
from megatron.kernels.norms import copy_gradient_op, fused_norms
from megatron.kernels.operators import Launch
from megatron.kernels.rotary import Heads, split_and_rotate

ARCHITECTURES = (80, 90)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SEQ, HIDDEN = 2048, 5120


@dataclass(frozen=True)
class Variant:
    """A launch, and the dtypes of its tensors; None for a tensor that is left out."""

    name: str
    launch: Launch
    dtypes: tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Resources:
    """Of a thread: registers, and bytes of local memory for spilled registers (`spills`) and for the stack.
    Of a block: bytes of shared memory, which the launch asks for."""

    registers: int
    spills: int
    stack: int
    shared: int


def variants() -> Iterator[Variant]:
    """The launches of every kernel, as the operators make them on tensors of a run: each dtype, with and
    without the tensors that may be left out (of attention only with all of them), aligned and unaligned
    lengths, padded and unpadded heads, micro-batches of several samples and of one."""
    for label, work in (
        *_dropout_cases(),
        ("norms", lambda: fused_norms([torch.ones(5000), torch.ones(7)])),
        *_copy_cases(),
        *_embedding_cases(),
        *_attention_cases(),
        *_cross_entropy_cases(),
        *_rotary_cases(),
        *_gated_cases(),
        *_grouped_cases(),
    ):
        for launch, dtypes in _launches_of(work):
            kernel = launch.name.partition(".")[2].removesuffix("_kernel")
            kernel += ", backward" if launch.numbers.get("BACKWARD") else ""
            yield Variant(f"{label}: {kernel}", launch, dtypes)


def _launches_of(work: Callable[[], Any]) -> list[tuple[Launch, tuple[torch.dtype | None, ...]]]:
    """Returns the launches of `work`, which are not carried out, with the dtypes of their tensors."""
    launches = []

    def record(launch: Launch, *tensors: Tensor | None) -> None:
        launches.append((launch, tuple(None if tensor is None else tensor.dtype for tensor in tensors)))

    with patch.object(Launch, "__call__", record):
        result = work()
        if isinstance(result, Tensor) and result.requires_grad:
            result.sum().backward()
    return launches


def _tensor(dtype: str, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta", requires_grad=True)


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Case = tuple[str, Callable[[], Any]]


def _dropout_cases() -> Iterator[Case]:
    hidden, one_row = (SEQ, 4, HIDDEN), (1, 1, HIDDEN)

    def case(
        x: str, bias: str | None, residual: str | None, shape: tuple[int, ...], offsets: ShardOffsets | None
    ) -> Callable[[], Tensor]:
        assert offsets is not None
        return lambda: fused_dropout_add(
            _tensor(x, *shape),
            None if bias is None else _tensor(bias, shape[-1]),
            None if residual is None else _tensor(residual, *shape),
            _integers(offsets.batch),
            0.1,
            offsets,
        )

    whole = shard_offsets(torch.Size(hidden), 1, None, 0, 1)
    chunks = (range(SEQ), range(7 * SEQ, 8 * SEQ))
    for dtype in DTYPES:
        scores = torch.Size((2, 10, SEQ, SEQ))
        yield f"dropout {dtype}, scores", case(dtype, None, None, scores, shard_offsets(scores, 0, 1, 1, 4))
        yield f"dropout {dtype}", case(dtype, None, dtype, hidden, whole)
    yield "dropout bf16, fp32 residual", case("bf16", "bf16", "fp32", hidden, whole)
    yield "dropout bf16, bias", case("bf16", "bf16", "bf16", hidden, whole)
    sample = torch.Size((SEQ, 1, HIDDEN))
    yield "dropout bf16, 1 sample", case("bf16", "bf16", "bf16", sample, shard_offsets(sample, 1, None, 0, 1))
    yield "dropout bf16, 1 row", case("bf16", "bf16", "bf16", one_row, shard_offsets(sample, 1, 0, 1, SEQ))
    double = torch.Size((2 * SEQ, 4, HIDDEN))
    yield "dropout bf16, 2 chunks", case("bf16", None, "bf16", double, part_offsets(double, 1, 0, chunks))


def _copy_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        gradient, total, norm = _tensor(dtype, HIDDEN), _tensor("fp32", HIDDEN), torch.zeros(1).double()
        yield (
            f"norms, copied gradient {dtype}",
            lambda gradient=gradient, total=total, norm=norm: copy_gradient_op(gradient, total, norm),
        )


def _embedding_cases() -> Iterator[Case]:
    for dtype, tokens in (*((dtype, SEQ) for dtype in DTYPES), ("bf16", 1)):
        total, ids = _tensor("fp32", 50304, HIDDEN), _integers(tokens)
        rows = _tensor(dtype, tokens, HIDDEN)
        yield (
            f"embedding's gradient {dtype}, {tokens} tokens",
            lambda total=total, ids=ids, rows=rows: add_rows_op(total, ids, ids, rows),
        )


def _cross_entropy_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        logits, targets, rows = _tensor(dtype, 1024, 50304), _integers(1024), _tensor("fp32", 1024)
        yield (
            f"cross entropy {dtype}",
            lambda logits=logits, targets=targets: logit_statistics_and_gradient_op(
                logits, targets, 50257, 1e-3, 1e-4
            ),
        )
        # Over several ranks the gradient is written later, when the numbers of all are known.
        yield (
            f"cross entropy {dtype}, a rank's",
            lambda logits=logits, targets=targets: logit_statistics_op(logits, targets, 50257),
        )
        yield (
            f"cross entropy {dtype}, a rank's",
            lambda logits=logits, targets=targets, rows=rows: write_logit_gradient_op(
                logits, targets, rows, rows, 50257, 1e-3, 1e-4
            ),
        )


def _rotary_cases() -> Iterator[Case]:
    llama = Heads(groups=8, group=4, head_dim=128, rotary_dim=128, interleaved=0)
    for label, dtype, heads, batch, table_batch in (
        ("bf16", "bf16", llama, 1, 1),
        ("bf16, several samples", "bf16", llama, 4, 1),
        ("bf16, documents", "bf16", llama, 4, 4),
        ("bf16, a head per group", "bf16", llama._replace(group=1), 1, 1),
        ("bf16, a group per rank", "bf16", llama._replace(groups=1), 1, 1),
        ("bf16 80", "bf16", llama._replace(head_dim=80, rotary_dim=80), 4, 4),
        ("bf16, a quarter", "bf16", llama._replace(rotary_dim=32), 4, 4),
        ("fp16, interleaved", "fp16", llama._replace(interleaved=1), 4, 4),
        ("fp32", "fp32", llama, 1, 1),
    ):
        width = heads.groups * (heads.group + 2) * heads.head_dim
        projected = _tensor(dtype, SEQ, batch, width)
        table = _tensor("fp32", SEQ, table_batch, 1, heads.rotary_dim).detach()

        def work(projected: Tensor = projected, table: Tensor = table, heads: Heads = heads) -> Tensor:
            return sum(part.sum() for part in split_and_rotate(projected, table, table, heads))

        yield f"rotary {label}", work


def _gated_cases() -> Iterator[Case]:
    cases = [(activation, "bf16") for activation in gated.ACTIVATIONS]
    for activation, dtype in (*cases, ("swiglu", "fp16"), ("swiglu", "fp32")):
        wide = _tensor(dtype, SEQ, 1, 8 * HIDDEN)
        yield (
            f"gated {activation} {dtype}",
            lambda wide=wide, activation=activation: gated.gated_activation(wide, activation),
        )


def _grouped_cases() -> Iterator[Case]:
    """The products of a linear layer of experts, and its bias's gradient."""
    # dtype, experts, n_in, n_out: a layer of Qwen3-30B-A3B, and lengths that are no multiples of a tile.
    for dtype, experts, n_in, n_out in (("bf16", 128, 768, 2048), ("fp16", 8, 1000, 72), ("bf16", 1, 5, 1)):
        x, grad = _tensor(dtype, 4096, n_in), _tensor(dtype, 4096, n_out)
        weight, total = (_tensor(name, experts, n_out, n_in) for name in (dtype, "fp32"))
        bias, ends = _tensor(dtype, experts, n_out), _integers(experts, dtype=torch.int32)

        def work(
            x: Tensor = x,
            grad: Tensor = grad,
            weight: Tensor = weight,
            total: Tensor = total,
            bias: Tensor = bias,
            ends: Tensor = ends,
        ) -> None:
            grouped_linear.multiply_groups_op(x, weight, None, ends, 100, False)
            grouped_linear.multiply_groups_op(x, weight, bias, ends, 100, False)
            grouped_linear.multiply_groups_op(grad, weight, None, ends, 100, True)
            grouped_linear.multiply_within_groups_op(grad, x, ends)
            grouped_linear.add_products_within_groups_op(total, grad, x, ends)
            grouped_linear.sum_groups_op(grad, ends)

        yield f"grouped {dtype} {experts} x {n_out} x {n_in}", work


def _attention_cases() -> Iterator[Case]:
    """Attention with ALiBi, documents and dropout, which needs the most registers."""
    # dtype, size of a head (80 and 96 are padded to 128), tokens, samples, heads, groups, first head.
    for dtype, head_dim, seq, batch, heads, groups, first_head in (
        ("bf16", 128, SEQ, 2, 8, 2, 0),
        ("bf16", 128, SEQ, 1, 8, 8, 8),
        ("bf16", 128, SEQ, 1, 1, 1, 1),
        ("bf16", 128, SEQ - 1, 2, 8, 2, 0),
        ("bf16", 96, SEQ, 2, 8, 2, 0),
        ("bf16", 80, SEQ, 2, 8, 8, 0),
        ("bf16", 64, SEQ, 2, 8, 2, 0),
        ("bf16", 64, SEQ - 1, 1, 8, 8, 0),
        ("fp16", 128, SEQ, 2, 8, 2, 0),
        ("fp16", 64, SEQ, 2, 8, 8, 0),
        ("fp32", 128, SEQ, 2, 8, 2, 0),
        ("fp32", 64, SEQ, 2, 8, 8, 0),
    ):
        fused = _tensor(dtype, seq, batch, groups, heads // groups + 2, head_dim)
        ranges = _integers(batch, seq, dtype=torch.int32)
        slopes = _tensor("fp32", heads).detach()
        mask = AttentionMask(slopes, ranges, ranges, _integers(batch), 0.1, first_head)

        def work(fused: Tensor = fused, mask: AttentionMask = mask) -> Tensor:
            query, key, value = fused.split((fused.shape[3] - 2, 1, 1), dim=3)
            return flash_attention(query.flatten(2, 3), key.squeeze(3), value.squeeze(3), 0.1, mask)

        shape = f"{seq} tokens, {batch} x {heads} heads, {groups} groups"
        yield f"attention {dtype} {head_dim}, {shape}", work


def compile_variant(variant: Variant, architecture: int, **options: int) -> Resources:
    """Compiles for compute capability `architecture`, 90 for sm_90, with the specializations that Triton
    chooses for the launch. Fails in Triton's interpreter mode. options: further options of the compiler.

    Registers and stack are those in the machine code, as `cuobjdump --dump-resource-usage` of the triton
    package prints them. Spills are its LOCAL bytes and, as the assembler may keep spilled registers on the
    stack, 4 bytes for each local-memory instruction in the disassembly. Shared memory is not in the code: its
    size is that of the compiler's metadata.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    # Triton keeps what it knows of a device by the device's number.
    device = SimpleNamespace(
        get_current_device=lambda: architecture,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
    )
    driver.set_active(device)
    launch = variant.launch
    compiled = launch.kernel.warmup(
        *variant.dtypes, grid=launch.grid, **launch.numbers, **{**launch.options, **options}
    )
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _output(folder / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = _output(folder / "nvdisasm", "-c", file.name)
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    accesses = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    return Resources(
        registers=found["REG"],
        spills=found["LOCAL"] + 4 * accesses,
        stack=found["STACK"],
        shared=compiled.metadata.shared,
    )


def _output(*command: Any) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
