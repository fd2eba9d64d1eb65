"""A drawing in SVG: text, boxes, lines and arrows on a white background.

Text is monospace, so that its width is known: text that does not fit its box is an error.
"""

from __future__ import annotations

from html import escape

FONT_PX = 13
CHAR_WIDTH = 0.602  # of a character, in font sizes, in the usual monospace fonts
LINE_PX = 18

# Tints that stay apart for colorblind readers, for boxes with text. RED marks failures only.
BLUE, GREEN, YELLOW, RED, PURPLE, GREY = "#cfe4f5", "#c5e8db", "#f8ecae", "#f7cdb6", "#ecd3e3", "#eeeeee"
# Blue, vermilion, green and purple that stay apart for colorblind readers, for lines.
LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa4499")


class Svg:
    """A drawing of `width` x `height` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
            f' font-size="{FONT_PX}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>',
            f'<rect x="0" y="0" width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False, size: int = FONT_PX
    ) -> None:
        """Writes a line with its baseline at y. Raises ValueError if it would leave the drawing."""
        width = CHAR_WIDTH * size * len(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"text does not fit the figure: {text!r}")
        style = (' font-weight="bold"' if bold else "") + (f' font-size="{size}"' if size != FONT_PX else "")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style} fill="#222">{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: list[str],
        fill: str,
        *,
        stroke: str = "#444",
        size: int = FONT_PX,
        bold_first: bool = False,
    ) -> None:
        """Draws a box with centered lines. Raises ValueError if they do not fit."""
        if x + width > self.width:
            raise ValueError(f"box does not fit the figure: {lines}")
        line_px = LINE_PX * size / FONT_PX
        if any(CHAR_WIDTH * size * len(line) > width - 1 for line in lines) or line_px * len(lines) > height:
            raise ValueError(f"text does not fit its box: {lines}")
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(3.0, width / 6):g}"'
            f' fill="{fill}" stroke="{stroke}"/>'
        )
        first = y + height / 2 - line_px * (len(lines) - 1) / 2 + 0.35 * size
        for i, line in enumerate(lines):
            bold = bold_first and i == 0
            self.text(x + width / 2, first + line_px * i, line, anchor="middle", bold=bold, size=size)

    def frame(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draws the outline of a group of boxes."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none"'
            f' stroke="{color}" stroke-width="3"/>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """Draws a line through the points with a head at the last one, and with `both` at the first one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="#444"{start} marker-end="url(#head)"/>'
        )

    def line(self, points: list[tuple[float, float]], color: str, width: float = 1.0) -> None:
        """Draws a line through the points, without a head."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
