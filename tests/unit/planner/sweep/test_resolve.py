"""Tests the configuration of each row: rejections before anything runs, predictions, groups of
equal losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.commands import sweep
from megatron.config.config import SECTIONS
from megatron.errors import UserError
from megatron.planner.plan import make_plan
from megatron.planner.sweep.axes import Axis, Row, make_rows
from megatron.planner.sweep.resolve import _SAME_LOSSES, loss_settings_digest, resolve_rows

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 1000 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-3"
).split()


def resolve(*axes: Axis, base: list[str] | None = None) -> list[Row]:
    base = BASE if base is None else base
    return resolve_rows(base, make_rows(axes, base), 5, dry_run=True)


def test_a_combination_that_the_configuration_refuses_is_a_row_with_its_reason() -> None:
    found = resolve(Axis("--pipeline-model-parallel-size", ("1", "2")), Axis("--zero-stage", ("1", "2")))
    assert [row.refused is None for row in found] == [True, True, True, False]
    assert "--zero-stage" in found[3].refused and found[3].predicted is None


def test_the_number_of_processes_follows_from_the_flags() -> None:
    pipeline, tensor, context = (
        Axis(f"--{name}-parallel-size", ("1", "2")) for name in ("pipeline-model", "tensor-model", "context")
    )
    assert [row.processes for row in resolve(pipeline, tensor)] == [1, 2, 2, 4]
    base = [*BASE, *"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2".split()]
    assert [row.processes for row in resolve(context, base=base)] == [4, 8]
    assert [row.processes for row in resolve(context, base=[*base, "--world-size", "8"])] == [8, 8]


def test_a_prediction_is_that_of_the_planner() -> None:
    words = [*BASE, *"--pipeline-model-parallel-size 2 --partition-method stages:1,3".split()]
    (row,) = resolve(base=words)
    plan = make_plan(read_command_line([*words, "--world-size", "2", "--dry-run"], {}).config, 1000)
    assert row.predicted["memory_bytes"] == plan.bytes_by_rank
    assert row.predicted["layers"] == [plan.run.stages.layer_range(0), plan.run.stages.layer_range(1)]
    assert row.tokens_per_step == 32 * 32


def test_the_predicted_bubble_is_that_of_1f1b() -> None:
    """Without a head, stages with equal numbers of layers take equal times. The bubble is (p - 1) / (m + p -
    1)."""
    small_head = [*BASE, "--pipeline-model-parallel-size", "4", "--make-vocab-size-divisible-by", "1"]
    small_head[small_head.index("--vocab-size") + 1] = "2"
    first, second = resolve(Axis("--global-batch-size", ("8", "32")), base=small_head)
    assert first.predicted["bubble"] == pytest.approx(3 / 11, rel=0.01)
    assert second.predicted["bubble"] == pytest.approx(3 / 35, rel=0.02)
    assert first.predicted["max_over_mean"] == pytest.approx(1, abs=0.01)


def test_with_a_gpu_the_step_is_predicted() -> None:
    base = [*BASE, "--bf16", "--pipeline-model-parallel-size", "2"]
    (without,) = resolve(base=base)
    assert without.predicted["step_s"] is None
    base += ["--gpu", "a100-80gb"]
    (found,) = resolve(base=base)
    config = read_command_line([*base, "--train-iters", "5", "--world-size", "2", "--dry-run"], {}).config
    step = make_plan(config, 1000).prediction
    assert (found.predicted["step_s"], found.predicted["bubble"]) == (step.total, step.bubble)
    assert found.numbers == without.numbers


def test_a_partition_that_is_measured_at_the_start_has_no_prediction() -> None:
    axis = Axis("--partition-method", ("profile", "time"))
    profile, time = resolve(axis, base=[*BASE, "--pipeline-model-parallel-size", "2"])
    assert profile.refused is None and profile.predicted["memory_bytes"] is None
    assert "measures the layers at the start" in profile.predicted["note"]
    assert time.predicted["memory_bytes"] is not None


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        (Axis("--micro-batch-size", ("1", "2")), 1),
        (Axis("--pipeline-model-parallel-size", ("1", "2")), 1),
        (Axis("--partition-method", ("time", "memory")), 1),
        (Axis("--checkpoint-activations", ("on", "off")), 1),
        (Axis("--lr", ("1e-3", "2e-3")), 2),
        (Axis("--bf16", ("on", "off")), 2),
        (Axis("--seed", ("1", "2")), 2),
        (Axis("--global-batch-size", ("16", "32")), 2),
        (Axis("--num-layers", ("2", "4")), 2),
        (Axis("--clip-grad", ("0", "1")), 2),
    ],
)
def test_axes_that_change_the_losses_form_groups(axis: Axis, groups: int) -> None:
    found = resolve(axis, base=BASE)
    assert len({row.numbers for row in found}) == groups
    assert all(row.refused is None for row in found)


def test_precisions_have_their_own_tolerance() -> None:
    exact, rounded = (row.tolerance for row in resolve(Axis("--bf16", ("off", "on"))))
    assert (exact, rounded) == (1e-5, 2.0**-7)


def test_the_settings_without_effect_on_losses_exist() -> None:
    config = read_command_line([*BASE, "--dry-run"], {}).config
    for section, names in _SAME_LOSSES.items():
        fields = {field.name for field in dataclasses.fields(SECTIONS[section])}
        assert set(names or ()) <= fields
    assert len(loss_settings_digest(config)) == 12


def test_a_ramp_up_is_refused() -> None:
    with pytest.raises(UserError, match="all 1 combination.* --rampup-batch-size"):
        resolve(base=[*BASE, "--rampup-batch-size", "8", "8", "100"])


def test_a_curriculum_is_refused(tmp_path: Path) -> None:
    curriculum = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32}
    curriculum |= {
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    }
    (tmp_path / "ds.json").write_text(json.dumps({"curriculum_learning": curriculum}))
    with pytest.raises(UserError, match="curriculum_learning"):
        resolve(base=[*BASE, "--deepspeed_config", str(tmp_path / "ds.json")])


def test_plan_prints_and_writes_the_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "--micro-batch-size", "1", "3", "--", *BASE, "--pipeline-model-parallel-size", "2"]
    sweep.main(["plan", "--json", str(tmp_path / "plan.json"), *words])
    printed = capsys.readouterr().out
    assert "planned bubble" in printed and "row 1 refused: --global-batch-size 32" in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [row["status"] for row in found["rows"]] == ["planned", "refused"]
    assert len(found["rows"][0]["predicted"]["memory_bytes"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_wrong_base_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        sweep.main(["plan", "--vary", "--micro-batch-size", "1", "2", "--", *BASE[2:]])
    assert error.value.code == 2
    assert capsys.readouterr().err.startswith(
        "error: all 2 combination(s) are invalid. The reason for the first: "
    )
