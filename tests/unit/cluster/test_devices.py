"""The device of a process."""

from __future__ import annotations

import pytest

from megatron.cluster.devices import device_index, set_max_connections
from megatron.config import ConfigError, ParallelConfig


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3), (3, 8, 3)],  # 3, 1: srun --gpus-per-task=1
)
def test_device_is_chosen_among_the_visible_ones(local_rank: int, visible: int, expected: int) -> None:
    assert device_index(local_rank, visible) == expected


def test_fewer_devices_than_processes_are_one_sentence() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "n7"}
    with pytest.raises(ConfigError) as caught:
        device_index(2, 2, env)
    for part in ("LOCAL_RANK 2", "2 devices", "n7", "CUDA_VISIBLE_DEVICES=0,1", "--gpus-per-task=1"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "given", "expected", "noted"),
    [
        ({"tensor_model_parallel_size": 2}, None, "1", False),
        ({"tensor_model_parallel_size": 2}, "1", "1", False),
        ({"tensor_model_parallel_size": 2}, "8", "8", True),
        ({}, None, None, False),
        ({"tensor_model_parallel_size": 2, "zero_stage": 3}, None, None, False),
        ({"tensor_model_parallel_size": 2, "zero_stage": 1}, None, "1", False),
    ],
)
def test_max_connections_follow_the_layout_unless_set(parallel, given, expected, noted) -> None:
    env = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    note = set_max_connections(ParallelConfig(**parallel), env)
    assert env.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected and bool(note) is noted
