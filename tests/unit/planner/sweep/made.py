"""Records and results of sweeps that were not run."""

from __future__ import annotations

from typing import Any

from megatron.planner.sweep.axes import Row
from megatron.planner.sweep.folder import Record
from megatron.units import GIB


def make_row(index: int, method: str, **changes: Any) -> Row:
    values = {
        "settings": {"--partition-method": method},
        "words": ["--partition-method", method],
        "processes": 2,
        "numbers": "same",
        "tolerance": 1e-5,
        "tokens_per_step": 1000,
        "predicted": {
            "layers": ["0-4", "5-9"],
            "memory_bytes": [1.0 * GIB, 2.0 * GIB],
            "bubble": 0.25,
            "max_over_mean": 1.5,
            "step_s": 0.5,
            "note": None,
        },
        "refused": None,
    }
    return Row(index=index, **{**values, **changes})


def make_record(*rows: Row, repeat: int = 2, **changes: Any) -> Record:
    values = {"base": ["--lr", "1e-3"], "steps": 4, "command": "tools/sweep.py run", **changes}
    return Record(repeat=repeat, rows=list(rows), **values)


def make_result(row: Row, repeat: int, seconds: float, losses: list[float], **changes: Any) -> dict[str, Any]:
    memory = [
        dict(stage=stage, name=name, least_bytes=1.0, most_bytes=(stage + 1) * factor * GIB, rank=stage)
        for stage in (0, 1)
        for name, factor in (("resident", 1), ("peak resident", 2))
    ]
    values = {
        "row": row.index,
        "repeat": repeat,
        "settings": row.settings,
        "status": "ok",
        "reason": None,
        "exit_code": 0,
        "steps": [
            {"iteration": step, "loss": loss, "grad_norm": 1.0, "seconds": seconds}
            for step, loss in enumerate(losses, start=1)
        ],
        "step_s": seconds,
        "tokens_per_s": row.tokens_per_step / seconds,
        "memory": memory,
    }
    return {**values, **changes}
