"""The preflight names the node that differs from the other nodes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.cluster import preflight
from megatron.cluster.preflight import (
    NetworkFigures,
    RankInfo,
    check_shared_folders,
    describe,
    differences_table,
    find_differences,
    network_figures,
)
from tests.support import HANG_TIMEOUT_S

VERSIONS = {"torch": "2.13.0", "NCCL": "2.29.3"}


def facts(**changes: dict[int, object]) -> list[RankInfo]:
    """Returns what three nodes with two ranks each report. changes: field -> rank -> value."""
    alike = [
        RankInfo(rank, f"n{rank // 2}", VERSIONS, "corpus", 0.98, {}, 2e9 + 1e8 * rank) for rank in range(6)
    ]
    return [
        replace(fact, **{name: values[fact.rank] for name, values in changes.items() if fact.rank in values})
        for fact in alike
    ]


def test_consistent_nodes_give_one_sentence() -> None:
    assert find_differences(facts()) == []
    assert describe(facts()) == (
        "preflight: 3 node(s), 6 processes, torch 2.13.0, NCCL 2.29.3, 98% of device memory free; "
        "all-reduce 2.00 GB/s per node, least on n0"
    )


def test_network_figures_are_those_of_the_slowest_node() -> None:
    within = {rank: 5e9 + 1e8 * rank for rank in range(6)}
    assert network_figures(facts(node_bytes_per_s=within), "A100", "nccl") == NetworkFigures(
        3, 2, "A100", "nccl", 5e9, 2e9
    )
    # Ranks 4 and 5 are alone on their nodes, so nothing was measured within these nodes.
    alone = facts(node_bytes_per_s={rank: within[rank] for rank in range(2, 4)}, node={4: "a", 5: "b"})
    assert network_figures(alone, "A100", "nccl") == NetworkFigures(4, 1, "A100", "nccl", 5.2e9, 2e9)
    one_node = facts(node_bytes_per_s=within, node=dict.fromkeys(range(6), "n0"))
    assert network_figures(one_node, "A100", "nccl") == NetworkFigures(1, 6, "A100", "nccl", 5e9, None)


def test_different_version_has_one_row_per_node() -> None:
    old = {**VERSIONS, "NCCL": "2.20.0"}
    assert find_differences(facts(versions={2: old, 3: old})) == [
        ("n1", "NCCL", "2.20.0, 2.29.3 on other nodes")
    ]
    assert find_differences(facts(versions={5: {"torch": "2.13.0"}})) == [
        ("n2", "NCCL", "missing, 2.29.3 on other nodes")
    ]


def test_used_memory_names_the_rank() -> None:
    (row,) = find_differences(facts(free_share={4: 0.5}))
    assert row == ("n2", "memory", "rank 4: 50% of device memory free, up to 98% on other ranks")
    assert find_differences(facts(free_share={4: 0.95})) == []
    assert find_differences(facts(free_share=dict.fromkeys(range(6)))) == []  # CPUs


def test_other_data_and_unshared_folders_name_the_node() -> None:
    found = find_differences(facts(data={3: "another corpus"}, folder_problems={0: {"--save": "not there"}}))
    assert found == [("n0", "--save", "not there"), ("n1", "--data-path", "data differ from the other nodes")]
    assert differences_table(found).splitlines() == [
        "  node  what         found",
        "  n0    --save       not there",
        "  n1    --data-path  data differ from the other nodes",
    ]


def check_everywhere(*folders: Path) -> list[dict[str, str]]:
    """Runs check_shared_folders on one single-rank node per folder. Each node sees its own folder as
    --save."""
    barrier = threading.Barrier(len(folders), timeout=HANG_TIMEOUT_S)
    found: list[dict[str, str]] = [{} for _ in folders]

    def check(rank: int) -> None:
        found[rank] = check_shared_folders({"--save": str(folders[rank])}, rank, True, "token", barrier.wait)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_shared_folder_has_no_problem_and_stays_empty(tmp_path: Path) -> None:
    assert check_everywhere(tmp_path, tmp_path, tmp_path) == [{}, {}, {}]
    assert list(tmp_path.iterdir()) == []


def test_unshared_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_MAX_WAIT_FOR_FILE_S", 0.2)
    (tmp_path / "local").mkdir()
    found = check_everywhere(tmp_path, tmp_path, tmp_path / "local")
    assert found[:2] == [{}, {}] and "not the folder that rank 0 sees" in found[2]["--save"]


def test_unwritable_folder_is_found(tmp_path: Path) -> None:
    found = check_everywhere(tmp_path, tmp_path / "none")
    assert found == [{}, {"--save": f"{tmp_path / 'none'} cannot be written (No such file or directory)"}]
