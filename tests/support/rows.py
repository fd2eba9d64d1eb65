"""Many cheap rows in one test: pytest takes milliseconds for each test, and these rows take less."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for each row, like `pytest.mark.parametrize`, but as one test. A failure names its row.

    names: the arguments that a row contains, separated by commas. The rows share the fixtures of the test.
    """
    arguments, all_rows = [name.strip() for name in names.split(",")], list(rows)
    assert all_rows, "there are no rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for row in all_rows:
                values = (row,) if len(arguments) == 1 else row
                given = dict(zip(arguments, values, strict=True))
                try:
                    test(**fixtures, **given)
                except BaseException as error:
                    error.add_note(f"the row is {given}")
                    raise

        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
