"""Many ranks, which are threads of one process, exchange whole matrices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter
from megatron.optimizer import whole_matrices
from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.matrix_optimizer import MatrixUpdate
from megatron.optimizer.whole_matrices import WholeMatrices
from tests.reference.shards import shard_of
from tests.support import HANG_TIMEOUT_S

# Fused and plain matrices, sharded along rows, along columns, and replicated.
LAYER = {
    "query_key_value": ParameterSpec((8 * 4 * 2, 16), (Shard(0),), matrix_rows=(4, 2, 2)),
    "dense": ParameterSpec((16, 32), (Shard(1),), matrix_rows=(16,)),
    "gated": ParameterSpec((2 * 24, 16), (Shard(0, parts=2),), matrix_rows=(24, 24)),
    "replicated": ParameterSpec((8, 16), matrix_rows=(8,)),
}
SPECS = {f"{layer}.{name}": spec for layer in range(5) for name, spec in LAYER.items()}


class Network:
    """Replaces `torch.distributed` for `size` threads. A thread passes its rank as process group."""

    def __init__(self, size: int) -> None:
        self._barrier, self._sent = Barrier(size, timeout=HANG_TIMEOUT_S), [()] * size

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_lengths: list, sent_lengths: list, group: int
    ) -> None:
        self._sent[group] = sent.split(sent_lengths)
        self._barrier.wait()
        parts = [self._sent[rank][group] for rank in range(len(self._sent))]
        assert [part.numel() for part in parts] == received_lengths
        torch.cat(parts, out=received)
        self._barrier.wait()


def direction(matrix: Tensor) -> Tensor:
    """Returns a matrix whose elements depend on the whole `matrix` and on their own position."""
    places = torch.arange(matrix.numel(), dtype=torch.float32).view(matrix.shape)
    return matrix.float().norm() * places + matrix.shape[0] * matrix.float()


UPDATE = MatrixUpdate(direction, torch.float32, lambda rows, columns: rows / columns)


def momentum(name: str) -> Tensor:
    seed = list(SPECS).index(name)
    return torch.randn(SPECS[name].global_shape, generator=torch.Generator().manual_seed(seed))


class Rank:
    """A rank of the stage, whose gradients are the momentum of two groups of matrices."""

    def __init__(self, rank: int, tp_size: int, dp_size: int, zero: int) -> None:
        mesh = Mesh(tp_size, 1, dp_size, rank)
        # A thread passes its rank as process group.
        along = (("tp",), ("dp",), ("dp", "cp", "tp"))
        sets = {mesh.ranks_along(names, other) for names in along for other in range(tp_size * dp_size)}
        groups: Any = {ranks: rank for ranks in sets if len(ranks) > 1}
        self.mesh = replace(mesh, groups=groups)
        self.names = [list(SPECS)[:9], list(SPECS)[9:]]
        self.flats = []
        for names in self.names:
            group = {
                "params": [new_parameter(SPECS[name], self.mesh.tp) for name in names],
                "matrices": True,
            }
            self.flats.append(FlatGroup(group, self.mesh.dp_cp, bool(zero)))
            for parameter, name in zip(self.flats[-1].parameters, names, strict=True):
                values = shard_of(SPECS[name], momentum(name), self.mesh.axes).reshape(-1)
                self.flats[-1].full_grad(parameter).copy_(values)
        self.matrices = WholeMatrices(self.flats, self.mesh, UPDATE)

    def owned(self) -> dict[str, tuple[int, Tensor]]:
        """Returns the first element of each matrix in this rank's partition, and the elements."""
        return {
            name: (flat.first_element(parameter), flat.owned_grad(parameter))
            for flat, names in zip(self.flats, self.names, strict=True)
            for parameter, name in zip(flat.parameters, names, strict=True)
            if flat.fragment(parameter) is not None
        }


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "zero"),
    [(1, 1, 0), (4, 6, 1), (4, 6, 0), (1, 32, 1), (8, 3, 1), (8, 1, 0), (1, 3, 0)],
)
def test_each_rank_gets_the_updates_of_its_elements(tp_size: int, dp_size: int, zero: int) -> None:
    size = tp_size * dp_size
    ranks = [Rank(rank, tp_size, dp_size, zero) for rank in range(size)]
    with mock.patch.object(whole_matrices, "dist", Network(size)), ThreadPoolExecutor(size) as threads:
        for _ in threads.map(lambda rank: rank.matrices.run(), ranks):
            pass
    found = {name: 0 for name in SPECS}
    for rank in ranks:
        for name, (first, elements) in rank.owned().items():
            expected = UPDATE.apply(momentum(name), SPECS[name].matrix_rows)
            expected = shard_of(SPECS[name], expected, rank.mesh.axes).reshape(-1)
            assert torch.equal(elements, expected[first : first + elements.numel()])
            found[name] += elements.numel()
    copies = {
        name: (1 if zero else dp_size) * (1 if spec.sharding else tp_size) for name, spec in SPECS.items()
    }
    assert found == {
        name: copies[name] * spec.global_shape[0] * spec.global_shape[1] for name, spec in SPECS.items()
    }


def test_the_owners_have_about_equal_work_and_rank_0_the_most() -> None:
    specs = [ParameterSpec((rows, 64), (Shard(0),), matrix_rows=(rows,)) for rows in (64, 192, 256, 256) * 12]
    cost = [spec.global_shape[0] * 64 * 64 for spec in specs]
    work = [0] * 16
    for owner, of_matrix in zip(whole_matrices._owners(specs, 16), cost, strict=True):
        work[owner] += of_matrix
    assert max(work) == work[0] and max(work) <= sum(work) / 16 + max(cost) / 4
