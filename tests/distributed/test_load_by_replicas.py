"""Without ZeRO the replicas share the work of reading a checkpoint. All ranks learn what one rank finds."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.checkpoint.discovery import find_latest, open_checkpoint
from megatron.checkpoint.formats import native
from megatron.checkpoint.lineage.start import share_checkpoint
from megatron.checkpoint.manager import load_checkpoint
from megatron.errors import UserError
from tests.reference.shards import shard_of
from tests.support.checkpoints import FINGERPRINT, save_midway
from tests.support.file_accesses import file_accesses
from tests.support.layouts import Row, build_engine, config_of
from tests.support.many_ranks import ManyRanks
from tests.support.pool import run_world

STEPS = 2
SAVED = Row(pp=2, dp=2)
LOADED = Row(dp=4)
BYTES_PER_ELEMENT = 12


def state_of(engine) -> str:
    """Returns a digest of all master weights, moments and steps of a rank, in the order of the parameters'
    names."""
    digest = hashlib.sha256()
    for part in sorted(engine.optimizer.pieces(), key=lambda part: part.name):
        digest.update(f"{part.name} {part.step} ".encode())
        for state in sorted(part.values):
            digest.update(part.values[state].contiguous().numpy().tobytes())
    return digest.hexdigest()


def save(folder: Path) -> None:
    save_midway(SAVED, folder, STEPS)


def load(folder: Path) -> tuple[int, int, str]:
    """Loads the checkpoint. Returns (bytes that this rank read, bytes of the model's state, digest of the
    loaded state)."""
    engine = build_engine(config_of(LOADED))
    elements, num_bytes = native.elements, 0

    def counted(*args):
        nonlocal num_bytes
        found = elements(*args)
        num_bytes += found.nbytes
        return found

    with mock.patch.object(native, "elements", counted):
        load_checkpoint(engine, open_checkpoint(folder), FINGERPRINT)
    total = BYTES_PER_ELEMENT * sum(parameter.numel() for parameter in engine.optimizer.parameters)
    return num_bytes, total, state_of(engine)


def load_alone(folder: Path) -> str:
    engine = build_engine(config_of(Row()))
    load_checkpoint(engine, open_checkpoint(folder), FINGERPRINT)
    return state_of(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_world(SAVED.world_size, save, folder)
    return folder / f"global_step{STEPS}"


def test_each_of_four_replicas_reads_a_quarter(saved: Path) -> None:
    answers = run_world(LOADED.world_size, load, saved)
    (alone,) = run_world(1, load_alone, saved)
    total = answers[0][1]
    assert sum(num_bytes for num_bytes, _, _ in answers) == total
    assert all(0.2 * total < num_bytes < 0.3 * total for num_bytes, _, _ in answers)
    assert {state for _, _, state in answers} == {alone}


def load_with_an_error(folder: Path, error: Exception) -> str:
    """Loads the checkpoint while reads on rank 2 raise the error. Returns the error that this rank
    reports."""
    engine = build_engine(config_of(LOADED))

    def fails(*_):
        raise error

    faulty = mock.patch.object(native, "elements", fails if dist.get_rank() == 2 else native.elements)
    try:
        with faulty:
            load_checkpoint(engine, open_checkpoint(folder), FINGERPRINT)
    except UserError as found:
        return str(found)
    return ""


@pytest.mark.parametrize("error", [UserError("file 7 is damaged"), OSError(errno.EIO, "I/O error", "file 7")])
def test_an_error_of_one_replica_is_raised_on_all_ranks(error: Exception, saved: Path) -> None:
    answers = run_world(LOADED.world_size, load_with_an_error, saved, error)
    assert len(set(answers)) == 1 and "file 7" in answers[0]


def accesses_of_a_start(folder: Path) -> tuple[int, int, int, int, int]:
    """Opens the newest checkpoint as the first ranks of two nodes and one more rank. Returns the number of
    files in the checkpoint, then this rank's numbers of opened files, opens, folder listings and stats."""
    rank = dist.get_rank()
    with file_accesses(folder) as accesses:
        checkpoint = share_checkpoint(find_latest(folder) if rank == 0 else None, leads_node=rank < 2)
    assert checkpoint is not None
    opened = accesses.opened
    return len(checkpoint.run["files"]), len(opened), opened.total(), accesses.listed, accesses.stats


def test_only_rank_0_asks_for_the_size_of_every_file(tmp_path: Path) -> None:
    row = Row(tp=4, pp=4, dp=8, zero=1)
    ManyRanks(config_of(row, batch={"global_batch_size": 32}), shard_of).save(tmp_path)
    first, leader, other = run_world(3, accesses_of_a_start, tmp_path)
    files, _, _, _, stats = first
    assert files > 128 and files <= stats < 1.5 * files  # one stat per file, not two
    assert leader[1:4] == (1, 1, 1) and leader[4] <= 12  # run.json, one list of the folder, its format
    assert other[1:] == (0, 0, 0, 0)
