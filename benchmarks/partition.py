#!/usr/bin/env python3
"""The partitioner against DeepSpeed's and against the optimum, and how long it takes.

    python benchmarks/partition.py            about 20 seconds on one core
    python benchmarks/partition.py --slow     times DeepSpeed on 1,000 layers and 64 stages too: 20 s more

2,000 random lists (fixed seed) of up to 60 layers on up to 12 stages are compared in exact arithmetic: by the
largest stage, and by the sum of the squared stage weights. The optimum comes from a plain dynamic program
that shares no code with either.

Exit code 1 if ours is worse than DeepSpeed's or than the optimum in any case.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

CASES, MOST_LAYERS, MOST_STAGES, SEED = 2_000, 60, 12, 0
# Layers, stages and the milliseconds allowed.
SIZES = ((1_000, 64, 50), (10_000, 512, 2_000))
REPEATS = 3

Weights = list[int] | list[float]


# --- Layer lists ---


def small_integers(draw: random.Random, layers: int) -> Weights:
    """Many partitions are equally good."""
    return [draw.randint(1, 10) for _ in range(layers)]


def floats(draw: random.Random, layers: int) -> Weights:
    return [draw.random() for _ in range(layers)]


def gpt_like(draw: random.Random, layers: int) -> Weights:
    """A GPT's list: functions have weight 0, embedding and head have their own weights."""
    inner = max(layers - 6, 1)
    return [0, draw.choice([0, 1, 2, 2.5, 4]), 0, *[1] * inner, 0, 0, draw.choice([0, 1, 2, 3.7, 9])]


def heavy_tails(draw: random.Random, layers: int) -> Weights:
    """A few layers are much heavier than the others."""
    return [draw.paretovariate(1.0) for _ in range(layers)]


def some_zeros(draw: random.Random, layers: int) -> Weights:
    return [draw.choice([0, 0, 1, 2, 3, 7]) for _ in range(layers)]


KINDS = (small_integers, floats, gpt_like, heavy_tails, some_zeros)


def equal(_: random.Random, layers: int) -> Weights:
    return [1] * layers


TIMED_KINDS = {
    "equal": equal,
    "GPT-like": gpt_like,
    "integers 1..10": small_integers,
    "floats": floats,
}


# --- The optimum ---


def exact(weights: Weights) -> list[Fraction]:
    """The exact fraction of a float's decimal representation."""
    return [Fraction(str(weight)) for weight in weights]


Unevenness = tuple[Fraction, Fraction]
"""(weight of the largest stage, sum of the squared stage weights)"""


def unevenness(weights: Sequence[Fraction], bounds: Sequence[int]) -> Unevenness:
    if bounds[0] != 0 or bounds[-1] != len(weights) or any(a > b for a, b in pairwise(bounds)):
        raise SystemExit(f"{list(bounds)} are not valid bounds for {len(weights)} layers")
    stages = [sum(weights[a:b], Fraction(0)) for a, b in pairwise(bounds)]
    return max(stages), sum((stage**2 for stage in stages), Fraction(0))


def smallest_largest_stage(weights: Sequence[Fraction], num_stages: int) -> Fraction:
    """The textbook dynamic program: for each stage, the best position of its first layer."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    sums = list(accumulate((int(weight * unit) for weight in weights), initial=0))  # integers are fast
    best = sums
    for _ in range(num_stages - 1):
        best = [
            min(max(best[bound], sums[end] - sums[bound]) for bound in range(end + 1))
            for end in range(len(sums))
        ]
    return Fraction(best[-1], unit)


class Case(NamedTuple):
    """One list of layers: how uneven both partitions are, and the optimal largest stage."""

    kind: str
    ours: Unevenness
    theirs: Unevenness
    optimum: Fraction


def random_cases() -> list[Case]:
    from deepspeed.runtime.utils import partition_balanced

    from megatron.pipeline.partition import partition

    draw = random.Random(SEED)
    cases = []
    for number in range(CASES):
        kind = KINDS[number % len(KINDS)]
        stages = draw.randint(2, MOST_STAGES)
        weights = kind(draw, draw.randint(stages, MOST_LAYERS))
        stages = min(stages, sum(weight > 0 for weight in weights))
        values = exact(weights)
        cases.append(
            Case(
                kind.__name__.replace("_", " "),
                unevenness(values, partition([weights] * stages)),
                unevenness(values, partition_balanced(weights, stages)),
                smallest_largest_stage(values, stages),
            )
        )
    return cases


def compare(cases: Sequence[Case]) -> bool:
    """Prints the comparison by kind of list; whether ours is never worse and always optimal."""
    columns: list[tuple[str, Callable[[Case], bool]]] = [
        ("largest: equal", lambda case: case.ours[0] == case.theirs[0]),
        ("ours smaller", lambda case: case.ours[0] < case.theirs[0]),
        ("ours larger", lambda case: case.ours[0] > case.theirs[0]),
        ("ours not optimal", lambda case: case.ours[0] != case.optimum),
        ("theirs not optimal", lambda case: case.theirs[0] != case.optimum),
        ("ours more even", lambda case: case.ours < case.theirs),
        ("less even", lambda case: case.ours > case.theirs),
    ]
    kinds = dict.fromkeys(case.kind for case in cases)
    groups = {kind: [case for case in cases if case.kind == kind] for kind in kinds}
    groups["all"] = list(cases)
    print(f"{'':15} {'cases':>6}  {'  '.join(name for name, _ in columns)}  worst theirs/ours")
    for name, group in groups.items():
        counts = [f"{sum(map(holds, group)):{len(column)}}" for column, holds in columns]
        worst = max(float(case.theirs[0] / case.ours[0]) for case in group if case.ours[0])
        print(f"{name:15} {len(group):6}  {'  '.join(counts)}  {worst:17.2f}")
    return all(case.ours[0] == case.optimum and case.ours <= case.theirs for case in cases)


# --- Time ---


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def time_solver() -> None:
    from megatron.pipeline.partition import partition

    print(f"\n{'':15} " + "  ".join(f"{f'{n:,} layers on {k}':>20}" for n, k, _ in SIZES))
    for name, kind in TIMED_KINDS.items():
        cells = []
        for layers, stages, _ in SIZES:
            weights = kind(random.Random(SEED), layers)
            took = milliseconds(lambda w=weights, k=stages: partition([w] * k), REPEATS)
            cells.append(f"{took:17,.1f} ms")
        print(f"{name:15} " + "  ".join(cells), flush=True)
    print(f"{'limit':15} " + "  ".join(f"{limit:17,d} ms" for *_, limit in SIZES))


def time_deepspeed() -> None:
    from deepspeed.runtime.utils import partition_balanced

    layers, stages, _ = SIZES[0]
    weights = small_integers(random.Random(SEED), layers)
    took = milliseconds(lambda: partition_balanced(weights, stages), 1)
    print(f"DeepSpeed's     {took:17,.1f} ms (integers 1..10)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", action="store_true", help="time DeepSpeed's solver on the large list too")
    arguments = parser.parse_args()
    from benchmarks.machine import describe_machine
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig

    configure_logging(LoggingConfig())
    print(describe_machine(), flush=True)
    never_worse = compare(random_cases())
    time_solver()
    if arguments.slow:
        time_deepspeed()
    if not never_worse:
        raise SystemExit("ours is worse than DeepSpeed's or the optimum somewhere: see the table")


if __name__ == "__main__":
    main()
