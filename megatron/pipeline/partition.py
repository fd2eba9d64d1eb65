"""Where to cut a list of weighted layers into stages, as evenly as a contiguous cut can be.

Of two cuts the more even one has the smaller profile: the stage weights from the heaviest down, compared as
words are, so that the heaviest counts first. `partition` finds the smallest profile of all cuts.

Layers of weight zero are set aside, so that a cut is a choice of positions between weighted layers. Let the
level be the smallest limit that every stage of several layers can keep; a layer above it is alone on its
stage in any case. A stage of several layers that weighs exactly the level is called full. The best cut has
as few full stages as possible, and needs all of its stages for that: with one to spare, a full stage could be
split. So what j stages can cover, c of them full, ends where a greedy walk ends, and the walks from both ends
of the list leave an interval of open positions for every j and c.

Where one position is left behind stage j, the cut goes there, and each side is solved by itself, at its own
lower level. Where full stages have several equally good places, one dynamic program compares all that would
follow (`_cheapest_walk`).

With k stages and n layers a level takes O(k log n) steps for each limit that the bisection tries, and
O(k (c + 1) log n) for the walks.
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

# Largest dynamic program for equally good places, in digits (of 30 bits) of the integers that it adds, and
# what each possible stage counts in that unit: at most about a second.
_MAX_TIE_DIGITS = 200_000_000
_DIGITS_PER_STAGE = 40

# Positions open to a best cut behind some stage: first and last, per number of full stages up to there.
_Row = dict[int, tuple[int, int]]


def partition(weights: Sequence[Weight], num_stages: int) -> list[int]:
    """Bounds of the most even cut, length num_stages + 1: stage s has layers bounds[s] to bounds[s + 1] - 1.

    The heaviest stage is as light as any contiguous cut allows, then the second heaviest, and so on to the
    last. Of equally even cuts it is the one with the smallest bounds: later stages are the heavier ones, and
    layers of weight zero go with the weighted layer after them or, at the end, with the last stage. A stage
    is without weight only if there are fewer weighted layers than stages: then the first ones are empty. If
    no layer has weight, each counts as one.

    Weights are integers, floats, Fractions or Decimals, and are added exactly. A float stands for the decimal
    number that it prints as, so that 0.1 + 0.2 is as heavy as 0.3.

    Weight and number of the heaviest stages are exact for every input, and the whole profile is for up to 250
    weighted layers. Of longer lists, those give up some evenness that leave too many equally good places for
    their heaviest stages (more than `_MAX_TIE_DIGITS`; a long block of measured weights, repeated exactly
    between heavier layers, does). Then the first of these places are taken, and each part between them is cut
    as evenly as it can be.

    Raises ValueError for a weight that is negative or not finite, and for less than one stage.
    """
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: expected 1 or more")
    whole = _whole_numbers(weights)
    if not any(whole):
        whole = [1] * len(whole)
    weighted = [index for index, weight in enumerate(whole) if weight]
    num_empty = max(num_stages - len(weighted), 0)
    chain = _Chain(list(accumulate((whole[index] for index in weighted), initial=0)))
    inner = _even_cuts(chain, num_stages - num_empty)
    return [0] * (num_empty + 1) + [weighted[cut - 1] + 1 for cut in inner] + [len(whole)] * bool(whole)


def _whole_numbers(weights: Sequence[Weight]) -> list[int]:
    """The weights as integers of a common unit, none rounded."""
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
    """Weighted layers as their running sums: sums[i] is the weight of the first i layers."""

    def __init__(self, sums: list[int]) -> None:
        self.sums = sums
        self.position_of = {total: position for position, total in enumerate(sums)}

    def __len__(self) -> int:
        return len(self.sums) - 1

    def mirrored(self) -> _Chain:
        return _Chain([self.sums[-1] - total for total in reversed(self.sums)])


@dataclass(frozen=True)
class _Piece:
    """Layers start to end - 1, to be cut into num_stages; several layers can be kept within `limit`."""

    start: int
    end: int
    num_stages: int
    limit: int


def _even_cuts(chain: _Chain, num_stages: int) -> list[int]:
    """The num_stages - 1 positions of the most even cut of at least num_stages layers of positive weight."""
    mirror = chain.mirrored()
    cuts: set[int] = set()
    pieces = [_Piece(0, len(chain), num_stages, chain.sums[-1])]
    while pieces:
        piece = pieces.pop()
        cuts.update((piece.start, piece.end))
        if piece.num_stages == piece.end - piece.start:
            cuts.update(range(piece.start, piece.end))
        elif piece.num_stages > 1:
            level = _level(chain.sums, piece)
            rows = _open_positions(chain, mirror, piece, level)
            pieces += _split(chain.sums, rows, level)
    return sorted(cuts - {0, len(chain)})


def _level(sums: Sequence[int], piece: _Piece) -> int:
    """The smallest limit for stages of several layers within which num_stages are enough.

    Bisection, in which every greedy walk moves its end of the interval to the nearest sum that occurs.
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
            # Up to the smallest sum that was one layer too much, the walk would be the same.
            too_small = smallest_excess - 1
    return enough


