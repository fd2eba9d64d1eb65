"""The table of GPUs, and the flags that choose one."""

from __future__ import annotations

import pytest

from megatron.cluster.devices import H100_80GB, device_memory_bytes, find_gpu
from megatron.config.cli import parse_args
from megatron.config.registries import GPUS
from megatron.errors import UserError
from megatron.units import GIB
from tests.unit.config.command_lines import SMALL


def config_of(*flags: str):
    return parse_args([*SMALL, "--dry-run", *flags], {})


@pytest.mark.parametrize("name", GPUS)
def test_a_device_offers_less_memory_than_its_name_says_and_no_rate_is_below_fp32(name):
    gpu = find_gpu(config_of("--gpu", name))
    nominal = int(name.split("-")[1].removesuffix("gb"))
    # 80 GB are 80 GiB less what the driver keeps, or for some devices 80e9 bytes.
    assert 0.98 * nominal * 1e9 < gpu.memory_bytes < nominal * GIB
    assert set(gpu.peak_flops) == {"fp32", "tf32", "fp16", "bf16"}
    assert min(gpu.peak_flops.values()) == gpu.peak_flops["fp32"]
    assert gpu.peak_flops["fp16"] == max(gpu.peak_flops.values())
    # FLOPs per byte at which a matrix product is bound by neither: 100 to 320 in 16 bit.
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
