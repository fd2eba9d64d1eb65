"""Committed loss curves: a change that must not alter the losses reproduces these curves exactly.

    .venv/bin/python -m tests.support.golden      # rewrites tests/golden/loss_curves.json

Regenerate the file only for a change that is meant to alter losses. Name these losses and the reason in the
commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.layouts import DROPOUT, Row, train_layout
from tests.support.pool import run_world

GOLDEN_FILE = Path(__file__).resolve().parents[2] / "tests" / "golden" / "loss_curves.json"
BOUND = 1e-5
"""Relative error that is allowed, since a different processor rounds differently."""

# Name -> (the row, the changes of its configuration).
GOLDEN_ROWS: dict[str, tuple[Row, dict[str, Any]]] = {
    "absolute on one process": (Row(), {}),
    "rotary with a gated MLP, TP 2": (Row(tp=2, positions="rotary"), {"model": {"glu_activation": "swiglu"}}),
    "alibi with a norm after the embedding, PP 2 x DP 2, ZeRO 1": (
        Row(pp=2, dp=2, zero=1, micro_batch=2, positions="alibi"),
        {"model": {"embed_layernorm": True}},
    ),
    "dropout with recomputation, PP 2": (Row(pp=2, recompute=True), {"model": DROPOUT}),
}


def golden_history(name: str) -> list[tuple[float, float]]:
    """Returns (loss, grad norm) of each step, as the current code computes them."""
    row, changes = GOLDEN_ROWS[name]
    return run_world(row.world_size, train_layout, row, **changes)[0]


def committed() -> dict[str, list[list[float]]]:
    """Returns the content of the file: name -> [loss, grad norm] of each step."""
    return json.loads(GOLDEN_FILE.read_text())


def main() -> None:
    """Writes the loss curves of the current code to the file."""
    curves = {
        name: [[float(f"{value:.8g}") for value in step] for step in golden_history(name)]
        for name in GOLDEN_ROWS
    }
    lines = [
        f"{json.dumps(name)}: [\n    " + ",\n    ".join(json.dumps(step) for step in curve) + "\n  ]"
        for name, curve in curves.items()
    ]
    GOLDEN_FILE.parent.mkdir(exist_ok=True)
    GOLDEN_FILE.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")
    print(f"wrote {GOLDEN_FILE}")


if __name__ == "__main__":
    main()
