"""--network-figures: measured rates replace the vendor's rates. An invalid file gives one error message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.arguments.notes import unused_setting_notes
from megatron.cluster.preflight import (
    NetworkFigures,
    read_network_figures,
    write_network_figures,
)
from megatron.errors import UserError
from megatron.planner.dry_run import planned_run_report
from megatron.planner.layer_memory import planned_run
from megatron.planner.network import Network, find_network
from megatron.planner.plan import make_plan
from megatron.planner.step_time import StepTime, planned_step
from tests.unit.planner.test_step_time import VOCAB, config_of

FIGURES = NetworkFigures(4, 8, "NVIDIA A100-SXM4-80GB", "nccl", 200e9, 20e9)
GOOD = {
    "kind": "Megatron network figures",
    "nodes": 4,
    "node_size": 8,
    "device": "NVIDIA A100-SXM4-80GB",
    "backend": "nccl",
    "intra_bytes_per_s": 200e9,
    "inter_bytes_per_s": 20e9,
}


def step_of(flags: str) -> StepTime:
    config = config_of(f"--world-size 64 --tensor-model-parallel-size 4 {flags}")
    step = planned_step(planned_run(config, VOCAB))
    assert step is not None
    return step


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    write_network_figures(str(path), FIGURES)
    assert json.loads(path.read_text()) == GOOD
    assert read_network_figures(config_of(f"--network-figures {path}")) == FIGURES
    assert read_network_figures(config_of()) is None


def test_measured_rates_are_taken_whole_and_flags_override_them(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    flag = f"--network-figures {path}"
    write_network_figures(str(path), FIGURES)
    assert find_network(config_of(flag)) == Network(8, 200e9, 20e9)
    links = Network.of_links(4, 100, 50)
    assert find_network(config_of(f"{flag} --node-size 4")) == Network(4, 200e9, 20e9)
    changed = find_network(config_of(f"{flag} --inter-node-gbps 50"))
    assert changed == Network(8, 200e9, links.inter_bytes_per_s)


def test_what_was_not_measured_is_the_vendors(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    usual = find_network(config_of())
    assert usual is not None
    for figures, expected in (
        (NetworkFigures(1, 4, "A100", "nccl", 150e9, None), Network(4, 150e9, usual.inter_bytes_per_s)),
        (NetworkFigures(2, 1, "A100", "nccl", None, 9e9), Network(1, usual.intra_bytes_per_s, 9e9)),
    ):
        write_network_figures(str(path), figures)
        assert find_network(config_of(f"--network-figures {path}")) == expected


def test_a_slower_network_makes_a_slower_step(tmp_path: Path) -> None:
    seconds = []
    for rate in (20e9, 2e9):
        path = tmp_path / f"{rate}.json"
        write_network_figures(str(path), NetworkFigures(8, 8, "A100", "nccl", 200e9, rate))
        seconds.append(step_of(f"--network-figures {path}").reduction)
    assert seconds[1] > 5 * seconds[0] > 0


def test_the_plan_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    write_network_figures(str(path), FIGURES)
    report = planned_run_report(make_plan(config_of(f"--network-figures {path}"), VOCAB))
    assert (
        "network    200.00 GB/s per device within a node, 20.00 GB/s per node, measured with nccl on "
        f"4 node(s) of 8 x NVIDIA A100-SXM4-80GB ({path})\n"
    ) in report


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        (json.dumps(GOOD)[:-9], "delimiter"),
        ("[" * 100_000, "nested"),
        ("[]", "not of the kind"),
        ('{"intra_node_gbps": 300}', "not of the kind"),
        (json.dumps({**GOOD, "kind": "other"}), "not of the kind"),
        (json.dumps({**GOOD, "more": 1}), "expected ["),
        (json.dumps({key: value for key, value in GOOD.items() if key != "nodes"}), "expected ["),
        (json.dumps({**GOOD, "nodes": 0}), "nodes is 0"),
        (json.dumps({**GOOD, "nodes": True}), "nodes is True"),
        (json.dumps({**GOOD, "node_size": 2.5}), "node_size is 2.5"),
        (json.dumps({**GOOD, "device": None}), "device is None"),
        (json.dumps({**GOOD, "backend": ["nccl"]}), "backend is"),
        (json.dumps({**GOOD, "intra_bytes_per_s": 0}), "intra_bytes_per_s is 0"),
        (json.dumps({**GOOD, "intra_bytes_per_s": "fast"}), "intra_bytes_per_s is 'fast'"),
        (json.dumps({**GOOD, "inter_bytes_per_s": float("nan")}), "inter_bytes_per_s is nan"),
        (json.dumps({**GOOD, "inter_bytes_per_s": float("inf")}), "inter_bytes_per_s is inf"),
        (json.dumps({**GOOD, "inter_bytes_per_s": True}), "inter_bytes_per_s is True"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "network.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        find_network(config_of(f"--network-figures {path}"))
    assert reason in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "does not exist: a run"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=reason):
            find_network(config_of(f"--network-figures {path}"))


@pytest.mark.parametrize(
    ("flags", "environment", "note"),
    [
        ("--dry-run", {}, "with --dry-run and without --gpu"),
        ("--dry-run --gpu a100-80gb", {}, None),
        ("", {"WORLD_SIZE": "1"}, "with one process"),
        ("--no-preflight", {"WORLD_SIZE": "2"}, "with --no-preflight"),
        ("", {"WORLD_SIZE": "2"}, None),
    ],
)
def test_a_note_says_where_the_flag_does_nothing(
    tmp_path: Path, flags: str, environment: dict[str, str], note: str | None
) -> None:
    for ending in ("bin", "idx"):
        (tmp_path / f"corpus.{ending}").touch()
    base = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 "
        f"--train-iters 1 --vocab-size 100 --data-path {tmp_path}/corpus --network-figures network.json"
    )
    notes: Any = unused_setting_notes(parse_args(f"{base} {flags}".split(), environment))
    found = [text for text in notes if "--network-figures" in text]
    assert found == ([] if note is None else [f"--network-figures has no effect {note}"])
