"""Real processes run the preflight and write the file of --network-figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.cluster.preflight import NetworkFigures, preflight, read_network_figures
from tests.support.layouts import Row, config_of
from tests.support.pool import run_world


def start(path: str, nodes: tuple[str, ...]) -> Any:
    """Returns the notes of preflight on this rank. nodes: the node of each rank."""
    config = config_of(Row(dp=len(nodes)), parallel={"network_figures": path}, data={"data_path": ()})
    os.environ["SLURMD_NODENAME"] = nodes[dist.get_rank()]
    return preflight(config, {})


@pytest.mark.parametrize(
    "nodes", [("a", "a", "b", "b"), ("a", "a"), ("a", "b"), ("a", "a", "a", "b")], ids=str
)
def test_the_network_is_measured_and_written(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    path = str(tmp_path / "network.json")
    notes = run_world(len(nodes), start, path, nodes)
    assert all(len(of_rank) == 1 for of_rank in notes)
    figures = read_network_figures(config_of(Row(), parallel={"network_figures": path}))
    assert isinstance(figures, NetworkFigures)
    assert (figures.nodes, figures.device, figures.backend) == (len(set(nodes)), "CPU", "gloo")
    assert figures.node_size == min(nodes.count(name) for name in nodes)
    assert (figures.intra_bytes_per_s is None) == (len(set(nodes)) == len(nodes))
    assert (figures.inter_bytes_per_s is None) == (len(set(nodes)) == 1)


def test_a_file_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    notes = run_world(2, start, str(tmp_path / "none" / "network.json"), ("a", "a"))
    assert [len(of_rank) for of_rank in notes] == [2, 1]
    assert "cannot be written (No such file or directory)" in notes[0][1]