def _open_positions(chain: _Chain, mirror: _Chain, piece: _Piece, level: int) -> list[_Row]:
    """Per bound of the piece, the positions through which cuts with the fewest full stages pass.

    With j stages, at most c of them full, everything up to reach[c][j] can be covered, and the same holds
    from the end. A best cut passes where the full stages needed on both sides add up to the fewest there are.
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
    """reach[c][j]: the farthest position that j stages from the start cover, at most c of them full.

    As many c as it takes to cover the piece. Stages of several layers weigh at most `level`, full ones that.
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
                # A full stage ends at most one layer farther: it starts no later than `position`, and
                # without its last layer it is not full.
                source = chain.position_of.get(sums[farthest + 1] - level)
                if source is not None and piece.start <= source <= fewer[stage]:
                    farthest += 1
            column.append(farthest)
        reach.append(column)
    return reach


def _split(sums: Sequence[int], rows: Sequence[_Row], level: int) -> list[_Piece]:
    """The pieces between positions that are settled, all of which can be solved below `level`."""
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
    """The pieces between the full stages of the cut with the smallest bounds."""
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
    """The position in every row, for the smallest profile below `level`; None beyond _MAX_TIE_DIGITS.

    A profile is an integer: its digits are the number of stages of each weight, the heaviest in front, so
    that integers compare as profiles do. From one number of full stages to the next leads a full stage, from
    the last position to the first; all other stages are lighter than `level` or single layers.

    In a row, the profile up to a position grows with the position (a walk to a farther one can be cut short),
    and the best position to come from does so too: what a stage costs grows faster the heavier it is.
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
    """For every position of `interval`, behind `full` full stages: its cost and where its last stage starts.

    `costs` are those of the positions of the row `previous`. Of equal costs, the first start is taken.
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
    """The positions of `sources`, from `low` on, where a stage that ends at `position` can start."""
    lightest = min(bisect_right(sums, sums[position] - level, 0, position), position - 1)
    return range(max(sources[0], low, lightest), min(sources[1], position - 1) + 1)


def _shifts(sums: Sequence[int], rows: Sequence[_Row], level: int) -> dict[int, int] | None:
    """The bit that counts the stages of each weight below `level`; None if the integers would get too big.

    Stages of `level` and above are not counted: every walk here has as many of them.
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
    """The walk back from the only position of the last row along `origins`."""
    ((full, (position, _)),) = rows[-1].items()
    walk = [position]
    for stage in range(len(rows) - 1, 0, -1):
        position = origins[stage][full][position - rows[stage][full][0]]
        lane = rows[stage - 1].get(full)
        if lane is None or position < lane[0]:
            full -= 1
        walk.append(position)
    return walk[::-1]
