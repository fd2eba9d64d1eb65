"""Formats tables and lists as plain text. The module does not import torch."""

from collections.abc import Collection, Iterable, Sequence


def format_table(rows: Sequence[Sequence[str]], left_align: Sequence[int] = (0,)) -> str:
    """Formats rows of equal length as aligned lines. left_align: indices of the left-aligned columns (-1: the
    last); the other columns are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {column % len(widths) for column in left_align}
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def first_few(names: Iterable[str], limit: int = 3) -> str:
    """Returns a text with at most `limit` names in their order: 'a, b, c and 4 more'."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: '1 process', '2 processes'."""
    return f"{number} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Formats integers as ranges: [3, 4, 5, 8] -> '3-5, 8'."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def rank_list(ranks: Collection[int]) -> str:
    """Formats ranks for a message: 'rank 3', 'ranks 0-2, 5'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"
