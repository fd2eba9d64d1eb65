"""The digest of an unsharded tensor depends on every value, but not on how ranks shard the tensor."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.host_digests import CHUNK
from megatron.mpu.mesh import Axis
from megatron.mpu.mix64 import mix64, mix64_in_place
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from tests.reference.shards import shard_of

WORD = 1 << 64
SPECS = {
    "replicated": ParameterSpec((24, 10)),
    "columns": ParameterSpec((24, 10), sharding=(Shard(0),)),
    "rows": ParameterSpec((10, 24), sharding=(Shard(1),)),
    "gated": ParameterSpec((24, 10), sharding=(Shard(0, parts=3),)),
    "bias": ParameterSpec((24,), sharding=(Shard(0),)),
    "longer than a chunk": ParameterSpec((256, CHUNK // 128 + 3), sharding=(Shard(0),)),
}


def digest(spec, full):
    return fragment_digests(spec, (), 0, {"fp32": full.reshape(-1)})["fp32"]


def values(spec, seed=0):
    return torch.randn(spec.global_shape, generator=torch.Generator().manual_seed(seed))


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel on a device, and returns 0 when the host reads a number.
    largest: bytes of the largest result."""

    count = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += 1
            self.largest = max(self.largest, result.nbytes)
        return result


def test_the_digests_of_a_7b_model_take_few_launches_and_little_memory_on_a_device():
    width = 4096
    layer = [ParameterSpec((rows * width, width), sharding=(Shard(0),)) for rows in (3, 4)]
    layer += [ParameterSpec((width, columns * width), sharding=(Shard(1),)) for columns in (1, 4)]
    layer += [ParameterSpec((width,))] * 2
    total = count = 0
    for spec, times in [
        *((spec, 32) for spec in layer),
        (ParameterSpec((50304, width), sharding=(Shard(0),)), 1),
    ]:
        shard = torch.empty(spec.global_shape, device="meta").view(-1)
        with Launches() as launches:
            fragment_digests(spec, (), 0, {"fp32": shard})
        total, count = total + times * shard.numel(), count + times * launches.count
        assert launches.largest <= 8 << 21
    assert total > 6.6e9 and count <= total / 100_000


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_sum_to_the_digest_of_the_global_tensor(spec, ranks):
    full = values(spec)
    expected = digest(spec, full)
    total = 0
    for rank in range(ranks if spec.sharding else 1):
        axes = [Axis("tp", rank, ranks)]
        shard = shard_of(spec, full, axes).reshape(-1)
        end = shard.numel() // 3  # as a ZeRO partition's end would
        for start, part in ((0, shard[:end]), (end, shard[end:])):
            total += fragment_digests(spec, axes, start, {"fp32": part})["fp32"]
    assert total % WORD == expected


@pytest.mark.parametrize("padded_rows", [104, 112, 128])
def test_padding_of_the_vocabulary_does_not_change_the_digest(padded_rows):
    used = ParameterSpec((101, 8), sharding=(Shard(0),), num_valid_rows=101)
    padded = ParameterSpec((padded_rows, 8), sharding=(Shard(0),), num_valid_rows=101)
    full = torch.full((padded_rows, 8), 7.0)
    full[:101] = values(used)
    assert digest(padded, full) == digest(used, full[:101])


def test_all_kinds_are_digested_together():
    spec = SPECS["rows"]
    weights, moments = values(spec), values(spec, seed=1)
    both = {"fp32": weights.reshape(-1), "exp_avg": moments.reshape(-1)}
    assert fragment_digests(spec, (), 0, both) == {
        "fp32": digest(spec, weights),
        "exp_avg": digest(spec, moments),
    }


def test_the_lowest_bit_of_any_element_counts():
    spec = SPECS["bias"]
    full = values(spec)
    digests = {digest(spec, full)}
    for index in range(full.numel()):
        changed = full.clone()
        changed.view(torch.int32)[index] ^= 1
        digests.add(digest(spec, changed))
    assert len(digests) == full.numel() + 1


def test_the_order_of_elements_and_the_sign_of_zero_count():
    spec = SPECS["bias"]
    full = values(spec)
    swapped = full.clone()
    swapped[[3, 17]] = full[[17, 3]]
    zeros = torch.zeros(24)
    assert digest(spec, full) != digest(spec, swapped)
    assert digest(spec, zeros) != digest(spec, -zeros)


def test_the_keys_on_a_cpu_are_the_keys_on_a_device() -> None:
    numbers = torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 12,))
    mixed = numbers.numpy().view(np.uint64).copy()
    mix64_in_place(mixed)
    assert torch.equal(torch.from_numpy(mixed.view(np.int64)), mix64(numbers))
