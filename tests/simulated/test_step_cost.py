"""Makes the table of a step's work from the real step of a small model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.command import ROOT

QUICK = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--global-batch-size 64 --world-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
)


def table_of(*arguments: str) -> dict[str, tuple[str, str]]:
    """Returns first words of a row -> (value, verdict)."""
    output = subprocess.run(
        [sys.executable, "benchmarks/step_cost.py", *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    table, _, operations = output.partition("\n\nroofline time of the operations")
    heading, *rows = table[table.index("\nwhat ") + 1 :].splitlines()
    assert heading.split() == ["what", arguments[1], "goal"]
    found = {}
    for row in rows:
        name, *cells = (part.strip() for part in row.strip().split("  ") if part.strip())
        found[name] = (cells[0], cells[-1])
    found["operations"] = (operations, "")
    return found


@pytest.mark.full
def test_the_work_of_a_step() -> None:
    rows = table_of("--kernels", "triton", *QUICK.split())
    assert rows["host synchronizations per micro-batch"] == ("0", "met")
    sent, verdict = rows["ZeRO-1 bytes on the wire per rank and step"]
    assert float(sent.removesuffix(" GB")) > 0 and verdict == "met"
    bound, predicted = (
        int(rows[f"MFU {kind}"][0].removesuffix(" %")) for kind in ("by roofline", "with fitted rates")
    )
    assert 0 <= predicted < bound < 100
    lines = [line.split() for line in rows["operations"][0].splitlines()[2:]]
    limits = {(line[0], line[1]): " ".join(line[6:]) for line in lines}
    assert limits["forward", "add_norm"] == "memory"
    assert limits["backward", "add_norm_backward"] == "memory"
    # The products add weight gradients, so no separate addition does.
    assert ("backward", "addmm") in limits and "add_" not in {name for _, name in limits}
