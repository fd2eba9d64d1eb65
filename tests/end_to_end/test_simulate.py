"""`--dry-run --simulate` as a user types it."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.command import pretrain, pretrain_typed
from tests.unit.config.command_lines import BLOOM

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 64 --lr 1e-3 --train-samples 6400 --vocab-size 500 --bf16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
).split()


def columns(table):
    """Rows of a table of the output, as dictionaries by the words of its header."""
    header, *rows = [line.split() for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, ranks", [(SMALL, 8), ([*BLOOM, "--hidden-dropout", "0", "--attention-dropout", "0"], 384)]
)
def test_a_plan_shows_the_simulated_step_of_every_stage(flags, ranks):
    run = pretrain_typed([*flags, "--dry-run", "--simulate", "--world-size", str(ranks)])
    assert run.exit_code == 0, run.stderr
    assert run.stderr == ""
    stages = int(flags[flags.index("--pipeline-model-parallel-size") + 1])
    memory = columns(re.search(r"simulated memory.*\n((?:.+\n)+)", run.stdout)[1])
    assert [row["stage"] for row in memory] == [str(stage) for stage in range(stages)]
    for row in memory:
        owners = ("parameters", "gradients", "optimizer", "activations", "temporary", "tables")
        assert sum(float(row[owner]) for owner in owners) == pytest.approx(float(row["peak"]), abs=0.004)
    assert f"all calls of {ranks} ranks match" in run.stdout
    assert run.peak_bytes < 2 * 2**30


def test_a_simulation_does_not_start_a_training():
    run = pretrain([*SMALL, "--simulate"])
    assert run.exit_code == 2
    assert "--dry-run" in run.stderr
