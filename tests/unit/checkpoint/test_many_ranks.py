"""A rank of a large run opens only the files that contain its part of the state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.formats.registry import open_reader
from megatron.optimizer.loaded_group import LoadedGroup
from tests.reference.shards import shard_of
from tests.support.file_accesses import file_accesses
from tests.support.layouts import Row, config_of
from tests.support.many_ranks import FACTORS, ManyRanks

BATCH = {"global_batch_size": 64, "micro_batch_size": 1}
# 24 layers make two layers per stage of the run that saves. The MLP has fused parts.
MODEL = {"num_layers": 24, "glu_activation": "swiglu"}
SAVED = {zero: Row(tp=4, pp=12, dp=8, zero=zero, precision="bf16") for zero in (0, 1)}
LAYOUTS = {
    "the layout of the checkpoint": Row(tp=4, pp=12, dp=8, zero=1, precision="bf16"),
    "its layout without ZeRO": Row(tp=4, pp=12, dp=8, zero=0, precision="bf16"),
    "TP 2, PP 4, DP 2": Row(tp=2, pp=4, dp=2, zero=1, precision="bf16"),
    "TP 1, PP 4, DP 8, without ZeRO": Row(tp=1, pp=4, dp=8, precision="bf16"),
    "one rank": Row(precision="bf16"),
}
# At most this many ranks of a layout read.
NUM_READERS = 24


def ranks_of(row: Row) -> ManyRanks:
    return ManyRanks(config_of(row, model=MODEL, batch=BATCH), shard_of)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[str | None]]]:
    """Returns ZeRO stage -> (folder of a checkpoint of 384 ranks, the file from which each element is
    read)."""
    folders = {zero: tmp_path_factory.mktemp(f"zero{zero}") for zero in SAVED}
    return {zero: (folder, ranks_of(SAVED[zero]).save(folder)) for zero, folder in folders.items()}


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("zero", SAVED)
def test_a_rank_opens_the_files_that_it_needs(zero: int, name: str, saved) -> None:
    folder, file_of = saved[zero]
    ranks = ranks_of(LAYOUTS[name])
    checkpoint = find_latest(folder)
    assert checkpoint is not None
    world_size = ranks.config.parallel.world_size
    read = torch.zeros(ranks.num_elements, dtype=torch.int64)
    for rank in range(0, world_size, max(1, world_size // NUM_READERS)):
        optimizer = ranks.optimizer(rank)
        with file_accesses(folder) as accesses:
            optimizer.read_by_name(open_reader(checkpoint).read_parameter, None, with_moments=True)
        numbers = numbers_read(ranks, rank, optimizer)
        read[numbers] += 1
        needed = {file_of[number] for number in numbers.unique().tolist()} - {None}
        assert accesses.opened.keys() == needed, (rank, accesses.opened.keys() ^ needed)
        assert set(accesses.opened.values()) == {1}, "a file is opened once"
        assert accesses.listed == 0 and accesses.stats == 0
    if world_size == 1:
        assert (read[1:] == 1).all()


def numbers_read(ranks: ManyRanks, rank: int, optimizer) -> torch.Tensor:
    """Returns the numbers of the elements that a rank has read. Asserts that every state has the rank's share
    of the elements."""
    mesh, found = ranks.mesh(rank), []
    for flat, group in zip(optimizer.flat, optimizer.param_groups, strict=True):
        fragments = LoadedGroup(flat, {}, group, False).fragments()
        for parameter, start, length in fragments:
            first = flat.first_element(parameter, start)
            shard = ranks.shard(optimizer.names[parameter], mesh.tp.rank).reshape(-1)
            expected = shard[first : first + length]
            for state, factor in FACTORS.items():
                values = flat.master if state == "fp32" else optimizer.optimizer.state[flat.master][state]
                assert torch.equal(values[start : start + length], expected * factor), (rank, state)
            found.append(expected)
    return torch.cat(found).long() if found else torch.zeros(0, dtype=torch.int64)


def test_the_replicas_of_a_run_without_zero_read_equal_shares(saved) -> None:
    ranks = ranks_of(LAYOUTS["its layout without ZeRO"])
    checkpoint = find_latest(saved[1][0])
    assert checkpoint is not None
    ranks_of_stage = [rank for rank in range(32) if ranks.mesh(rank).tp.rank == 1]
    shares = []
    for rank in ranks_of_stage:
        optimizer = ranks.optimizer(rank)
        optimizer.read_by_name(open_reader(checkpoint).read_parameter, None, with_moments=True)
        shares.append(numbers_read(ranks, rank, optimizer))
    everything = torch.cat([ranks.shard(name, 1).reshape(-1) for name in ranks.names_of_stage(0)]).long()
    numbers = torch.cat(shares)
    assert torch.equal(numbers.sort().values, everything.sort().values)
    assert max(map(len, shares)) < 1.25 * len(everything) / len(shares)
