"""Trains on blends of token files and weighted groups. Checks command line, losses and logs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.command import pretrain, scalars
from tests.end_to_end.flags import ABSOLUTE, MODEL, RAMPED, RAMPED_STEPS

FLAGS = [*MODEL, *ABSOLUTE, *RAMPED]


@pytest.fixture(scope="module")
def weighted(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns flags for two copies of the corpus. The run reads the first half of one, and the second half of
    the other."""
    folder = tmp_path_factory.mktemp("blend")
    for name in "ab":
        for ending in (".bin", ".idx"):
            shutil.copy(f"{data[1]}{ending}", folder / f"{name}{ending}")
    (folder / "valid.txt").write_text(
        f'"VALID_A: 1 0.5:0.7 {folder}/a" "BOTH: 3 0.7:0.8 {folder}/a, 1 0:0.2 {folder}/b"\n'
    )
    return [
        *("--train-weighted-split-paths", f"TRAIN: 0.3 0:0.5 {folder}/a, 0.7 0.5:1 {folder}/b"),
        *("--valid-weighted-split-paths-path", str(folder / "valid.txt")),
        *("--test-weighted-split-paths", f"TEST: 1 0.8:1 {folder}/a"),
        *data[4:],
    ]


@pytest.mark.full
def test_a_blend_is_the_same_run_on_every_layout_and_after_a_resume(
    weighted: list[str], tmp_path: Path
) -> None:
    uninterrupted = pretrain([*FLAGS, *weighted, "--tensorboard-dir", str(tmp_path / "tensorboard")]).ok()
    assert len(uninterrupted.steps) == RAMPED_STEPS
    names = ["VALID_A", "BOTH"]
    moments = [(name, f"iteration {n}") for n in (6, 12, 18) for name in names]
    moments += [(name, f"the end of training for val data, iteration {RAMPED_STEPS}") for name in names]
    moments += [("TEST", f"the end of training for test data, iteration {RAMPED_STEPS}")]
    assert [(line["name"], line["at"]) for line in uninterrupted.evaluations] == moments
    assert uninterrupted.evaluations[0]["lm_loss"] != uninterrupted.evaluations[1]["lm_loss"]

    written = scalars(tmp_path / "tensorboard")
    for name in names:
        points = written[f"lm-loss-validation/{name}/lm loss validation"]
        lines = [line for line in uninterrupted.evaluations if line["name"] == name]
        assert [step for step, _ in points] == [6, 12, 18, RAMPED_STEPS]
        assert [value for _, value in points] == pytest.approx([line["lm_loss"] for line in lines], rel=1e-5)

    checkpoints = ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    left = pretrain([*layout, *FLAGS, *weighted, *checkpoints, "--exit-interval", "11"], processes=4).ok()
    resumed = pretrain([*FLAGS, *weighted, *checkpoints, "--num-workers", "2"]).ok()
    assert [step["iteration"] for step in left.steps + resumed.steps] == list(range(1, RAMPED_STEPS + 1))
    for name, run, of in (
        ("step", left.steps + resumed.steps, uninterrupted.steps),
        ("evaluation", left.evaluations + resumed.evaluations, uninterrupted.evaluations),
    ):
        assert len(run) == len(of), name
        for line, expected in zip(run, of, strict=True):
            assert line["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5), (name, line)

    weights = [word.replace("0.3 0:0.5", "0.4 0:0.5") for word in weighted]
    refused = pretrain([*FLAGS, *weights, *checkpoints])
    assert refused.exit_code == 2
    assert "weights: [3, 7] in the checkpoint, [4, 7] now" in refused.stderr
