"""Tables of plain text. Needs no torch."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of equal length as lines, columns side by side: those in `left` (-1: the last one) are aligned to
    the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_left = {column % len(widths) for column in left}
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column in to_left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
