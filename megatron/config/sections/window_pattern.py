"""The syntax of `--window-pattern`: which transformer layers have the window of --window-size.

W W W F            one letter per layer, W with the window and F without it, repeated to --num-layers
4                  Megatron-LM's --window-attn-skip-freq: every fourth layer has no window
([1]*3+[0])*8      Megatron-LM's list, 1 with the window and 0 without it, one number per layer
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from megatron.errors import ConfigError, one_line

WINDOW, FULL = "W", "F"
_MAX_LAYERS = 100_000


def window_pattern(words: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Returns the shortest pattern of letters that describes `num_layers` layers. Raises ConfigError for an
    invalid pattern."""
    text = "".join(words)
    letters = _letters(text, num_layers)
    kinds = (letters * -(-num_layers // len(letters)))[:num_layers]
    period = next(n for n in range(1, num_layers + 1) if kinds[n:] == kinds[: num_layers - n])
    return tuple(kinds[:period])


def _letters(text: str, num_layers: int) -> str:
    if text and not text.strip(WINDOW + FULL):
        return text
    if text.isdecimal() and 1 <= int(text[:6]) <= _MAX_LAYERS and len(text) <= 6:
        return WINDOW * (int(text) - 1) + FULL
    try:
        numbers = _evaluated(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(
            f"--window-pattern is '{one_line(text, 40)}': expected letters W and F, as in W W W F, or "
            "Megatron-LM's N or list, as in ([1]*3+[0])*8"
        ) from None
    if len(numbers) != num_layers:
        raise ConfigError(
            f"--window-pattern {one_line(text, 40)} has {len(numbers)} layers, but --num-layers is "
            f"{num_layers}: correct one of the two"
        )
    return "".join(WINDOW if number else FULL for number in numbers)


def _evaluated(node: ast.expr) -> list[int]:
    """Returns the list of an expression of [0, 1], + and *. Raises ValueError for anything else."""
    match node:
        case ast.List(elts=elements):
            values = [element.value for element in elements if isinstance(element, ast.Constant)]
            numbers = [value for value in values if isinstance(value, int) and value in (0, 1)]
            if len(numbers) == len(elements):
                return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left) + _evaluated(right)
        case (
            ast.BinOp(left=part, op=ast.Mult(), right=ast.Constant(value=int(times)))
            | ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=part)
        ):
            numbers = _evaluated(part)
            if 0 <= times * len(numbers) <= _MAX_LAYERS:
                return numbers * times
    raise ValueError
