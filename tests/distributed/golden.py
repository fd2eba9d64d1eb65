"""Loss curves that are committed: a change that computes nothing new changes none of them.

    .venv/bin/python -m tests.distributed.golden      # writes tests/golden/loss_curves.json anew

Regenerate only for a change that is meant to alter the numbers, and say in the commit which and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.layouts import STEPS, Row, train_layout
from tests.distributed.pool import run_world

GOLDEN_FILE = Path(__file__).resolve().parent.parent / "golden" / "loss_curves.json"
BOUND = 1e-5
"""Relative: another processor rounds otherwise."""

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Name -> the row and the changes to its config.
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
    """(loss, grad norm) per step, as it is now."""
    row, changes = GOLDEN_ROWS[name]
    return run_world(row.world_size, train_with, row, STEPS, changes, timeout=300.0)[0]


def train_with(row: Row, steps: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    """`train_layout` with its changes as a dict, as `run_world` passes no keywords."""
    return train_layout(row, steps, **changes)


def committed() -> dict[str, list[list[float]]]:
    """What the file holds: name -> [loss, grad norm] per step."""
    return json.loads(GOLDEN_FILE.read_text())


def main() -> None:
    """Writes the file."""
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
