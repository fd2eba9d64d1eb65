"""The files that DeepSpeed writes for a layout, to see that a manifest lacks none of them."""

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
    """The names that `run`'s layout and parameters imply and that are not among `files`, in order.

    run: the content of `run.json`. Empty for a checkpoint that says nothing of its layout. Raises
    ValueError, KeyError, TypeError or AttributeError for one that is malformed.
    """
    if "layout" not in run:
        return []
    plain = {name.removeprefix(_OPTIONAL_PREFIX) for name in files}
    layout = run["layout"]
    tensor, pipeline, data = (
        int(layout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "data")
    )
    replicas = data if int(layout["zero_stage"]) > 0 else 0
    # A malformed layout of a billion ranks is answered before its names are made.
    if tensor * pipeline * max(replicas, 1) > len(plain):
        return [f"a file of tensor x pipeline x data parallel size {tensor} x {pipeline} x {data}"]
    expected = _expected(tensor, pipeline, replicas, run.get("parameters", {}))
    return [name for name in expected if name not in plain]


def _expected(tensor: int, pipeline: int, replicas: int, parameters: Collection[str]) -> Iterator[str]:
    """replicas: that write files of their own, as with ZeRO."""
    for layer, rank in product(sorted({_layer_of(name) for name in parameters}), range(tensor)):
        yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
    for rank in range(tensor * pipeline):
        yield f"mp_rank_{rank:02d}_model_states.pt"
        for replica in range(replicas):
            yield f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"


def _layer_of(parameter: str) -> int:
    match = re.match(r"([0-9]{1,6})\.", parameter)
    return int(match[1]) if match else _TIED_LAYER
