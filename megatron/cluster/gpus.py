"""GPUs by name, for --gpu: memory, peak rates of matrix products, memory bandwidth.

Rates and bandwidths are those of NVIDIA's data sheets for the SXM modules, dense (without 2:4 sparsity):

    V100   "NVIDIA Tesla V100 GPU Accelerator", 2018 (SXM2; no bf16 and no TF32 units)
    A100   "NVIDIA A100 Tensor Core GPU", 1758950-r4, 2021 (SXM4; 1,555 and 2,039 GB/s)
    H100   "NVIDIA H100 Tensor Core GPU", 2022 (SXM5, HBM3)
    H200   "NVIDIA H200 Tensor Core GPU", 2024 (SXM5; the H100's rates)
    B200   "NVIDIA Blackwell Architecture Technical Brief", 2024 (HGX B200, 1,000 W)
    GB200  "NVIDIA GB200 NVL72" (one of its 72 GPUs, 1,200 W); the memory is an assumption

Memory is the total that the driver gives to programs, `torch.cuda.get_device_properties(0).total_memory`, as
PyTorch's out-of-memory errors print it in public issues. It is less than the data sheet's, and differs by up
to 0.1 GiB between drivers. None of these devices was at hand to measure.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.registries import GPUS
from megatron.units import GIB

_TERA = 1e12


@dataclass(frozen=True)
class GPU:
    """A device.

    memory_bytes: what programs can allocate. peak_flops: dense FLOP/s of matrix products by dtype ('fp32',
    'tf32', 'fp16', 'bf16'); a dtype without units of its own has the rate of fp32. bandwidth: bytes per
    second of the device memory.
    """

    memory_bytes: int
    peak_flops: dict[str, float]
    bandwidth: float

    def least_seconds(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """The roofline's time of an operation with these FLOPs in matrix products, which reads and writes
        `moved_bytes`: no kernel is faster."""
        return max(flops / self.peak_flops[dtype], moved_bytes / self.bandwidth)


def _gpu(memory_gib: float, fp32: float, tf32: float, fp16: float, bf16: float, bandwidth_tb_s: float) -> GPU:
    """fp32 to bf16: TFLOP/s."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return GPU(
        round(memory_gib * GIB), {name: rate * _TERA for name, rate in rates.items()}, bandwidth_tb_s * _TERA
    )


#                      GiB   fp32   tf32   fp16   bf16   TB/s
V100_16GB = _gpu(    15.77,  15.7,  15.7,   125,  15.7,   0.9)  # fmt: skip
V100_32GB = _gpu(    31.74,  15.7,  15.7,   125,  15.7,   0.9)  # fmt: skip
A100_40GB = _gpu(    39.50,  19.5,   156,   312,   312, 1.555)  # fmt: skip
A100_80GB = _gpu(    79.25,  19.5,   156,   312,   312, 2.039)  # fmt: skip
H100_80GB = _gpu(    79.11,    67, 494.7, 989.4, 989.4,  3.35)  # fmt: skip
H200_141GB = _gpu(  139.72,    67, 494.7, 989.4, 989.4,   4.8)  # fmt: skip
B200_180GB = _gpu(  178.35,    80,  1100,  2250,  2250,   8.0)  # fmt: skip
GB200_186GB = _gpu( 184.31,    80,  1250,  2500,  2500,   8.0)  # fmt: skip


def find_gpu(config: Config) -> GPU | None:
    """The device of --gpu."""
    return None if config.training.gpu is None else GPUS.load(config.training.gpu)


def device_memory_bytes(config: Config) -> int | None:
    """Memory of one device, from --gpu or --device-memory; None if neither is given."""
    gpu, gib = find_gpu(config), config.training.device_memory
    if gpu is not None:
        return gpu.memory_bytes
    return None if gib is None else round(gib * GIB)
