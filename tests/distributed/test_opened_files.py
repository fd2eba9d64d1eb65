"""The files that the ranks of a run open when they start with prepared indices."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.config.batch import RunLength
from megatron.data.gpt_dataset import prepare_index_files
from megatron.data.splits import verify_token_files
from megatron.mpu.layout import ParallelLayout
from megatron.tokenizer.vocabulary import Vocabulary
from megatron.training.data import open_data, run_fingerprint
from tests.support.layouts import GLOBAL_BATCH, SEQ, VOCAB, Row, config_of
from tests.support.pool import run_world
from tests.unit.data.token_files import write_documents

RANKS = 4
_opened: list[str] | None = None
_is_watched = False


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and str(arguments[0]).endswith((".bin", ".idx", ".npy")):
        _opened.append(str(arguments[0]))


def start(words: tuple[str, ...]) -> tuple[list[str], list[str], int]:
    """Opens the data as `training.run` does, and reads the samples of one step. Returns the data files opened
    by the start and by the step, and the descriptors that are still open."""
    global _opened, _is_watched
    if not _is_watched:
        sys.addaudithook(_on_event)
        _is_watched = True
    rank = dist.get_rank()
    config = config_of(Row(dp=RANKS), data={"data_path": words, "num_workers": 0, "split": "1"})
    length = RunLength.from_config(config)
    _opened = at_start = []
    try:
        if rank == 0:
            verify_token_files(config.data).write()
        dist.barrier()
        run_fingerprint(config, length)
        layout = ParallelLayout.from_config(config.parallel, rank)
        data = open_data(config, layout, length, Vocabulary(VOCAB, None))
        assert data.train is not None
        _opened = in_step = []
        for _ in data.train.micro_batches(0, GLOBAL_BATCH):
            pass
    finally:
        _opened = None
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return at_start, in_step, sum(target.endswith((".bin", ".idx", ".npy")) for target in targets)


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
        assert [(at_start, descriptors) for at_start, _, descriptors in results] == [([], 0)] * RANKS
        for _, in_step, _ in results:
            # .idx twice (header, contents), .bin, and three index files for each of its samples.
            assert 0 < len(in_step) <= 6 * GLOBAL_BATCH // RANKS
        of_steps.append(sum(len(in_step) for _, in_step, _ in results))
    assert of_steps[0] == of_steps[1] == 6 * GLOBAL_BATCH
