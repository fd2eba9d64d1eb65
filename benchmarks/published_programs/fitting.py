"""The search for the constants of the predictions.

The constants are fitted on a part of the rows of each repository: in the order of the SHA-256 of their
sources, the first third and at most `MOST_OF_ORIGIN` of those that can be predicted and are not dubious
(`choose`). Of the rows of 2023 and later, benchmarks/published/modern.csv has only these.

Each repository counts on each kind of GPU with the root of its number of rows. The sum of the absolute errors
of log seconds is minimized, and of the distances from the values of `FITTED`, which come from measurements
of kernels, or are guesses, as their widths show.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published_programs.classes import Constants
from benchmarks.published_programs.steps import Run, predict_step

MOST_OF_ORIGIN = 40
_STEP = 0.03
_ROUNDS = 10
_SMOOTHING = 0.01
_OUTLIER = 0.4
"""A larger log error counts as this one: the run was probably not of the kind that its row states."""
_DISTANCE_WEIGHT = 0.005


@dataclass(frozen=True)
class Fitted:
    """A constant: its name, its expected value, the expected deviation in log, and its largest value."""

    name: str
    expected: float
    width: float
    most: float = math.inf


FITTED = (
    Fitted("v100.products", 0.80, 0.1, 0.90),
    Fitted("a100.products", 0.80, 0.1, 0.87),
    Fitted("h100+h200.products", 0.70, 0.1, 0.80),
    Fitted("b200+gb200.products", 0.60, 0.2, 0.78),
    Fitted("constants.limited_products", 0.85, 0.1, 1.0),
    Fitted("v100+a100+h100+h200+b200+gb200.tile_s", 4e-6, 0.3),
    Fitted("v100+a100+h100+h200+b200+gb200.contention", 0.2, 0.4, 1.0),
    Fitted("megatron 2021.traffic", 1.2, 0.3),
    Fitted("megatron 2021.data_rate", 0.7, 0.5, 1.0),
    Fitted("megatron 2021.tensor_latency_s", 3e-4, 1.0),
    Fitted("transformer engine+xla+fsdp compiled.traffic", 1.2, 0.3),
    Fitted("fsdp eager.traffic", 1.3, 0.3),
    Fitted("fsdp eager.attention_rate.0", 0.8, 0.3, 1.0),
    Fitted("fsdp eager.attention_rate.1", 0.7, 0.3, 1.0),
    Fitted("nanotron.traffic", 1.3, 0.3),
    Fitted("nanotron.host.layer_s", 4e-3, 1.0),
    Fitted("nanotron.host.tensor_s", 1.5e-5, 1.0),
    Fitted("nanotron.host.pipeline_s", 3e-3, 1.0),
    Fitted("nanotron.host.update_s", 8e-3, 1.0),
    Fitted("nanotron.host.stall_s", 1.1, 1.0),
)


@dataclass(frozen=True)
class Sample:
    """A measurement to fit on: constants -> its run, its seconds, and the repository that published it."""

    run: Callable[[Constants], Run]
    seconds: float
    origin: str
    gpu_kind: str


def choose(sources: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the sources that the constants are fitted on, of those that each repository publishes."""
    chosen: set[str] = set()
    for of_origin in sources.values():
        ordered = sorted(of_origin, key=lambda source: hashlib.sha256(source.encode()).hexdigest())
        chosen.update(ordered[: min(len(ordered) // 3, MOST_OF_ORIGIN)])
    return chosen


def fit(samples: Sequence[Sample], constants: Constants, fitted: Sequence[Fitted] = FITTED) -> Constants:
    """Returns the best constants: Gauss-Newton with reweighted residuals, starting at the expected values."""
    weights = _weights(samples)
    widths = np.array([constant.width for constant in fitted])
    expected = np.log([constant.expected for constant in fitted])
    most = np.log([constant.most for constant in fitted])

    def errors(point: np.ndarray) -> np.ndarray:
        at = _at(constants, fitted, point)
        return np.array([math.log(predict_step(one.run(at)).total / one.seconds) for one in samples])

    def cost(residuals: np.ndarray, point: np.ndarray) -> float:
        sizes = np.sqrt(np.minimum(np.abs(residuals), _OUTLIER) ** 2 + _SMOOTHING**2)
        return float(weights @ sizes + _DISTANCE_WEIGHT * np.sum(((point - expected) / widths) ** 2))

    point, residuals = expected, errors(expected)
    for _ in range(_ROUNDS):
        slopes = np.stack(
            [(residuals - errors(point - _STEP * unit)) / _STEP for unit in np.eye(len(point))], 1
        )
        curvature = weights / (2 * np.sqrt(residuals**2 + _SMOOTHING**2))
        curvature[np.abs(residuals) > _OUTLIER] *= 0.05
        hessian = slopes.T @ (slopes * curvature[:, None]) + np.diag(_DISTANCE_WEIGHT / widths**2)
        gradient = slopes.T @ (curvature * residuals) + _DISTANCE_WEIGHT * (point - expected) / widths**2
        direction = np.clip(-np.linalg.solve(hessian, gradient), -0.4, 0.4)
        for part in (1.0, 0.5, 0.25, 0.1):
            tried = np.minimum(point + part * direction, most)
            tried_residuals = errors(tried)
            if cost(tried_residuals, tried) < cost(residuals, point) - 1e-5:
                point, residuals = tried, tried_residuals
                break
        else:
            break
    return _at(constants, fitted, point)


def _weights(samples: Sequence[Sample]) -> np.ndarray:
    counts = Counter((one.origin, one.gpu_kind) for one in samples)
    return np.array([counts[one.origin, one.gpu_kind] ** -0.5 for one in samples])


def _at(constants: Constants, fitted: Sequence[Fitted], point: np.ndarray) -> Constants:
    for constant, value in zip(fitted, point, strict=True):
        constants = constants.with_value(constant.name, math.exp(value))
    return constants
