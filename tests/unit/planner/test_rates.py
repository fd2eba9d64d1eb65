"""Tests the planned time of a kernel: bounds, tiles, fused attention, and the best published MFU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from megatron.config.registries import GPUS
from megatron.planner.rates import RATES, UNALIGNED, best_published_mfu, kernel_seconds
from megatron.planner.simulation.passes import Kernel

# Fractions of the data sheet's rate that single large products reach (`megatron.planner.rates`).
MEASURED = {"v100": 0.90, "a100": 0.87, "h100": 0.80, "h200": 0.80, "b200": 0.78, "gb200": 0.78}
LENGTHS = (64, 200, 1024, 2048, 5120, 12288, 50176)


def seconds(kernel: Kernel, gpu: str = "a100-80gb", dtype: str = "fp16") -> float:
    return kernel_seconds(kernel, GPUS.load(gpu), RATES[gpu.partition("-")[0]], dtype)


def matmul(rows: float, columns: float, inner: float, batch: int = 1) -> Kernel:
    moved = 2 * batch * (rows * inner + inner * columns + rows * columns)
    return Kernel("mm", 2 * rows * columns * inner * batch, moved, (rows, columns, inner))


def attention(length: int, head: int, name: str = "flash_attention", factor: float = 2) -> Kernel:
    flops = factor * 8 * 16 * length**2 * head
    return Kernel(name, flops, 8 * 8 * 16 * length * head, (length, length, head))


@pytest.mark.parametrize("name", GPUS)
def test_no_product_is_faster_than_the_measured_ones_nor_than_its_bytes(name: str) -> None:
    gpu = GPUS.load(name)
    for shape in product(LENGTHS, repeat=3):
        kernel = matmul(*shape)
        time = seconds(kernel, name)
        assert time >= kernel.flops / (MEASURED[name.partition("-")[0]] * gpu.peak_flops["fp16"])
        assert time >= kernel.bytes / gpu.bandwidth


@pytest.mark.parametrize("name", GPUS)
def test_large_products_reach_most_of_the_rate_that_training_keeps_up(name: str) -> None:
    kernel = matmul(8192, 12288, 12288)
    rate = kernel.flops / seconds(kernel, name)
    assert 0.85 < rate / (RATES[name.partition("-")[0]].products * GPUS.load(name).peak_flops["fp16"]) < 1


@pytest.mark.parametrize("name", [name for name in GPUS if name[0] not in "va"])
def test_fp8_speeds_up_large_products_but_not_as_much_as_the_data_sheet_says(name: str) -> None:
    plain = matmul(8192, 14336, 4096)
    eight_bit = replace(plain, name="multiply_fp8", bytes=plain.bytes / 2)
    assert 1.2 < seconds(plain, name, "bf16") / seconds(eight_bit, name, "bf16") < 1.8


def test_a_product_takes_no_less_time_if_a_side_grows() -> None:
    for fixed in product((256, 1024, 4096), repeat=2):
        for place in range(3):
            shapes = [(*fixed[:place], length, *fixed[place:]) for length in range(8, 2000, 56)]
            times = [seconds(matmul(*shape)) for shape in shapes]
            assert all(later >= earlier for earlier, later in pairwise(times))


def test_one_tile_more_than_the_multiprocessors_costs_another_round() -> None:
    full, more = (seconds(matmul(256 * tiles, 128, 65536)) for tiles in (108, 109))
    assert more > 1.25 * full
    # A batch of products fills the multiprocessors like one larger product.
    assert seconds(matmul(1024, 1024, 1024, batch=27)) == pytest.approx(
        seconds(matmul(27 * 1024, 1024, 1024))
    )


def test_a_small_product_reaches_a_small_part_of_the_rate() -> None:
    small, large = matmul(128, 512, 512), matmul(4096, 4096, 4096)
    assert small.flops / seconds(small) < 0.2 * large.flops / seconds(large)


def test_products_of_unaligned_rows_are_slower_in_16_bit_only() -> None:
    aligned = matmul(4096, 4096, 4096)
    for alignment, part in UNALIGNED.items():
        unaligned = replace(aligned, alignment=alignment)
        assert seconds(unaligned) == pytest.approx(seconds(aligned) / part, rel=0.1)
        assert seconds(unaligned, dtype="fp32") == seconds(aligned, dtype="fp32")


def test_attention_takes_the_time_of_the_next_multiple_of_8_head_elements() -> None:
    assert seconds(attention(4096, 100)) == pytest.approx(seconds(attention(4096, 104)), rel=0.01)


def test_attention_is_faster_with_long_sequences_and_wide_heads_and_slower_backward() -> None:
    rates = [attention(length, 128).flops / seconds(attention(length, 128)) for length in (512, 2048, 16384)]
    assert rates[0] < rates[1] < rates[2] < 0.64 * 312e12
    for narrow, wide in pairwise((64, 96, 128)):
        assert 0.8 < seconds(attention(4096, wide)) * narrow / (seconds(attention(4096, narrow)) * wide) < 1
    backward = attention(4096, 128, "_scaled_dot_product_flash_attention_backward", factor=5)
    assert seconds(backward) > 2.5 * seconds(attention(4096, 128))


def test_attention_goes_by_the_name_of_its_implementation() -> None:
    names = (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "attention_forward",
        "_scaled_dot_product_efficient_attention",
    )
    times = [seconds(attention(8192, 128, name), "h100-80gb", "bf16") for name in names]
    assert (
        times[0] < 0.7 * times[1]
        and times[2] == pytest.approx(times[1], rel=0.1)
        and times[3] > 1.2 * times[1]
    )
    # A V100 has rates for only one implementation.
    assert len({seconds(attention(8192, 128, name), "v100-32gb") for name in names}) == 1
    unknown = Kernel("attention_forward", 1e12, 1e6)
    assert seconds(unknown) == pytest.approx(1e12 / (312e12 * RATES["a100"].attention["triton"].forward))


def test_other_kernels_move_their_bytes_and_the_smallest_takes_a_few_microseconds() -> None:
    assert seconds(Kernel("add", 0, 2.039e12)) == pytest.approx(1 / RATES["a100"].memory)
    assert seconds(Kernel("add", 0, 8)) == seconds(Kernel("mm", 16, 8, (2, 2, 2))) == RATES["a100"].shortest_s


def test_every_gpu_has_rates() -> None:
    assert set(RATES) == {name.partition("-")[0] for name in GPUS}


def test_the_best_published_mfu_is_that_of_the_nearest_size() -> None:
    assert best_published_mfu("a100-80gb", 13e9) == (61.1, "MosaicML's llm-foundry, 13B")
    assert best_published_mfu("a100", 12e9) == best_published_mfu("a100", 14e9)
    assert best_published_mfu("h100", 7e9) == (62.5, "NVIDIA's NeMo, 8B")
    assert best_published_mfu("gb200-186gb", 1e12) == (47.4, "NVIDIA's NeMo, 405B")
    assert best_published_mfu("h200", 70e9) == best_published_mfu("h100", 70e9)
    assert best_published_mfu("v100-32gb", 1e9) is None
