"""Every kernel compiles for sm_80 and sm_90 without a GPU, and spills no register."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.end_to_end.command import ROOT

pytest.importorskip("triton")

LIST_VARIANTS = """
from tests.support.compiled_kernels import variants
print(*(variant.name for variant in variants()), sep="\\n")
"""
SPILLING = """
from tests.support.compiled_kernels import compile_variant, variants
variant = next(v for v in variants() if v.name.startswith("dropout bf16, bias"))
free, limited = compile_variant(variant, 90), compile_variant(variant, 90, maxnreg=24)
print(free.spills, limited.registers, limited.spills)
"""
TRANSLATED = """
from types import SimpleNamespace
from unittest.mock import patch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from tests.support.compiled_kernels import variants

class Translated(Exception):
    pass

def make_ir(*arguments):
    translate(*arguments)
    raise Translated

translate, target = ASTSource.make_ir, GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 90, get_current_stream=lambda _: 0, get_current_target=lambda: target
))
knobs.compilation.always_compile = True
with patch.object(ASTSource, "make_ir", make_ir):
    for variant in variants(90):
        launch = variant.launch
        settings = {**launch.numbers, **launch.options}
        try:
            launch.kernel.warmup(*variant.dtypes, grid=variant.grid or launch.grid, **settings)
        except Exception as error:
            print(variant.name, type(error).__name__, error.__cause__ or "")
"""
LAUNCHES = """
import torch
from benchmarks import host_time
from tests.support.compiled_kernels import variants
calls = []
with host_time.launches_without_device(lambda *arguments: calls.append(arguments)):
    for variant in variants():
        arguments = [torch.zeros(8, dtype=x) if isinstance(x, torch.dtype) else x for x in variant.dtypes]
        for _ in range(2):
            variant.launch(*arguments, grid=variant.grid)
# Grid and stream, and, after the kernel and the hooks of a launch, its arguments.
kinds = [[id(x) if isinstance(x, torch.Tensor) else x for x in (*call[:4], *call[9:])] for call in calls]
print(len(calls), kinds[::2] == kinds[1::2])
"""


def run_python(*arguments: str) -> str:
    """Runs Python in a separate process, since kernels that were defined for the interpreter cannot be
    compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["DS_ACCELERATOR"] = "cpu"  # DeepSpeed may write to stdout when it selects one
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


# Code for sm_80 also runs on consumer GPUs, whose blocks have 99 KiB. Blocks of an H100 have 227 KiB.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
KERNELS = {
    "dropout": 26,
    "norms": 5,
    "embedding": 4,
    "attention": 114,
    "cross entropy": 9,
    "rotary": 20,
    "normed rotary": 18,
    "gated": 18,
    "activation": 11,
    "layer norm": 25,
    "RMS norm": 12,
    "grouped": 21,
    "optimizer": 3,
    "fp8": 12,
}
NEEDS_90 = ("fp8",)
"""Kernels for GPUs of compute capability 8.9 or newer."""


def compiled(only: str, architecture: int) -> list[list[str]]:
    """Compiles the kernels whose names begin with `only`. Returns the rows of the table as lists of words."""
    arguments = ("--only", only, "--architectures", str(architecture))
    lines = run_python("benchmarks/kernels.py", *arguments).splitlines()
    # DeepSpeed writes a warning to stdout if it finds no GPU.
    heading, *rows = (line.split() for line in lines if "[WARNING]" not in line)
    assert heading[2:] == ["wasted", "narrowest", "registers", "shared", "bytes", "stack", "spills"]
    return rows


def test_triton_translates_every_variant() -> None:
    """The interpreter accepts Python code that Triton rejects, such as a function that returns a tuple with a
    None."""
    lines = run_python("-W", "ignore", "-c", TRANSLATED).splitlines()
    found = [line for line in lines if line and "[WARNING]" not in line]
    assert len(found) == sum(KERNELS.values())
    assert [line for line in found if not line.endswith(" Translated ")] == []


@pytest.mark.gate(rows=0, also=["embedding-90", "norms-80"])  # the kernels with the fewest variants
@pytest.mark.parametrize(
    ("kernel", "architecture"),
    [(kernel, number) for kernel in KERNELS for number in (90, 80) if number == 90 or kernel not in NEEDS_90],
)
def test_no_kernel_spills(kernel: str, architecture: int) -> None:
    rows = compiled(kernel, architecture)
    assert len(rows) == KERNELS[kernel]
    for row in rows:
        registers, shared, stack, spills = map(int, row[-4:])
        assert 0 < registers <= (255 if row[0] in ("attention", "grouped", "normed", "fp8") else 128), row
        assert shared <= SHARED_BYTES[architecture], row
        assert (stack, spills) == (0, 0), row
    if kernel == "attention":
        assert_no_product_is_repeated([row for row in rows if row[1] != "fp32"], architecture)


# Smallest number of columns of a product. On sm_90 a narrower product reads shared memory longer than it
# computes. On sm_80 a product always has 8 columns.
NARROWEST = {80: 8, 90: 64}


def assert_no_product_is_repeated(rows: list[list[str]], architecture: int) -> None:
    for row in rows:
        wasted, narrowest = row[-6:-4]
        assert 0 <= float(wasted.removesuffix("%")) <= 5, row
        assert int(narrowest.split("x")[1]) >= NARROWEST[architecture], row


def test_attention_repeats_no_product_on_hopper() -> None:
    rows = compiled("attention bf16 128, dropout", 90)
    assert len(rows) == 3
    assert_no_product_is_repeated(rows, 90)


@pytest.mark.full
def test_spills_are_found() -> None:
    """With few registers one kernel spills, and the reported numbers show it."""
    free, registers, limited = map(int, run_python("-c", SPILLING).split())
    assert free == 0
    assert registers <= 24
    assert limited > 0


@pytest.mark.full
def test_every_variant_is_in_a_row() -> None:
    names = run_python("-c", LIST_VARIANTS).splitlines()
    assert len(names) == sum(KERNELS.values())
    assert all(name.startswith(tuple(KERNELS)) for name in names)


def test_a_variant_gets_the_arguments_that_triton_passes_it() -> None:
    """Triton makes the first launch of each variant. The program makes the second launch without Triton's
    launcher, and must pass equal arguments."""
    *_, found = run_python("-W", "ignore", "-c", LAUNCHES).splitlines()
    assert found == f"{2 * sum(KERNELS.values())} True"
