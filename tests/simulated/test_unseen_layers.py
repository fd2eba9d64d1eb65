"""Arrangements, activations, norms and blocks that no file of the program contains are planned exactly.

The plan is made from the operations of the layers on the simulated device, so no file of the planner or of
the simulation knows what a layer consists of. `unseen_layers` defines the parts, and `comparison` defines
what "exactly" means.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.end_to_end.command import ROOT

# Name -> (flags, operations of the simulated step that no layer of the program has, number of parameters that
# each of the four layers has more than the usual layer on one process).
H, FFN = 256, 4 * 256
MATRICES, PROJECTIONS = 2 * H * FFN, 4 * H * H
PARTS = {
    "mixer, gated activation": (
        "--layer-arrangement causal-mean --glu-activation mish-glu",
        ("cumsum", "softplus"),
        3 * H * H + 3 * H + 3 * H // 2 + 3 * H * H // 2 + H - (PROJECTIONS + 4 * H) + H * FFN + FFN,
    ),
    "arrangement, MLP and norm": (
        "--layer-arrangement two-mlps --normalization PeakNorm",
        ("silu", "amax"),
        2 * H * H // 4 + H // 4 + H + 3 - H,
    ),
    "arrangement and activation": (
        "--layer-arrangement half-sandwich --activation mish",
        ("add_norm", "softplus"),
        2 * H,
    ),
}
LAYOUTS = {
    "one process": "",
    "TP 2, PP 2, recomputed": "--world-size 8 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --zero-stage 1 --checkpoint-activations",
    "TP 2, sequence parallel": "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "zero-bubble": "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--sequence-parallel --pipeline-schedule zero-bubble",
}
ROWS = [(part, layout) for layout in LAYOUTS for part in PARTS]


def report(flags: str) -> dict[str, Any]:
    """Runs the program `unseen_layers`. Returns its report, which `unseen_layers._report` describes."""
    output = subprocess.run(
        [sys.executable, "-m", "tests.simulated.unseen_layers", "--bf16", *flags.split()],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.gate(rows=0, also=["arrangement, MLP and norm-zero-bubble"])
@pytest.mark.parametrize(("part", "layout"), ROWS)
def test_the_planner_plans_what_it_never_saw(part: str, layout: str) -> None:
    flags, operations, _ = PARTS[part]
    found = report(f"{flags} {LAYOUTS[layout]}")
    assert set(operations) <= set(found["operations"])
    assert found["disagreements"] == []


@pytest.mark.full
def test_the_program_that_plans_what_it_never_saw_has_the_parts() -> None:
    """The numbers of parameters show that the planned model contains the registered parts."""
    (plain,) = report("")["parameters"]
    for flags, _, more in PARTS.values():
        final_norm = 1 - H if "PeakNorm" in flags else 0
        assert report(flags)["parameters"] == [plain + 4 * more + final_norm], flags
