"""Pictures: figures of matplotlib without a display, and their files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.files import write_atomically


@contextmanager
def new_figure(output: Path, rows: int, columns: int = 1, *, dpi: int = 120, **options: Any) -> Iterator[Any]:
    """The figure and its axes, (figure, axes[row, column]); at the end of the block they are written to
    `output`, whose suffix is the format (default: PNG). options: of `pyplot.subplots`.

    OSError if the file cannot be written, ValueError for an unknown format.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Names of files and runs are no formulas: with two dollar signs they would be parsed as TeX.
    matplotlib.rcParams["text.parse_math"] = False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield figure, axes
        content = io.BytesIO()
        with warnings.catch_warnings():
            # It quotes a character of a name, such as ESC, that the font lacks.
            warnings.filterwarnings("ignore", "Glyph ", UserWarning)
            figure.savefig(content, dpi=dpi, format=output.suffix[1:] or "png")
    finally:
        pyplot.close(figure)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, content.getvalue())
