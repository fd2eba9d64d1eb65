"""The syntax of flags that assign one of two kinds to each transformer layer, such as `--window-pattern`.

W W W F            one letter per layer, repeated to --num-layers
4                  Megatron-LM's number: every fourth layer (see `LayerPattern.letters_of_number`)
([1]*3+[0])*8      Megatron-LM's list, 1 for the first letter and 0 for the second, one number per layer
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError, one_line

_MAX_LAYERS = 100_000


@dataclass(frozen=True)
class LayerPattern:
    """The syntax of one flag.

    one, zero: letters of the two kinds, which Megatron-LM's lists call 1 and 0. example: example of letters,
    for errors. letters_of_number: function that returns the repeated letters for Megatron-LM's number.
    """

    flag: str
    one: str
    zero: str
    example: str
    letters_of_number: Callable[[int], str]

    def parse(self, words: Sequence[str], num_layers: int) -> tuple[str, ...]:
        """Returns the shortest pattern of letters that describes `num_layers` layers. Raises ConfigError for
        an invalid pattern."""
        if num_layers < 1:
            raise ConfigError(f"{self.flag} with --num-layers {num_layers}: expected at least 1 layer")
        text = "".join(words)
        letters = self._letters(text, num_layers)
        kinds = (letters * -(-num_layers // len(letters)))[:num_layers]
        period = next(n for n in range(1, num_layers + 1) if kinds[n:] == kinds[: num_layers - n])
        return tuple(kinds[:period])

    def _letters(self, text: str, num_layers: int) -> str:
        if text and not text.strip(self.one + self.zero):
            return text
        if text.isdecimal() and 1 <= int(text[:6]) <= _MAX_LAYERS and len(text) <= 6:
            return self.letters_of_number(int(text))
        try:
            numbers = _evaluated(ast.parse(text, mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ConfigError(
                f"{self.flag} is '{one_line(text, 40)}': expected letters {self.one} and {self.zero}, as in "
                f"{self.example}, or Megatron-LM's N or list, as in ([0]*3+[1])*8"
            ) from None
        if len(numbers) != num_layers:
            raise ConfigError(
                f"{self.flag} {one_line(text, 40)} has {len(numbers)} layers, but --num-layers is "
                f"{num_layers}: correct one of the two"
            )
        return "".join(self.one if number else self.zero for number in numbers)


def _evaluated(node: ast.expr) -> list[int]:
    """Returns the value of an expression of lists of 0 and 1, + and *. Raises ValueError for anything
    else."""
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


WINDOW, FULL = "W", "F"
WINDOW_PATTERN = LayerPattern(
    "--window-pattern", WINDOW, FULL, "W W W F", lambda number: WINDOW * (number - 1) + FULL
)
"""Pattern of layers with the window of --window-size, and without a window. The number N: every Nth layer has
no window."""

EXPERTS, DENSE = "E", "D"
EXPERT_PATTERN = LayerPattern(
    "--moe-layer-freq", EXPERTS, DENSE, "D E E E", lambda number: EXPERTS + DENSE * (number - 1)
)
"""Pattern of layers with experts, and with a dense MLP. The number N: layers 0, N, 2N, ... have experts."""

FP8, BF16 = "F", "B"
FP8_PATTERN = LayerPattern(
    "--fp8-layer-pattern", FP8, BF16, "F F F B", lambda number: FP8 * (number - 1) + BF16
)
"""Pattern of layers that multiply FP8 matrices, and layers that compute in bf16. The number N: every Nth
layer computes in bf16."""

NO_ROTARY, ROTARY = "N", "R"
ROTARY_PATTERN = LayerPattern(
    "--no-rope-freq", NO_ROTARY, ROTARY, "R R R N", lambda number: ROTARY * (number - 1) + NO_ROTARY
)
"""Pattern of layers without rotary embeddings, and with them. The number N: every Nth layer has no rotary
embeddings."""
