"""The names of the splits, and the value of --split."""

from __future__ import annotations

import math

from megatron.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Fractions of train, valid and test that add up to 1, from '969, 30, 1', '949/50/1' or '1'.

    Missing weights are 0. Raises ConfigError for anything else.
    """
    try:
        weights = [float(part) for part in split.split("," if "," in split else "/")]
    except ValueError:
        weights = []
    total = sum(weights)
    if len(weights) > 3 or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise ConfigError(
            f"--split is '{split}': expected up to three weights for training, validation and test, none "
            "negative and not all 0, such as 969,30,1"
        )
    train, valid, test = weights + [0.0] * (3 - len(weights))
    return train / total, valid / total, test / total
