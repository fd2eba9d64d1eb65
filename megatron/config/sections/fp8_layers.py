"""The transformer layers, and their matrices, that are multiplied in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import Section, flag

BLOCK = 128
"""Number of consecutive elements of a row, or of a row and a column, that share a scale."""
MIN_SIZE = 768
"""Default of --fp8-min-size, computed from the planner's rates of an H100. Two FP8 products of m rows with a
matrix [n_out, n_in] save 4 m n_in n_out (1 / 702 - 1 / 1187) ps. Quantizing m (n_in + n_out) elements moves 3
bytes per element at 2.6 / 1.55 TB/s. Both times are equal if n_in n_out / (n_in + n_out) = 770."""

_NEEDS_FP8: dict[str, Any] = {
    "needs": {"precision.fp8_format": "all layers are in bf16; set --fp8-format, or remove the flag"},
    **{"changes_model": False, "changes_layer_time": False},
}
_COUNT: dict[str, Any] = {
    **{**_NEEDS_FP8, "at_least": 0, "at_most": 100_000},
    "needs": {"model.first_last_layers_bf16": "add --first-last-layers-bf16, or remove the flag"},
}


def is_small(n_out: int, n_in: int, min_size: int) -> bool:
    """Returns whether products with a matrix [n_out, n_in] are computed in bf16 because of --fp8-min-size.
    n_out and n_in are the sizes of the whole matrix, not of a rank's shard, so that all layouts decide
    equally."""
    return n_out * n_in < min_size * (n_out + n_in)


@dataclass(frozen=True, kw_only=True)
class Fp8LayerConfig(Section):
    """The transformer layers that compute in bf16 in an FP8 run. The first three names and defaults are
    Megatron-LM's."""

    group: ClassVar[str] = "mixed precision"

    first_last_layers_bf16: bool = flag(
        False,
        summary="first and last layers in bf16",
        help="with FP8: compute the first --num-layers-at-start-in-bf16 and the last "
        "--num-layers-at-end-in-bf16 transformer layers in bf16",
        excludes={"model.fp8_layer_pattern": "remove one of the two"},
        **_NEEDS_FP8,
    )
    num_layers_at_start_in_bf16: int = flag(
        1, help="number of first layers that --first-last-layers-bf16 computes in bf16", **_COUNT
    )
    num_layers_at_end_in_bf16: int = flag(
        1, help="number of last layers that --first-last-layers-bf16 computes in bf16", **_COUNT
    )
    fp8_layer_pattern: tuple[str, ...] | None = flag(
        None,
        nargs="+",
        metavar="F|B",
        summary="layers with FP8 {}",
        help="with FP8: the precision of each transformer layer, as in F F F B. An F is a layer that "
        "multiplies FP8 matrices, a B is a layer that computes in bf16, and the letters are repeated to "
        "--num-layers (default: all layers multiply FP8 matrices, except the layers of "
        "--first-last-layers-bf16)",
        **_NEEDS_FP8,
    )
