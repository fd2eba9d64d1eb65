"""Tables of plain text. Needs no torch."""

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], left_align: Sequence[int] = (0,)) -> str:
    """Rows of equal length as aligned lines. left_align: indices of the left-aligned columns (-1: the last);
    the other columns are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {column % len(widths) for column in left_align}
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
