"""Checks the fields and values of a sweep's files, which other users may have written.

Each function raises ValueError. Its message says what is wrong.
"""

from __future__ import annotations

from typing import Any

from megatron.files import MAX_COUNT, Check, dict_of, fields_of, is_count, is_text, list_of

MAX_REPEAT = 10_000


def _is_number(value: Any) -> bool:
    """Returns whether the value is a number. NaN and infinity are accepted, because a loss may be one of
    them."""
    return type(value) is float or is_count(value, -MAX_COUNT)


def _is_size(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1e100  # sums of larger numbers would overflow in plots


def _is_time(value: Any) -> bool:
    return _is_size(value) and value > 1e-100


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_PREDICTION = fields_of(
    {
        "layers": _or_none(list_of(is_text)),
        "memory_bytes": _or_none(list_of(_is_size)),
        "bubble": _or_none(_is_size),
        "max_over_mean": _or_none(_is_size),
        "step_s": _or_none(_is_size),
        "note": _or_none(is_text),
    }
)
_ROW: dict[str, Check] = {
    "index": is_count,
    "settings": dict_of(is_text),
    "words": list_of(is_text),
    "processes": is_count,
    "numbers": is_text,
    "tolerance": _is_size,
    "tokens_per_step": is_count,
    "predicted": _or_none(_PREDICTION),
    "refused": _or_none(is_text),
}
_RECORD: dict[str, Check] = {
    "base": list_of(is_text),
    "steps": lambda value: is_count(value, 1),
    "repeat": lambda value: is_count(value, 1, MAX_REPEAT),
    "script": _or_none(is_text),
    "rows": lambda value: isinstance(value, list),
    "format": is_count,
    **dict.fromkeys(("command", "commit", "host", "python", "created"), is_text),
}
_STEP = fields_of({"iteration": is_count, "loss": _or_none(_is_number)})
_MEMORY = fields_of({"stage": is_count, "name": is_text, "most_bytes": _is_size})
_RESULT: dict[str, Check] = {
    "row": is_count,
    "repeat": lambda value: is_count(value, 1, MAX_REPEAT),
    "status": is_text,
    "reason": _or_none(is_text),
    "steps": list_of(_STEP),
    "memory": list_of(_MEMORY),
}
_OPTIONAL: dict[str, Check] = {"bubble": _or_none(_is_size), "commit": is_text, "host": is_text}


def check_record(content: Any) -> None:
    """Checks the content of sweep.json. Its rows must be numbered from 0 in order."""
    _check(content, _RECORD)
    for place, row in enumerate(content["rows"]):
        _check(row, _ROW)
        if row["index"] != place:
            raise ValueError(f"row {place} has the index {row['index']}")


def check_result(content: Any, name: str) -> None:
    """Checks the content of a result file. name: the file's name without its suffix, ROW-REPEAT."""
    _check(content, _RESULT)
    _check(content, {field: check for field, check in _OPTIONAL.items() if field in content})
    if name != f"{content['row']:03d}-{content['repeat']}":
        raise ValueError("the file has the name of another run")
    if content["status"] == "ok" and not (_is_time(content.get("step_s")) and content["steps"]):
        raise ValueError("step_s or steps is missing")


def _check(content: Any, checks: dict[str, Check]) -> None:
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    for name, check in checks.items():
        if name not in content or not check(content[name]):
            raise ValueError(f"{name} is not valid")
