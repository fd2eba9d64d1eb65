"""Compiles the Triton kernels without a GPU, and reads their resources from the code."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.kernels import attention, fp8, grouped_linear
from megatron.kernels.activation import GATED_ACTIVATIONS, fused_activation, gated_activation
from megatron.kernels.attention import AttentionMask, flash_attention
from megatron.kernels.cross_entropy import (
    logit_statistics_and_gradient_op,
    logit_statistics_op,
    write_logit_gradient_op,
)
from megatron.kernels.dropout import (
    NO_DROPOUT,
    KernelMask,
    ShardOffsets,
    fused_dropout_add,
    part_offsets,
    shard_offsets,
)
from megatron.kernels.embedding import add_rows_op
from megatron.kernels.layer_norm import add_norm
from megatron.kernels.operators import Launch
from megatron.kernels.optimizer import copy_gradient_op, fused_adamw, fused_norms
from megatron.kernels.rotary import HeadNorms, Heads, split_and_rotate

ARCHITECTURES = (80, 90)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SEQ, HIDDEN = 2048, 5120


@dataclass(frozen=True)
class Variant:
    """A launch of a kernel and the dtypes of its tensors: None for an absent tensor. Numbers stay numbers."""

    name: str
    launch: Launch
    dtypes: tuple[torch.dtype | float | None, ...]
    grid: tuple[int, int] | None
    """The grid of the call; None if the launch object contains the grid."""

    @property
    def least_architecture(self) -> int:
        """Returns the first architecture with instructions for the dtypes."""
        return 89 if {torch.float8_e4m3fn, torch.float8_e5m2} & {*self.dtypes} else 80


@dataclass(frozen=True)
class Resources:
    """Resources of a thread (registers, bytes of local memory for spilled registers and for the stack) and of
    a block (bytes of shared memory). products: (rows, columns, inner length) of an instruction -> how often
    the warps execute it. The code contains the body of a loop once."""

    registers: int
    spills: int
    stack: int
    shared: int
    products: dict[tuple[int, int, int], int]

    @property
    def flops(self) -> int:
        return sum(2 * math.prod(shape) * count for shape, count in self.products.items())


def variants(architecture: int = 80) -> Iterator[Variant]:
    """Yields the launches of every kernel for tensors of a run on this architecture: each dtype, calls with
    and without optional tensors, aligned and unaligned lengths, padded and unpadded heads, micro-batches of
    one and of several samples."""
    for label, work in (
        *_dropout_cases(),
        ("norms", lambda: fused_norms([torch.ones(5000), torch.ones(7)])),
        *_copy_cases(),
        *_adam_cases(),
        *_embedding_cases(),
        *_attention_cases(),
        *_cross_entropy_cases(),
        *_rotary_cases(),
        *_gated_cases(),
        *_activation_cases(),
        *_layer_norm_cases(),
        *_grouped_cases(),
        *_fp8_cases(),
    ):
        for launch, *call in launches_of(work, architecture):
            kernel = launch.name.partition(".")[2].removesuffix("_kernel")
            yield Variant(f"{label}: {kernel}", launch, *call)


def launches_of(
    work: Callable[[], Any], architecture: int
) -> list[tuple[Launch, tuple[torch.dtype | float | None, ...], tuple[int, int] | None]]:
    """Returns the launches of `work` on a GPU of this architecture, without executing them: (launch, dtypes
    of its tensors, grid of the call or None)."""
    launches = []

    def record(
        launch: Launch, *arguments: Tensor | float | None, grid: tuple[int, int] | None = None
    ) -> None:
        launches.append((launch, tuple(x.dtype if isinstance(x, Tensor) else x for x in arguments), grid))

    with (
        patch.object(Launch, "__call__", record),
        patch.object(attention, "compute_capability", lambda _: architecture),
    ):
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
            KernelMask(_integers(offsets.batch), 0.1, offsets),
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


def _adam_cases() -> Iterator[Case]:
    settings = {"factor": 0.5, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    for dtype in ("bf16", "fp16", None):
        state = [_tensor("fp32", SEQ * HIDDEN).detach() for _ in range(4)]
        rounded = None if dtype is None else _tensor(dtype, SEQ * HIDDEN).detach()
        yield (
            f"optimizer {dtype}",
            lambda state=state, rounded=rounded: fused_adamw(*state, rounded, **settings),
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
        # Over several ranks the gradient is written later, when the sums of all ranks are known.
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
        ("bf16, gates", "bf16", llama._replace(gates=4), 4, 4),
        ("fp16, interleaved", "fp16", llama._replace(interleaved=1), 4, 4),
        ("fp32", "fp32", llama, 1, 1),
    ):
        width = heads.groups * (heads.group + heads.gates + 2) * heads.head_dim
        projected = _tensor(dtype, SEQ, batch, width)
        table = _tensor("fp32", SEQ, table_batch, 1, heads.rotary_dim).detach()

        def work(projected: Tensor = projected, table: Tensor = table, heads: Heads = heads) -> Tensor:
            return sum(part.sum() for part in split_and_rotate(projected, table, table, heads))

        yield f"rotary {label}", work
        if label not in ("bf16", "bf16, a quarter", "bf16, gates", "fp16, interleaved", "fp32"):
            continue
        for is_rms in (True, False) if label == "bf16" else (False,):
            vectors = [_tensor(dtype, heads.head_dim) for _ in range(2 if is_rms else 4)]
            norms = HeadNorms(*(*vectors, None, None)[:4], 1e-6, not is_rms)

            def normed(
                projected: Tensor = projected,
                table: Tensor = table,
                heads: Heads = heads,
                norms: HeadNorms = norms,
            ) -> Tensor:
                return sum(part.sum() for part in split_and_rotate(projected, table, table, heads, norms))

            yield f"normed rotary {label}, {'RMS' if is_rms else 'layer'} norm", normed


def _gated_cases() -> Iterator[Case]:
    cases = [((activation,), "bf16") for activation in GATED_ACTIVATIONS]
    cases += [(("quick_geglu", 7.0, 1.0), "bf16"), (("swiglu",), "fp16"), (("swiglu",), "fp32")]
    for gate, dtype in cases:
        wide = _tensor(dtype, SEQ, 1, 8 * HIDDEN)
        yield (
            f"gated {' '.join(map(str, gate))} {dtype}",
            lambda wide=wide, gate=gate: gated_activation(wide, *gate),
        )


def _activation_cases() -> Iterator[Case]:
    for activation, dtype, has_bias in (
        ("gelu", "bf16", True),
        ("gelu_exact", "bf16", True),
        ("gelu", "fp16", False),
        ("gelu", "fp32", True),
    ):
        x, bias = _tensor(dtype, SEQ, 1, 4 * HIDDEN), _tensor(dtype, 4 * HIDDEN) if has_bias else None
        yield (
            f"activation {activation} {dtype}",
            lambda x=x, bias=bias, activation=activation: fused_activation(x, bias, activation),
        )


def _layer_norm_cases() -> Iterator[Case]:
    """Yields the widest norms with all sums over rows, and the norms of smaller models."""
    # (width, dtype, dtype of the residual, RMS norm, 1 + weight, adds x, drops with dropout)
    for width, dtype, residual_dtype, is_rms, zero_centered, adds, drops in (
        (8192, "bf16", "bf16", False, False, True, True),
        (8192, "bf16", "bf16", True, False, True, False),
        (8192, "bf16", "fp32", False, True, True, False),
        (4096, "bf16", "fp32", False, True, True, True),
        (HIDDEN, "bf16", "bf16", False, False, True, True),
        (4096, "bf16", "bf16", True, False, True, False),
        (4096, "bf16", "bf16", True, False, False, False),
        (2048, "fp16", "fp16", False, False, True, True),
        (2048, "fp32", "fp32", False, False, True, True),
        (768, "bf16", "bf16", False, False, False, False),
        (100, "bf16", "bf16", True, True, True, False),
    ):

        def work(
            width: int = width,
            dtype: str = dtype,
            residual_dtype: str = residual_dtype,
            is_rms: bool = is_rms,
            zero_centered: bool = zero_centered,
            adds: bool = adds,
            drops: bool = drops,
        ) -> Tensor:
            shape = (SEQ, 4, width)
            offsets = shard_offsets(torch.Size(shape), 1, None, 0, 1)
            assert offsets is not None
            x, bias = (_tensor(dtype, *size) if adds else None for size in (shape, (width,)))
            total, normed = add_norm(
                x,
                None if is_rms else bias,
                _tensor(residual_dtype, *shape),
                _tensor(dtype, width),
                None if is_rms else _tensor(dtype, width),
                1e-5,
                zero_centered,
                KernelMask(_integers(4), 0.1, offsets) if drops else NO_DROPOUT,
            )
            return total.sum() + normed.sum()

        kind = "RMS" if is_rms else "layer"
        label = f"{kind} norm {dtype} {width}, {residual_dtype} residual"
        yield f"{label}{', sum' * adds}{', dropout' * drops}", work


def _grouped_cases() -> Iterator[Case]:
    """Yields the products of a linear layer of experts, and the gradient of its bias."""
    # (dtype, experts, n_in, n_out): a layer of Qwen3-30B-A3B, then lengths that are not multiples of a tile.
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
            for beta in (0.0, 1.0):
                grouped_linear.add_products_within_groups_op(total, grad, x, ends, beta=beta)
            grouped_linear.sum_groups_op(grad, ends)

        yield f"grouped {dtype} {experts} x {n_out} x {n_in}", work


def _fp8_cases() -> Iterator[Case]:
    """Yields the quantization of activations and matrices, and products of linear layers and experts."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for label, dtype, whole in (("e4m3", e4m3, False), ("e5m2", e5m2, False), ("e5m2, tensors", e5m2, True)):

        def work(dtype: torch.dtype = dtype, whole: bool = whole) -> None:
            amax = torch.empty(1, device="meta") if whole else None
            x, matrices = _tensor("bf16", 4096, HIDDEN).detach(), _tensor("bf16", 8, 1024, HIDDEN).detach()
            bias, ends = _tensor("bf16", 8, 1024), _integers(8, dtype=torch.int32)
            rows = fp8.Quantized(
                torch.empty_like(x, dtype=dtype),
                torch.empty(1 if whole else (HIDDEN // fp8.BLOCK, len(x)), device="meta"),
            )
            into = fp8.empty_matrices(matrices.shape, e4m3, whole, device="meta")
            fp8.quantize_fp8_op(x, *rows, None, None, amax)
            fp8.quantize_fp8_op(matrices, *into.rows, *into.transposed, amax)
            fp8.multiply_fp8_op(*rows, *into.rows, bias, ends, 40, torch.bfloat16)
            one = fp8.Quantized(into.rows.codes[0], into.rows.scales if whole else into.rows.scales[0])
            with patch.object(fp8, "_has_scaled_mm", lambda *_: False):
                fp8.multiply_fp8_op(*rows, *one, bias[0], None, 32, torch.bfloat16)

        yield f"fp8 {label}", work


def _attention_cases() -> Iterator[Case]:
    # (dtype, head size, tokens, samples, heads, groups, first head). Head sizes 80 and 96 are padded to 128.
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
        shape = f"{seq} tokens, {batch} x {heads} heads, {groups} groups"
        yield (
            f"attention {dtype} {head_dim}, {shape}",
            partial(attention_work, dtype, head_dim, "adr", (seq, batch, heads, groups), first_head),
        )
    for dtype, head_dim, features in itertools.product(DTYPES, (128, 64), FEATURES):
        if dtype != "fp32" or features == "drsc":
            name = f"attention {dtype} {head_dim}, {FEATURES[features]}"
            yield name, partial(attention_work, dtype, head_dim, features)


FEATURES = {"": "plain", "d": "dropout", "r": "ranges of keys", "s": "sinks", "c": "capped scores"}
FEATURES["drsc"] = "sinks and all but ALiBi"


def attention_work(
    dtype: str,
    head_dim: int,
    features: str,
    sizes: tuple[int, int, int, int] = (SEQ, 2, 8, 2),
    first_head: int = 0,
) -> Tensor:
    """Runs attention on tensors without data. features: letters as in `FEATURES`, and a for ALiBi. The ranges
    of keys are documents or a window. sizes: (tokens, samples, heads, groups)."""
    seq, batch, heads, groups = sizes
    ranges = _integers(batch, seq, dtype=torch.int32) if "r" in features else None
    slopes = _tensor("fp32", heads).detach() if "a" in features else None
    sample_keys, dropout = (_integers(batch), 0.1) if "d" in features else (None, 0.0)
    mask = AttentionMask(slopes, ranges, ranges, sample_keys, dropout, first_head)
    mask = mask._replace(softcapping=50.0 if "c" in features else None)
    sinks = _tensor(dtype, heads) if "s" in features else None
    fused = _tensor(dtype, seq, batch, groups, heads // groups + 2, head_dim)
    query, key, value = fused.split((fused.shape[3] - 2, 1, 1), dim=3)
    return flash_attention(query.flatten(2, 3), key.squeeze(3), value.squeeze(3), 0.1, mask, sinks)


# Kernel of attention -> number of its matrix products, each with 2 * queries * keys * head size FLOPs.
ATTENTION_PRODUCTS = {name.removeprefix("attention_"): n for name, n in attention.PRODUCTS.items()}


def wasted_part(launch: Launch, found: Resources) -> float | None:
    """Returns the part of an attention kernel's FLOPs that its tiles compute in vain. Returns None for other
    kernels, and in fp32, which splits a product into three. Padding of the heads counts as needed."""
    kernel = launch.name.partition(".attention_")[2].removesuffix("_kernel")
    sizes = [launch.numbers.get(f"BLOCK_{name}") for name in ("QUERIES", "KEYS", "DIM")]
    if kernel not in ATTENTION_PRODUCTS or not found.flops or found.products.keys() & TF32_SHAPES:
        return None
    return 1 - 2 * ATTENTION_PRODUCTS[kernel] * math.prod(sizes) / found.flops


TF32_SHAPES = {(16, 8, 8), (16, 8, 4)}


def compile_variant(variant: Variant, architecture: int, **options: int) -> Resources:
    """Compiles a kernel with the specializations that Triton chooses for the launch. architecture: compute
    capability, 90 for sm_90. options: of the compiler. Fails in Triton's interpreter mode.

    Registers and stack are read from the machine code with `cuobjdump --dump-resource-usage` of the triton
    package. Spills are its LOCAL bytes and 4 bytes for each local-memory instruction in the disassembly,
    since the assembler may keep spilled registers on the stack. The size of shared memory comes from the
    compiler's metadata. A group of 4 warps executes an HGMMA instruction together. A single warp executes an
    HMMA instruction, which has 8 columns.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    # Triton caches what it knows of a device by the device's number.
    device = SimpleNamespace(
        get_current_device=lambda: architecture,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
    )
    driver.set_active(device)
    launch = variant.launch
    compiled = launch.kernel.warmup(
        *variant.dtypes, grid=variant.grid or launch.grid, **launch.numbers, **{**launch.options, **options}
    )
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _output(folder / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = _output(folder / "nvdisasm", "-c", file.name)
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    accesses = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    warps = compiled.metadata.num_warps
    products: Counter[tuple[int, int, int]] = Counter()
    for rows, columns, inner in re.findall(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", assembly):
        products[int(rows), int(columns), int(inner)] += warps // 4
    for inner in re.findall(r"\bHMMA\.168(\d+)", assembly):
        products[16, 8, int(inner)] += warps
    return Resources(
        registers=found["REG"],
        spills=found["LOCAL"] + 4 * accesses,
        stack=found["STACK"],
        shared=compiled.metadata.shared,
        products=products,
    )


def _output(*command: Any) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
