"""The table of a step's work, from the real step of a small model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.command import ROOT

QUICK = "--preset quick --world-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"


def table_of(*arguments: str) -> dict[str, tuple[str, str]]:
    """First words of a row -> (value, verdict)."""
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


def bytes_per_row(cell: str) -> int:
    """Allocations are rounded to 512 bytes, and the keys of the samples are kept in addition."""
    return int(cell.split(", ")[1].removesuffix(" bytes per row").replace(",", ""))


KEPT = "attention memory kept in addition to q, k, v, output, per layer and micro-batch"
STEP = "step, p = 8, m = 16, in half-stage forward times (ideal 96): 1f1b"


@pytest.mark.full
def test_a_layer_with_kernels_has_few_launches_and_keeps_no_scores() -> None:
    rows = table_of("--kernels", "triton", *QUICK.split())
    # A norm, four products, attention, activation, an addition with norm and one without.
    expected = {
        "kernel launches per transformer layer, forward": ("9", "met"),
        "kernel launches without dropout": ("9", "met"),
        "bytes moved per hidden dropout with bias and residual, forward": ("6.0 per element", "met"),
        "host synchronizations per micro-batch": ("0", "met"),
        STEP: ("138", "met"),
        "dualpipev": ("130", "met"),
        "interleaved": ("117", "met"),
        "zero-bubble": ("110", "met"),
    }
    assert rows.items() >= expected.items()
    assert bytes_per_row(rows[KEPT][0]) == pytest.approx(4, abs=2) and rows[KEPT][1] == "met"
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
    # Weight gradients are added by their products.
    assert ("backward", "addmm") in limits and "add_" not in {name for _, name in limits}


@pytest.mark.full
def test_with_pytorch_every_score_is_kept() -> None:
    rows = table_of("--kernels", "pytorch", *QUICK.split())
    launches, verdict = rows["kernel launches per transformer layer, forward"]
    assert int(launches) > 100 and verdict == "MISSED"
    # Softmax in fp32, mask, dropped softmax in bf16 of 256 keys; a causal mask shared by two heads.
    assert bytes_per_row(rows[KEPT][0]) == pytest.approx(256 * (4 + 1 + 2) + 128, abs=4)
    assert rows[KEPT][1] == "MISSED"
