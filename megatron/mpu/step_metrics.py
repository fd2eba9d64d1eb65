"""Values that parts of a training step record by name, for the log lines and curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.compilation import not_compiled
from megatron.mpu.world import gather_from_all_ranks

Reduction = Literal["mean", "max", "min"]


class StepMetrics:
    """Mean, maximum or minimum of each recorded value, over all ranks and micro-batches of a log interval.

    A layer records with `context.metrics.record(name, value)`. The ranks agree on the names at the first log
    line, so each name must be recorded on some rank from the first step on. If there are names, each log line
    sends two small tensors; otherwise none. A recomputed layer records twice, which changes no reduction.
    """

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._values: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._names: list[str] | None = None
        self._is_step = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Returns a context in which `record` has an effect. Evaluations run outside of it."""
        self._is_step = True
        try:
            yield
        finally:
            self._is_step = False

    @not_compiled
    @torch.no_grad()
    def record(self, name: str, value: Tensor | float, reduce: Reduction = "mean") -> None:
        """Records a scalar, or a vector of several values. They are read at the log line. Raises ValueError
        if the name has a different reduction."""
        if not self._is_step:
            return
        if self._reductions.setdefault(name, reduce) != reduce:
            raise ValueError(f"metric '{name}' is recorded with {self._reductions[name]} and with {reduce}")
        new = torch.as_tensor(value).detach().double()
        self._counts[name] = self._counts.get(name, 0) + new.numel()
        if new.dim():
            new = getattr(new, {"mean": "sum", "max": "amax", "min": "amin"}[reduce])()
        old = self._values.get(name)
        if old is not None:
            new = getattr(torch, {"mean": "add", "max": "maximum", "min": "minimum"}[reduce])(old, new)
        self._values[name] = new

    def collect(self, device: torch.device) -> dict[str, float]:
        """Returns the reduced values since the last call, by name, equal on every rank. It is a
        collective."""
        if self._names is None:
            self._agree_on_names()
        assert self._names is not None
        if late := self._reductions.keys() - set(self._names):
            raise ValueError(
                f"metric '{min(late)}' was not recorded in the first steps: record it in all of them"
            )
        if not self._names:
            return {}
        sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=device)
        largest = torch.full((len(self._names),), -torch.inf, dtype=torch.float64, device=device)
        for index, name in enumerate(self._names):
            if name not in self._values:
                continue
            sums[index, 1] = self._counts[name]
            if self._reductions[name] == "mean":
                sums[index, 0] = self._values[name]
            else:
                sign = 1 if self._reductions[name] == "max" else -1
                largest[index] = sign * self._values[name]
        if dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self._values, self._counts = {}, {}
        found = {}
        rows = zip(self._names, sums.tolist(), largest.tolist(), strict=True)
        for name, (total, count), maximum in rows:
            if count:
                reduce = self._reductions[name]
                found[name] = total / count if reduce == "mean" else maximum if reduce == "max" else -maximum
        return found

    def _agree_on_names(self) -> None:
        """Makes all ranks use the same names. It is a collective. Raises ValueError on every rank if two
        ranks reduce a name differently."""
        for reductions in gather_from_all_ranks(self._reductions):
            for name, reduce in reductions.items():
                if self._reductions.setdefault(name, reduce) != reduce:
                    raise ValueError(f"metric '{name}' is recorded with two reductions, one is {reduce}")
        self._names = sorted(self._reductions)
