"""The files that DeepSpeed writes for a layout, to find missing ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

# Tied parameters are saved with the first layer that holds them.
_TIED_LAYER = 1
# DeepSpeed's names of optimizer files begin with this for some settings.
_OPTIONAL_PREFIX = "bf16_"


def missing_files(files: Collection[str], run: Mapping[str, Any]) -> list[str]:
    """The files that the layout and parameters in `run` require and that are not among `files`, in order.

    run: the content of `run.json`. Returns [] if it has no layout. Raises ValueError, KeyError, TypeError or
    AttributeError if it is malformed.
    """
    if "layout" not in run:
        return []
    plain = {name.removeprefix(_OPTIONAL_PREFIX) for name in files}
    layout = run["layout"]
    tensor, pipeline, data = (
        int(layout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "data")
    )
    replicas = data if int(layout["zero_stage"]) > 0 else 0
    # A malformed layout of a billion ranks is refused before its names are listed.
    if tensor * pipeline * max(replicas, 1) > len(plain):
        return [f"files for TP x PP x DP = {tensor} x {pipeline} x {data}"]
    expected = _expected(tensor, pipeline, replicas, run.get("parameters", {}))
    return [name for name in expected if name not in plain]


def unneeded_files(run: Mapping[str, Any]) -> frozenset[str]:
    """The names of `run`'s files that a resume does not read, so that it may start without them.

    With ZeRO these are the mp_rank files, the states of DeepSpeed's engine: weights and optimizer state are
    in the zero_pp_rank files, all else is in `run.json`. Without ZeRO the mp_rank files hold the optimizer.
    """
    if int(run.get("layout", {}).get("zero_stage", 0)) < 1:
        return frozenset()
    return frozenset(name for name in run["files"] if re.fullmatch(r"mp_rank_[0-9]+_model_states\.pt", name))


def _expected(tensor: int, pipeline: int, replicas: int, parameters: Collection[str]) -> Iterator[str]:
    """replicas: data-parallel ranks that write their own files, as with ZeRO."""
    for layer, rank in product(sorted({_layer_of(name) for name in parameters}), range(tensor)):
        yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
    for rank in range(tensor * pipeline):
        yield f"mp_rank_{rank:02d}_model_states.pt"
        for replica in range(replicas):
            yield f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"


def _layer_of(parameter: str) -> int:
    match = re.match(r"([0-9]{1,6})\.", parameter)
    return int(match[1]) if match else _TIED_LAYER
