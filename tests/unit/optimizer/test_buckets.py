"""Layers are divided into buckets, starting from the last layer."""

import pytest

from megatron.optimizer.overlap import divide_into_buckets

CASES = {
    "no layers": ([], 1, []),
    "one bucket would hold all": ([10, 10, 10], 30, []),
    "the first bucket holds what is left": ([10, 10, 10], 20, [[0], [1, 2]]),
    "a bucket per layer": ([10, 10, 10], 1, [[0], [1], [2]]),
    "equal buckets": ([10, 10, 10, 10], 15, [[0, 1], [2, 3]]),
    "unequal layers": ([1, 1, 50, 1, 9], 10, [[0, 1], [2], [3, 4]]),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_divided(name):
    sizes, bucket_size, expected = CASES[name]
    assert [list(part) for part in divide_into_buckets(sizes, bucket_size)] == expected


@pytest.mark.parametrize("count", range(2, 12))
def test_every_layer_is_in_one_bucket(count):
    for bucket_size in range(1, 3 * count):
        buckets = divide_into_buckets([3] * count, bucket_size)
        assert [layer for part in buckets for layer in part] in ([], list(range(count)))
        assert all(3 * len(part) >= bucket_size for part in buckets[1:])
