"""Compiles the Triton kernels for GPUs on a machine without GPU, and reads their resources from the code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)
# PyTorch allocates at multiples of 16 bytes and more; triton compiles a variant for such arguments.
_ALIGNED = [["tt.divisibility", 16]]
_POINTERS = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16"}


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments. constants: values of the `constexpr` arguments; None for a
    tensor that is left out. unaligned: arguments that are not multiples of 16. ones: integers that are 1 in
    the launch, for which triton compiles another kernel, with constants."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    unaligned: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """Of a thread: registers, and bytes of local memory for spilled registers (`spills`) and for the stack.
    Of a block: bytes of shared memory, which the launch asks for."""

    registers: int
    spills: int
    stack: int
    shared: int


def variants() -> Iterator[Variant]:
    """What runs launch, of every kernel: each dtype, with and without the tensors that may be left out (of
    attention only with all of them), aligned and unaligned lengths, padded and unpadded heads, micro-batches
    of several samples and of one."""
    yield from _dropout_variants()
    yield from _norm_variants()
    yield from _embedding_variants()
    yield from _attention_variants()
    yield from _cross_entropy_variants()
    yield from _rotary_variants()
    yield from _gated_variants()


# A shard of one row, or one that begins at the second row.
_EDGE = ("rows", "first_row", "first_column")


def _dropout_variants() -> Iterator[Variant]:
    from megatron.kernels import dropout as module
    from megatron.kernels import triton_kernels

    tile = {"BLOCK_ROWS": module.BLOCK_ROWS, "BLOCK_COLUMNS": module.BLOCK_COLUMNS}
    numbers = dict.fromkeys(
        "rows columns batch inner outer_stride first_row first_column dropped_below".split(), "i32"
    )
    # With context parallelism `split` is an i32.
    numbers |= {"split": "i64", "second_first_row": "i32"}
    small = ("batch", "dropped_below")
    # Hidden states [seq, batch, hidden] have no dimension between batch and hidden.
    hidden = ("inner", "outer_stride")
    for label, x, bias, residual, out, ones in (
        ("dropout fp32", "fp32", None, None, "fp32", ()),
        ("dropout bf16", "bf16", None, None, "bf16", ()),
        ("dropout bf16 of a hidden state", "bf16", None, None, "bf16", hidden),
        ("dropout fp16", "fp16", None, None, "fp16", ()),
        ("dropout bf16, fp32 gradient", "fp32", None, None, "bf16", ()),
        ("dropout + residual bf16", "bf16", None, "bf16", "bf16", hidden),
        ("dropout + residual fp32", "fp32", None, "fp32", "fp32", hidden),
        ("dropout + bias + residual bf16", "bf16", "bf16", "bf16", "bf16", hidden),
        ("dropout + bias + residual bf16, 1 sample", "bf16", "bf16", "bf16", "bf16", (*hidden, "batch")),
        ("dropout + bias + residual bf16, 1 row", "bf16", "bf16", "bf16", "bf16", (*_EDGE, *hidden, "batch")),
        ("dropout + bias + residual, fp32 residual", "bf16", "bf16", "fp32", "fp32", hidden),
    ):
        pointers = {"x": x, "bias": bias, "residual": residual, "out": out}
        absent: dict[str, Any] = {name: None for name, dtype in pointers.items() if dtype is None}
        types = {name: _POINTERS[dtype] for name, dtype in pointers.items() if dtype is not None}
        flags = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
        yield Variant(
            label,
            triton_kernels.dropout_add_kernel,
            {**types, "sample_keys": "*i64", **numbers, "scale": "fp32"},
            {**absent, **flags, **tile},
            module.OPTIONS,
            (*small, "scale"),
            ones,
        )


def _norm_variants() -> Iterator[Variant]:
    from megatron.kernels import norms as module
    from megatron.kernels import triton_kernels

    yield Variant(
        "norms: squares of chunks",
        triton_kernels.chunk_squares_kernel,
        {"starts": "*i64", "lengths": "*i32", "squares": "*fp64"},
        {"CHUNK": module.CHUNK},
        module.CHUNK_SQUARES_OPTIONS,
    )
    yield Variant(
        "norms: sums of chunks",
        triton_kernels.chunk_norms_kernel,
        {"squares": "*fp64", "first_chunks": "*i32", "norms": "*fp64"},
        {"BLOCK": module.BLOCK},
        module.CHUNK_NORMS_OPTIONS,
    )
    for dtype, gradient in _POINTERS.items():
        yield Variant(
            f"norms: copied gradient {dtype}",
            triton_kernels.copy_gradient_kernel,
            {"gradient": gradient, "total": "*fp32", "norm": "*fp64", "length": "i32"},
            {"BLOCK": module.COPY_BLOCK},
            module.COPY_OPTIONS,
        )


def _embedding_variants() -> Iterator[Variant]:
    from megatron.kernels import embedding as module
    from megatron.kernels import triton_kernels

    for dtype, ones in (*((dtype, ()) for dtype in _POINTERS), ("bf16", ("tokens",))):
        yield Variant(
            f"embedding's gradient {dtype}{', 1 token' if ones else ''}",
            triton_kernels.add_rows_kernel,
            {
                "total": "*fp32",
                "ids": "*i64",
                "order": "*i64",
                "rows": _POINTERS[dtype],
                "tokens": "i32",
                "width": "i32",
            },
            {"BLOCK": module.BLOCK},
            module.OPTIONS,
            ones=ones,
        )


def _cross_entropy_variants() -> Iterator[Variant]:
    from megatron.kernels import cross_entropy as module
    from megatron.kernels import triton_kernels

    numbers = {
        "columns": "i32",
        "num_valid_columns": "i32",
        "gradient_scale": "fp32",
        "z_loss_weight": "fp32",
    }
    unaligned = ("num_valid_columns", "gradient_scale", "z_loss_weight")
    for dtype, logits in _POINTERS.items():
        # Over several ranks the gradient is written later, when the numbers of all are known.
        for with_gradient, ones in ((True, ()), (False, ()), (True, ("rows",))):
            yield Variant(
                f"cross entropy{'' if with_gradient else ', no gradient'} {dtype}{', 1 row' if ones else ''}",
                triton_kernels.logit_statistics_kernel,
                {"logits": logits, "targets": "*i64", "found": "*fp32", "rows": "i32", **numbers},
                {"WITH_GRADIENT": with_gradient, "BLOCK": module.BLOCK},
                module.OPTIONS,
                unaligned,
                ones,
            )
        yield Variant(
            f"cross entropy, gradient {dtype}",
            triton_kernels.write_gradient_kernel,
            {"logits": logits, "targets": "*i64", "largest": "*fp32", "exp_sums": "*fp32", **numbers},
            {"BLOCK": module.BLOCK},
            module.OPTIONS,
            unaligned,
        )


def _rotary_variants() -> Iterator[Variant]:
    from megatron.kernels import rotary as module
    from megatron.kernels import triton_kernels

    llama = module.Heads(groups=8, group=4, head_dim=128, rotary_dim=128, interleaved=0)
    tensors = ("projected", "query", "key", "value", "cosine", "sine")
    for label, dtype, heads, ones in (
        ("bf16", "bf16", llama, ("batch", "table_batch")),
        ("bf16, several samples", "bf16", llama, ("table_batch",)),
        ("bf16, documents", "bf16", llama, ()),
        ("bf16, a head per group", "bf16", llama._replace(group=1), ("batch", "group", "table_batch")),
        ("bf16, a group per rank", "bf16", llama._replace(groups=1), ("batch", "groups", "table_batch")),
        ("bf16 80", "bf16", llama._replace(head_dim=80, rotary_dim=80), ()),
        ("bf16, a quarter", "bf16", llama._replace(rotary_dim=32), ()),
        ("fp16, interleaved", "fp16", llama._replace(interleaved=1), ()),
        ("fp32", "fp32", llama, ("batch", "table_batch")),
    ):
        for backward in (False, True):
            yield Variant(
                f"rotary {label}{', backward' if backward else ''}",
                triton_kernels.rotary_kernel,
                {
                    **dict.fromkeys(tensors, _POINTERS[dtype]),
                    **dict.fromkeys(("batch", "groups", "group", "table_batch"), "i32"),
                },
                {"BACKWARD": backward, **module.kernel_constants(heads)},
                module.OPTIONS,
                ("batch", "groups", "group", "table_batch"),
                ones,
            )


def _gated_variants() -> Iterator[Variant]:
    from megatron.kernels import gated as module
    from megatron.kernels import triton_kernels

    cases = [(activation, "bf16") for activation in module.ACTIVATIONS]
    for activation, dtype in (*cases, ("swiglu", "fp16"), ("swiglu", "fp32")):
        constants = {"ACTIVATION": activation, "BLOCK": module.BLOCK}
        for backward in (False, True):
            tensors = ("grad", "wide", "grad_wide") if backward else ("wide", "out")
            kernel = (
                triton_kernels.gated_activation_backward_kernel
                if backward
                else triton_kernels.gated_activation_kernel
            )
            yield Variant(
                f"gated {activation} {dtype}{', backward' if backward else ''}",
                kernel,
                {**dict.fromkeys(tensors, _POINTERS[dtype]), "width": "i32"},
                constants,
                module.OPTIONS,
            )


_ATTENTION_TYPES = {
    **dict.fromkeys(("log_sums", "row_sums", "slopes"), "*fp32"),
    **dict.fromkeys(("first_keys", "end_queries"), "*i32"),
    **dict.fromkeys(("sample_keys", "row_keys"), "*i64"),
    **dict.fromkeys(("scale", "keep_scale"), "fp32"),
}
_ATTENTION_TENSORS = ("query", "key", "value", "out", "grad", "grad_query", "grad_key", "grad_value")
_UNALIGNED = ("batch", "heads", "group", "first_head", "dropped_below", "scale", "keep_scale")
# dtype, size of a head (80 and 96 are padded to 128), whether the sequence is a multiple of 16 tokens, and
# what is 1: the micro-batch and, without grouped queries, the heads of a group; on TP rank 1, with a head per
# rank, the number of the first head.
_ATTENTION_SIZES: tuple[tuple[str, int, bool, tuple[str, ...]], ...] = (
    ("bf16", 128, True, ()),
    ("bf16", 128, True, ("batch", "group")),
    ("bf16", 128, True, ("batch", "group", "heads", "first_head")),
    ("bf16", 128, False, ()),
    ("bf16", 96, True, ()),
    ("bf16", 80, True, ("group",)),
    ("bf16", 64, True, ()),
    ("bf16", 64, False, ("batch", "group")),
    ("fp16", 128, True, ()),
    ("fp16", 64, True, ("group",)),
    ("fp32", 128, True, ()),
    ("fp32", 64, True, ("group",)),
)


def _attention_variants() -> Iterator[Variant]:
    """The attention kernels with ALiBi, documents and dropout, which need the most registers."""
    import torch
    import triton

    from megatron.kernels import attention as module
    from megatron.kernels import attention_triton

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    kernels = {
        "forward": attention_triton.attention_forward_kernel,
        "query": attention_triton.attention_backward_query_kernel,
        "key": attention_triton.attention_backward_key_kernel,
    }
    for dtype, head_dim, aligned, ones in _ATTENTION_SIZES:
        for name, kernel in kernels.items():
            tiles = module.tiles(name, dtypes[dtype], head_dim)
            flags = dict.fromkeys(("HAS_SLOPES", "HAS_RANGES", "HAS_DROPOUT"), True)
            block_dim = triton.next_power_of_2(head_dim)
            constants = {"HEAD_DIM": head_dim, "BLOCK_DIM": block_dim, **flags, **tiles.constants}
            types = {
                argument: _POINTERS[dtype]
                if argument in _ATTENTION_TENSORS
                else _ATTENTION_TYPES.get(argument, "i32")
                for argument in kernel.arg_names
                if argument not in constants
            }
            label = f"attention {'forward' if name == 'forward' else f'backward, {name}'} {dtype} {head_dim}"
            label += ("" if aligned else ", any length") + (f", {len(ones)} x 1" if ones else "")
            unaligned = _UNALIGNED if aligned else (*_UNALIGNED, "queries", "keys", "seq")
            yield Variant(label, kernel, types, constants, tiles.options, unaligned, ones)


def compile_variant(variant: Variant, architecture: int) -> Resources:
    """Compiles for compute capability `architecture`, 90 for sm_90. Fails in Triton's interpreter mode.

    Registers and stack are those in the machine code, as `cuobjdump --dump-resource-usage` of the triton
    package prints them. Spills are its LOCAL bytes and, as the assembler may keep spilled registers on the
    stack, 4 bytes for each local-memory instruction in the disassembly. Shared memory is not in the code: its
    size is that of the compiler's metadata.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    types = {name: kind for name, kind in variant.types.items() if name not in variant.ones}
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (index,): _ALIGNED
        for index, name in enumerate(names)
        if name in types and name not in variant.unaligned
    }
    ones = {name: 1 for name in variant.ones if name in names}
    constants = {(names.index(name),): value for name, value in {**variant.constants, **ones}.items()}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=dict(variant.options)
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
