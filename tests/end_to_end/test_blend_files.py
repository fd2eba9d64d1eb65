"""Runs read a blend from a file (--data-args-path), limit the epochs of data sets, and have data sets that
are too small for a split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron.data.dataset_builder import IndexedDatasetBuilder
from tests.end_to_end.command import Run, pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT


def write(folder: Path, name: str, documents: int, tokens: int) -> str:
    with IndexedDatasetBuilder(folder / name, "uint16") as builder:
        for number in range(documents):
            builder.add_documents(np.arange(number, number + tokens) % 500, [tokens])
        builder.finalize()
    return str(folder / name)


def test_a_blend_file_is_limited_noted_recorded_and_compared(tmp_path: Path) -> None:
    """The run reads 20 samples of 32 tokens. The data set `small` has 3 samples in two epochs, but its weight
    asks for 15."""
    small, large = write(tmp_path, "small", 6, 11), write(tmp_path, "large", 90, 40)
    tiny = write(tmp_path, "tiny", 1, 9)
    blend = tmp_path / "blend.txt"
    blend.write_text(f"3 {small}\n1 {large}\n1 {tiny}\n")

    def run(*flags: str) -> Run:
        limits = ["--max-epochs-per-dataset", "2", "--max-epochs-action", "renormalize"]
        words = (
            f"--vocab-size 500 --split 8,2 --data-args-path {blend} --save {tmp_path}/s --load {tmp_path}/s"
        )
        return pretrain([*MODEL, *ABSOLUTE, *SHORT, *words.split(), *limits, *flags])

    log = run().ok().stdout
    few = "which have fewer tokens in it than a sample, 33"
    assert f"note: train leaves out 1 of 3 data sets, {few}: {tiny}\n" in log
    assert f"note: valid leaves out 1 of 3 data sets, {few}: {small}\n" in log
    assert f"note: valid leaves out 1 of 3 data sets, which have no tokens in it: {tiny}\n" in log
    assert "note: the train data are renormalized over 20 samples: 1 of 2 data sets" in log
    assert f"{small} (15 -> 3 samples)" in log
    (line,) = (line.split() for line in log.splitlines() if line.startswith("train ") and small in line)
    assert line[2:] == ["5", "55", "3", "15.0%", "1.75"]
    record = json.loads((tmp_path / "s" / "global_step5" / "run.json").read_text())
    assert record["data"]["weights"] == [3, 17] and record["data"]["paths"] == [small, large]
    assert record["config"]["data"]["data_path"] == ["3", small, "1", large, "1", tiny]
    (error,) = run("--train-iters", "6").errors
    assert (
        "the order of the samples would change" in error
        and "renormalized_over: 20 in the checkpoint, 24 now" in error
    )
    blend.write_text(f"3 {small}\n1 {large}\n4 {large}\n")
    (error,) = run().errors
    assert f"the train data name documents of {large} more than once" in error
    other = write(tmp_path, "other", 90, 40)
    blend.write_text(f"3 {small}\n1 {other}\n")
    (error,) = run().errors
    assert "was trained on other data" in error and "paths: " in error
    (error,) = run("--max-epochs-action", "stop", "--override-data").errors
    assert f"--max-epochs-action stop: training reads {small}" in error
