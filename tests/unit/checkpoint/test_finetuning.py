"""Tests from which checkpoint a command with --finetune or --no-load-optim starts, and to which run this
checkpoint then belongs."""

import shutil

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.record import TrainingState, describe_start
from megatron.errors import UserError
from tests.unit.checkpoint.saved_runs import Run, damage


@pytest.fixture
def base(tmp_path):
    return Run(tmp_path / "base", tmp_path / "base").save(2, 4)


def test_finetuning_is_a_new_run_at_iteration_0_that_records_its_origin(base, tmp_path):
    run = Run(tmp_path / "tuned", base.folder, finetune=True)
    assert run.start.folder == base.folder / "global_step4" and run.start.start_state == TrainingState()
    text = describe_start(run.start, str(base.folder))
    assert text.startswith(f"weights from {run.start.folder}, iteration 4") and "(--finetune)" in text
    run.save(2)
    saved = open_checkpoint(run.folder / "global_step2")
    assert saved.run_id != base.identity.run_id and saved.lineage == ()
    origin = saved.run["origin"]
    assert (origin["folder"], origin["iteration"]) == ("global_step4", 4) and origin["weights_only"]


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim"])
def test_the_same_command_resumes_its_own_run_whatever_became_of_the_first(base, flag, tmp_path):
    tuned = tmp_path / "tuned"
    first = Run(tuned, base.folder, **{flag: True})
    assert first.start.no_optimizer
    first.save(6)
    for change in (lambda: base.save(6), lambda: shutil.rmtree(base.folder)):
        change()
        again = Run(tuned, base.folder, **{flag: True})
        assert again.started_from == "global_step6" and again.identity.run_id == first.identity.run_id
        assert again.start.start_state == again.start.state and not again.start.no_optimizer
    assert Run(tuned, tuned).identity.run_id == first.identity.run_id


def test_without_an_own_checkpoint_finetuning_starts_again(base, tmp_path):
    first = Run(tmp_path / "tuned", base.folder, finetune=True)
    assert Run(tmp_path / "tuned", base.folder, finetune=True).start.weights_only
    first.save(2)
    damage(first.folder, 2, "run.json")
    again = Run(tmp_path / "tuned", base.folder, finetune=True)
    assert again.start.weights_only and again.identity.run_id == first.identity.run_id
    assert again.identity.lineage == ()


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim"])
@pytest.mark.parametrize("at_first", [True, False])
def test_a_command_with_another_flag_does_not_take_over_the_folder(base, at_first, flag, tmp_path):
    Run(tmp_path / "tuned", base.folder, **{flag: at_first}).save(6)
    with pytest.raises(UserError, match="another run .global_step6.*resume that run with --load"):
        Run(tmp_path / "tuned", base.folder, **{flag: not at_first})


def test_a_converted_checkpoint_may_be_finetuned_in_its_folder(base):
    """A start with --finetune is a new run. The checkpoints in the folder do not belong to it."""
    universal = base.folder / "global_step4_universal"
    shutil.copytree(base.folder / "global_step4", universal)
    (universal / "zero").mkdir()
    flags = {"load": universal, "universal_checkpoint": True, "finetune": True}
    with pytest.raises(UserError, match="another run .global_step2, global_step4.* with --finetune"):
        Run(base.folder, **flags)
    for name in ("global_step2", "global_step4"):
        shutil.rmtree(base.folder / name)
    for name in ("latest", "latest.json"):
        (base.folder / name).unlink()
    run = Run(base.folder, **flags).save(2)
    assert run.start.weights_only and run.identity.run_id != base.identity.run_id
    assert Run(base.folder, **flags).started_from == "global_step2"
