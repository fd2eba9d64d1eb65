"""`for_each`: each row is run, and a failure names its row."""

import inspect

import pytest

from tests.support.rows import for_each


def test_every_row_is_run_with_the_fixtures_and_a_failure_names_its_row() -> None:
    seen = []

    @for_each("first, second", [(1, 2), (3, 4), (5, 5), (6, 7)])
    def test(first: int, fixture: str, second: int) -> None:
        seen.append((first, fixture, second))
        assert first != second

    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        test(fixture="x")
    assert seen == [(1, "x", 2), (3, "x", 4), (5, "x", 5)]
    assert caught.value.__notes__ == ["the row is {'first': 5, 'second': 5}"]


def test_no_rows_are_an_error() -> None:
    with pytest.raises(AssertionError, match="there are no rows"):
        for_each("value", [])(lambda value: None)
