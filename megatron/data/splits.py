"""--split: which documents train, validate and test."""

from __future__ import annotations

from megatron.config import parse_split

SPLIT_NAMES = ("train", "valid", "test")


def split_documents(split: str, num_documents: int) -> tuple[range | None, range | None, range | None]:
    """The documents of train, valid and test, each a range of [0, num_documents); None for a split that has
    none.

    The bounds are Megatron's: each share is rounded to the nearest whole document (half to even), and the
    excess or lack of the three is taken from every upper bound. A split of weight 0 is None even where
    rounding would leave a document in it.
    """
    fractions = parse_split(split)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction * float(num_documents))))
    excess = bounds[-1] - num_documents
    # With few documents Megatron's correction can fall below 0, which names no document.
    bounds = [0] + [max(bound - excess, 0) for bound in bounds[1:]]
    train, valid, test = (
        range(start, end) if fraction > 0 and end > start else None
        for fraction, start, end in zip(fractions, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test
