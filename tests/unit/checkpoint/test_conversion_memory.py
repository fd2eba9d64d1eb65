"""The largest tensor that a conversion allocates does not depend on the size of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.checkpoint.conversion.pipeline import convert
from megatron.checkpoint.conversion.source import open_any
from megatron.checkpoint.formats import dcp, dcp_writer, native, native_writer, torch_dist_writer
from megatron.checkpoint.formats.registry import writer_class
from megatron.checkpoint.formats.state import ReplicaMismatch
from megatron.mpu.pieces import Piece
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint.native_folder import random_wholes, write_native

FFN = 4096
BLOCK, CHUNK = 1 << 13, 1 << 15
LARGEST = "3.mlp.dense_h_to_4h.weight"


class Allocations(TorchDispatchMode):
    """Records the size of the largest storage that an operation of torch allocates. Digests do not count:
    numpy computes them in blocks of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self.largest = max(self.largest, storage.nbytes())
        return result


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(dcp, "_BLOCK_BYTES", BLOCK)
    for writer in (dcp_writer, torch_dist_writer):
        monkeypatch.setattr(writer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(native_writer, "_STEP_BYTES", CHUNK)


def copied(source: Path, target: Path, format_name: str) -> tuple[int, int]:
    """Copies the largest parameter. Returns (bytes of the largest allocation, bytes of the parameter)."""
    target.mkdir()
    reader = open_any(source)
    spec = reader.specs[LARGEST]
    writer = writer_class(format_name)(target, reader)
    states: set[str] = set()

    def pieces() -> Iterator[Piece]:
        for piece in reader.pieces(LARGEST, ReplicaMismatch(), verify=True):
            states.update(piece.values)
            yield piece

    with Allocations() as mode:
        writer.write_parameter(LARGEST, pieces())
    assert len(states) == 3
    return mode.largest, 4 * prod(spec.valid_shape)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("model", [{}, pytest.param({"glu_activation": "swiglu"}, id="gated")])
def test_the_largest_allocation_is_a_chunk(
    tp: int, model: dict[str, Any], tmp_path: Path, small_blocks: None
) -> None:
    config = config_of(Row(tp=tp, zero=1), model={"ffn_hidden_size": FFN, **model})
    source = write_native(tmp_path, config, random_wholes(config))
    whole = tmp_path / "whole"
    list(convert(open_any(source), writer_class("dcp"), whole))
    allocations = []
    for number, (folder, format_name) in enumerate(
        [*((source, name) for name in ("dcp", "torch_dist", "native", "universal")), (whole, "native")]
    ):
        largest, size = copied(folder, tmp_path / str(number), format_name)
        assert largest <= CHUNK < size / 10, (folder, format_name)
        allocations.append(largest)
    # From one rank, a universal checkpoint is written block by block, without an additional tensor.
    assert all(allocations[:3]) and allocations[4]
