"""A gradient that is not finite stops all ranks before the weights change, and nothing is saved after it."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.command import pretrain
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT, SHORT


def test_a_gradient_that_is_not_finite_stops_every_rank_and_is_not_saved(
    data: list[str], tmp_path: Path
) -> None:
    # This learning rate moves the weights to 1e30, and the next forward pass overflows.
    explosion = "--lr 1e30 --clip-grad 0 --optimizer sgd --lr-decay-style constant".split()
    flags = [*MODEL, *ABSOLUTE, *SHORT, *NO_DROPOUT, *data, "--pipeline-model-parallel-size", "2"]
    run = pretrain([*flags, *explosion, "--save", str(tmp_path), "--save-interval", "1"], processes=2)
    assert run.exit_code == 1
    (error,) = run.errors
    assert error.startswith("error: iteration 2: the gradient is non-finite, the step was not taken")
    assert "rank 0 (stage 0" in error and "rank 1 (stage 1" in error and ".weight" in error
    assert run.stderr.count("Traceback") <= 1
    assert run.stderr.rstrip().endswith(error)
    assert run.rank_exit_codes == {1}
    assert [step["iteration"] for step in run.steps] == [1]
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert [folder.name for folder in tmp_path.glob("global_step*")] == ["global_step1"]
