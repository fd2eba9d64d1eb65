"""The partition of a list of weighted layers into contiguous stages that is as even as possible.

Objective: the profile of a partition is the list of its stage weights, sorted from the heaviest down.
Profiles are compared lexicographically. `partition` finds the partition with the smallest profile: first the
heaviest stage is minimal, then the second heaviest, and so on.

Terms: layers of weight zero are removed first, so every layer has a positive weight. A position is a place
between two layers; a partition is a choice of positions. The level is the smallest limit that all stages of
several layers can satisfy. (A layer heavier than the level is a stage by itself in every such partition.) A
full stage has several layers and weighs exactly the level.

Algorithm:

1. `_level` finds the level, by bisection over greedy partitions (each stage takes as many layers as fit):
   chains-on-chains partitioning, Pinar and Aykanat, J. Parallel Distrib. Comput. 64 (2004), 974-996.
2. The best partition has as few full stages as possible. `_reach` computes how far j stages, c of them full,
   can extend, greedily, from both ends of the list. Together these give, for every j and c, the interval of
   positions that a best partition can have after stage j (`_open_positions`).
3. If the interval after stage j is a single position, it is settled: the list is split there, and each side
   is solved separately with a lower level (`_split`).
4. If full stages can be at several equally good places, a dynamic program compares the profiles of the
   remaining stages (`_cheapest_walk`).

Invariant: the stages of a piece that are not yet decided all weigh less than the last level.

Cost with k stages, n layers, c full stages: O(k log n) for each limit of the bisection, O(k (c + 1) log n)
for `_reach`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Rational

Weight = float | Fraction

# Largest dynamic program of step 4, measured in 30-bit digits of the integers that it adds, and the cost of
# each candidate stage in that unit. The limit is about one second.
_MAX_TIE_DIGITS = 200_000_000
_DIGITS_PER_STAGE = 40

# Positions that a best partition can have after some stage: number of full stages so far -> (first, last).
_Row = dict[int, tuple[int, int]]


def partition(weights: Sequence[Weight], num_stages: int) -> list[int]:
    """Bounds of the most even partition: stage s has layers bounds[s] to bounds[s + 1] - 1.

    The heaviest stage is as light as possible, then the second heaviest, and so on. Among equally even
    partitions it returns the one with the smallest bounds, so that later stages are heavier. Layers of weight
    zero belong to the stage of the next weighted layer, or at the end to the last stage. If there are fewer
    weighted layers than stages, the first stages are empty. If no layer has weight, every layer has weight 1.

    Weights are integers, floats, Fractions or Decimals, and are added exactly. A float stands for the decimal
    number that it prints as, so that 0.1 + 0.2 equals 0.3.

    Exactness: weight and number of the heaviest stages are exact for every input, and the full profile is
    exact for up to 250 weighted layers. For longer lists with very many equally good places for the heaviest
    stages (beyond `_MAX_TIE_DIGITS`; for example a long sequence of measured weights that repeats exactly
    between heavier layers) the first of these places are used. The parts between them are still partitioned
    as evenly as possible.

    Raises ValueError for a weight that is negative or non-finite, and for less than one stage.
    """
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: expected 1 or more")
    weights_int = _whole_numbers(weights)
    if not any(weights_int):
        weights_int = [1] * len(weights_int)
    weighted = [index for index, weight in enumerate(weights_int) if weight]
    num_empty = max(num_stages - len(weighted), 0)
    chain = _Chain(list(accumulate((weights_int[index] for index in weighted), initial=0)))
    inner = _even_positions(chain, num_stages - num_empty)
    return (
        [0] * (num_empty + 1)
        + [weighted[position - 1] + 1 for position in inner]
        + [len(weights_int)] * bool(weights_int)
    )


def _whole_numbers(weights: Sequence[Weight]) -> list[int]:
    """The weights as exact integer multiples of a common unit."""
    exact = []
    for index, weight in enumerate(weights):
        if isinstance(weight, Rational):
            value = Fraction(int(weight.numerator), int(weight.denominator))
        elif math.isfinite(weight):
            value = Fraction(str(weight))
        else:
            raise ValueError(f"layer {index} has weight {weight}: expected a finite number")
        if value < 0:
            raise ValueError(f"layer {index} has weight {weight}: expected zero or more")
        exact.append(value)
    unit = math.lcm(*{value.denominator for value in exact})
    return [value.numerator * (unit // value.denominator) for value in exact]


class _Chain:
    """Weighted layers as prefix sums: sums[i] is the weight of the first i layers."""

    def __init__(self, sums: list[int]) -> None:
        self.sums = sums
        self.position_of = {total: position for position, total in enumerate(sums)}

    def __len__(self) -> int:
        return len(self.sums) - 1

    def mirrored(self) -> _Chain:
        return _Chain([self.sums[-1] - total for total in reversed(self.sums)])


@dataclass(frozen=True)
class _Piece:
    """Layers start to end - 1, to be partitioned into num_stages. `limit` is an upper bound of the level."""

    start: int
    end: int
    num_stages: int
    limit: int


def _even_positions(chain: _Chain, num_stages: int) -> list[int]:
    """The num_stages - 1 inner positions of the most even partition. It needs at least num_stages layers."""
    mirror = chain.mirrored()
    positions: set[int] = set()
    pieces = [_Piece(0, len(chain), num_stages, chain.sums[-1])]
    while pieces:
        piece = pieces.pop()
        positions.update((piece.start, piece.end))
        if piece.num_stages == piece.end - piece.start:
            positions.update(range(piece.start, piece.end))
        elif piece.num_stages > 1:
            level = _level(chain.sums, piece)
            rows = _open_positions(chain, mirror, piece, level)
            pieces += _split(chain.sums, rows, level)
    return sorted(positions - {0, len(chain)})


def _level(sums: Sequence[int], piece: _Piece) -> int:
    """The level of the piece: the smallest limit for stages of several layers that num_stages can satisfy.

    Bisection. Each greedy partition moves its end of the interval to the nearest stage weight that occurs.
    """
    too_small, enough = 0, piece.limit
    while too_small + 1 < enough:
        limit = (too_small + enough) // 2
        position, heaviest, smallest_excess = piece.start, 0, enough
        for _ in range(piece.num_stages):
            reached = bisect_right(sums, sums[position] + limit, position, piece.end + 1) - 1
            if reached > position + 1:
                heaviest = max(heaviest, sums[reached] - sums[position])
            reached = max(reached, position + 1)
            if reached >= piece.end:
                enough = heaviest
                break
            smallest_excess = min(smallest_excess, sums[reached + 1] - sums[position])
            position = reached
        else:
            # A limit below the smallest weight that was rejected gives the same greedy partition.
            too_small = smallest_excess - 1
    return enough


def _open_positions(chain: _Chain, mirror: _Chain, piece: _Piece, level: int) -> list[_Row]:
    """For each bound of the piece, the positions that partitions with the fewest full stages can have there.

    j stages, at most c of them full, can extend from the start to reach[c][j] and no farther; likewise from
    the end. A position is open if the full stages needed on its two sides add up to the fewest possible.
    """
    size = len(chain)
    reach = _reach(chain, piece, level)
    fewest = len(reach) - 1
    mirrored_piece = _Piece(size - piece.end, size - piece.start, piece.num_stages, piece.limit)
    mirrored_reach = _reach(mirror, mirrored_piece, level)
    rows = []
    for stage in range(piece.num_stages + 1):
        rest = piece.num_stages - stage
        row = {}
        for full in range(max(0, fewest - rest), min(stage, fewest) + 1):
            first = size - mirrored_reach[fewest - full][rest]
            last = reach[full][stage]
            if full > 0:
                first = max(first, reach[full - 1][stage] + 1)
            if full < fewest:
                last = min(last, size - mirrored_reach[fewest - full - 1][rest] - 1)
            if first <= last:
                row[full] = (first, last)
        rows.append(row)
    return rows


def _reach(chain: _Chain, piece: _Piece, level: int) -> list[list[int]]:
    """reach[c][j]: the farthest position that j stages from the start can reach, at most c of them full.

    c grows until the stages cover the piece. Stages of several layers weigh at most `level`.
    """
    sums = chain.sums
    reach: list[list[int]] = []
    while not reach or reach[-1][-1] < piece.end:
        fewer = reach[-1] if reach else None
        column = [piece.start]
        for stage in range(piece.num_stages):
            position = column[-1]
            farthest = bisect_left(sums, sums[position] + level, position, piece.end + 1) - 1
            farthest = min(max(farthest, position + 1), piece.end)
            if fewer and farthest < piece.end:
                # A full last stage reaches at most one layer farther: without its last layer it is not full,
                # and `farthest` already covers that case.
                source = chain.position_of.get(sums[farthest + 1] - level)
                if source is not None and piece.start <= source <= fewer[stage]:
                    farthest += 1
            column.append(farthest)
        reach.append(column)
    return reach


def _split(sums: Sequence[int], rows: Sequence[_Row], level: int) -> list[_Piece]:
    """The pieces between settled positions. Each can be solved with a limit below `level`."""
    pieces = []
    settled = [
        stage for stage, row in enumerate(rows) if sum(last - first + 1 for first, last in row.values()) == 1
    ]
    for before, after in zip(settled, settled[1:], strict=False):
        (full_before, (start, _)), (full_after, (end, _)) = *rows[before].items(), *rows[after].items()
        if full_before == full_after or after == before + 1:
            pieces.append(_Piece(start, end, after - before, level - 1))
            continue
        segment = rows[before : after + 1]
        walk = _cheapest_walk(sums, segment, level)
        if walk is None:
            pieces += _first_full_stages(sums, segment, level)
        else:
            pieces += [_Piece(a, b, 1, level) for a, b in zip(walk, walk[1:], strict=False)]
    return pieces


def _first_full_stages(sums: Sequence[int], rows: Sequence[_Row], level: int) -> list[_Piece]:
    """The pieces between the full stages of the partition with the smallest bounds."""
    smallest = [min(first for first, _ in row.values()) for row in rows]
    pieces = []
    begin = 0
    for stage in range(1, len(rows)):
        start, end = smallest[stage - 1], smallest[stage]
        if end - start > 1 and sums[end] - sums[start] == level:
            if begin < stage - 1:
                pieces.append(_Piece(smallest[begin], start, stage - 1 - begin, level - 1))
            pieces.append(_Piece(start, end, 1, level))
            begin = stage
    if begin < len(rows) - 1:
        pieces.append(_Piece(smallest[begin], smallest[-1], len(rows) - 1 - begin, level - 1))
    return pieces


def _cheapest_walk(sums: Sequence[int], rows: Sequence[_Row], level: int) -> list[int] | None:
    """The position in every row that gives the smallest profile below `level`; None beyond _MAX_TIE_DIGITS.

    Dynamic program over rows and positions. A profile is encoded as an integer whose digits are the number of
    stages of each weight, the heaviest first; integers then compare as profiles do. A full stage leads from
    the last position with c full stages in one row to the first position with c + 1 in the next. All other
    stages are lighter than `level` or single layers.

    Two monotonicity properties bound the search: within a row the smallest profile grows with the position,
    and so does its best predecessor (the cost of a stage is convex in its weight).
    """
    shift_of = _shifts(sums, rows, level)
    if shift_of is None:
        return None
    costs: dict[int, list[int]] = {full: [0] for full in rows[0]}
    origins: list[dict[int, list[int]]] = [{}]
    for previous, row in zip(rows, rows[1:], strict=False):
        lanes = {full: _lane(sums, previous, costs, level, full, row[full], shift_of) for full in row}
        costs = {full: [cost for cost, _ in lane] for full, lane in lanes.items()}
        origins.append({full: [origin for _, origin in lane] for full, lane in lanes.items()})
    return _trace(rows, origins)


def _lane(
    sums: Sequence[int],
    previous: _Row,
    costs: dict[int, list[int]],
    level: int,
    full: int,
    interval: tuple[int, int],
    shift_of: dict[int, int],
) -> list[tuple[int, int]]:
    """For every position of `interval`, after `full` full stages: its cost and the start of its last stage.

    `costs` are the costs of the positions in the row `previous`. Ties take the smallest start.
    """
    lane = []
    first, last = interval
    sources = previous.get(full)
    low = 0
    for position in range(first, last + 1):
        best: tuple[int, int] | None = None
        if position == first and full - 1 in previous:
            source = previous[full - 1][1]
            if sums[position] - sums[source] == level:
                best = costs[full - 1][-1], source
        if sources:
            for source in _sources(sums, position, sources, level, low):
                before = costs[full][source - sources[0]]
                if best is not None and before >= best[0]:
                    break
                shift = shift_of.get(sums[position] - sums[source])
                cost = before if shift is None else before + (1 << shift)
                if best is None or cost < best[0]:
                    best = cost, source
                    low = source
        assert best is not None, "every open position can be reached"
        lane.append(best)
    return lane


def _sources(sums: Sequence[int], position: int, sources: tuple[int, int], level: int, low: int) -> range:
    """The positions in `sources`, from `low` on, at which a stage that ends at `position` can start."""
    lightest = min(bisect_right(sums, sums[position] - level, 0, position), position - 1)
    return range(max(sources[0], low, lightest), min(sources[1], position - 1) + 1)


def _shifts(sums: Sequence[int], rows: Sequence[_Row], level: int) -> dict[int, int] | None:
    """The bit offset of the digit of each stage weight below `level`; None beyond _MAX_TIE_DIGITS.

    Stages of `level` and above have no digit: all candidates have equally many of them.
    """
    weights: set[int] = set()
    num_positions = num_stages = 0
    bits = len(rows).bit_length()
    for previous, row in zip(rows, rows[1:], strict=False):
        for full, (first, last) in row.items():
            num_positions += last - first + 1
            for position in range(first, last + 1) if full in previous else ():
                starts = _sources(sums, position, previous[full], level, 0)
                num_stages += len(starts)
                digits = num_positions * len(weights) * bits // 30
                if digits + num_stages * _DIGITS_PER_STAGE > _MAX_TIE_DIGITS:
                    return None
                total = sums[position]
                weights.update([total - start for start in sums[starts.start : starts.stop]])
    return {weight: rank * bits for rank, weight in enumerate(sorted(weights)) if weight < level}


def _trace(rows: Sequence[_Row], origins: Sequence[dict[int, list[int]]]) -> list[int]:
    """Follows `origins` back from the only position of the last row."""
    ((full, (position, _)),) = rows[-1].items()
    walk = [position]
    for stage in range(len(rows) - 1, 0, -1):
        position = origins[stage][full][position - rows[stage][full][0]]
        lane = rows[stage - 1].get(full)
        if lane is None or position < lane[0]:
            full -= 1
        walk.append(position)
    return walk[::-1]
