"""Checks which files the ranks of a run with prepared indices open at their start and in a step, and which
files' status they read."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.data import index_stamp
from megatron.data.gpt_dataset import prepare_index_files
from megatron.data.index_stamp import IndexStamp
from megatron.data.splits import verify_token_files
from megatron.data.vocabulary import Vocabulary
from megatron.mpu.mesh import Mesh
from megatron.optimizer.batch_schedule import RunLength
from megatron.run import Run
from megatron.training.data import data_report, index_notes, open_data
from tests.support.layouts import GLOBAL_BATCH, SEQ, VOCAB, Row, config_of
from tests.support.pool import run_world
from tests.unit.data.token_files import write_documents

RANKS = 4
DATA_FILES = (".bin", ".idx", ".npy")
_opened: list[str] | None = None
_is_watched = False


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and str(arguments[0]).endswith((*DATA_FILES, ".json")):
        _opened.append(str(arguments[0]))


def start(words: tuple[str, ...]) -> tuple[list[str], list[str], list[str], int]:
    """Opens the data as `training.run` does, and reads the samples of one step, on a rank that is the first
    of its node.

    Returns (token files whose status the start asked for, files that the start opened, files that the step
    opened, number of descriptors of data files that are still open).
    """
    global _opened, _is_watched
    if not _is_watched:
        sys.addaudithook(_on_event)
        _is_watched = True
    rank = dist.get_rank()
    config = config_of(Row(dp=RANKS), data={"data_path": words, "num_workers": 0, "split": "1"})
    run = Run.from_config(config, Vocabulary(VOCAB, None))
    _opened = at_start = []
    try:
        with mock.patch.object(index_stamp, "statuses", side_effect=index_stamp.statuses) as statuses:
            if rank == 0:
                stamp = verify_token_files(config.data)
                stamp.write()
                run = replace(run, stamp=stamp)
                data_report(run)
                assert index_notes(run) == []
            dist.barrier()
            run = replace(run, stamp=run.stamp or IndexStamp(config.data))
            assert run.fingerprint["epochs"]
            data = open_data(replace(run, mesh=Mesh.from_config(config.parallel, rank)))
        assert data.train is not None
        _opened = in_step = []
        for _ in data.train.micro_batches(0, GLOBAL_BATCH):
            pass
    finally:
        _opened = None
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    asked = [
        path for call in statuses.call_args_list for path in call.args[0] if path.endswith((".bin", ".idx"))
    ]
    return asked, at_start, in_step, sum(target.endswith(DATA_FILES) for target in targets)


def test_a_rank_opens_only_the_data_sets_of_its_samples(tmp_path: Path) -> None:
    sets = [write_documents(tmp_path / f"set{index}", [[1] * 3 * SEQ] * 4) for index in range(50)]
    of_steps: list[int] = []
    for number in (10, 50):
        words = tuple(word for prefix in sets[:number] for word in ("1", prefix))
        config = config_of(Row(dp=RANKS), data={"data_path": words, "split": "1"})
        samples = RunLength.from_config(config).samples_per_split(config)
        stamp = verify_token_files(config.data)
        prepare_index_files(config.data, SEQ, config.training.seed, samples, stamp)
        results = run_world(RANKS, start, words)
        for rank, (asked, at_start, in_step, descriptors) in enumerate(results):
            assert sorted(asked) == sorted(
                prefix + end for prefix in sets[:number] for end in (".bin", ".idx")
            )
            # Rank 0 may have prepared indices, so the first rank of each other node reads the stamp again.
            assert at_start == [stamp.path] * (1 if rank == 0 else 2) and descriptors == 0
            # Each sample opens .idx twice (header, contents), .bin, and three index files.
            assert 0 < len(in_step) <= 6 * GLOBAL_BATCH // RANKS
        of_steps.append(sum(len(in_step) for _, _, in_step, _ in results))
    assert of_steps[0] == of_steps[1] == 6 * GLOBAL_BATCH
