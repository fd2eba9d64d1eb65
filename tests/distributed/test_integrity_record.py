"""After loading, the state is compared with the integrity record. A difference stops the run, and the error
names what differs."""

import json
import re
import shutil
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.errors import UserError
from tests.support.checkpoints import FINGERPRINT, make_manager, save_midway, state_after
from tests.support.layouts import VOCAB, Row, build_engine, config_of, train, train_layout, unconnected_run
from tests.support.pool import run_world
from tests.unit.checkpoint.saved_runs import make_unreadable


def save_two_steps(row, folder):
    save_midway(row, folder, 2)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps")
    run_world(1, save_two_steps, Row(), folder)
    return folder


@pytest.fixture
def saved(two_steps, tmp_path):
    """Returns a folder with a checkpoint of two steps of one process."""
    return shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)


def start(row, folder, options=None):
    """Resumes. Returns (the printed lines, or the error that stops the resume; the integrity record of the
    loaded state)."""
    from megatron.checkpoint.integrity import make_integrity_record

    config = config_of(row, checkpoint={"load": str(folder)}, parallel=options or {})
    engine = build_engine(config)
    train(engine, [9])
    printed: list[str] = []
    try:
        manager = make_manager(engine, folder)
        manager.restore_or_init(find_latest(folder), printed.append)
    except UserError as error:
        return str(error)
    return "\n".join(printed), make_integrity_record(engine)


def integrity_record_in(folder):
    return json.loads((folder / "global_step2" / "run.json").read_text())["certificate"]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row", [Row(), Row(tp=2, pp=2, dp=2, zero=1), Row(pp=4), Row(tp=4, zero=1)], ids=str)
def test_an_integrity_record_does_not_depend_on_the_layout(row, tmp_path):
    run_world(4, save_two_steps, Row(tp=2, dp=2, zero=1), tmp_path)
    saved = integrity_record_in(tmp_path)
    parameters = len(saved["digests"]["fp32"])
    for printed, again in run_world(row.world_size, start, row, tmp_path):
        assert again["digests"] == saved["digests"] and again["updates"] == 2
        assert again["probe"]["loss"] == pytest.approx(saved["probe"]["loss"], rel=1e-6)
        assert again["unequal_copies"] == saved["unequal_copies"] == []
        for line in (
            f"weights, fp32 {parameters} parameters, equal to the last bit",
            f"moments, exp_avg_sq {parameters} parameters, equal to the last bit",
            "updates of the optimizer 2, equal",
            "the same, from sample 16",
            "the same schedule",
        ):
            assert line in " ".join(printed.split())


def change(folder, what):
    """Changes one part of the checkpoint, and updates the record of its files."""
    folder = folder / "global_step2"
    run = json.loads((folder / "run.json").read_text())
    if what == "canary":
        run["certificate"]["probe"]["loss"] += 0.01
    elif what == "updates":
        run["certificate"]["updates"] = 3
    else:
        path = folder / "mp_rank_00_model_states.pt"
        state = torch.load(path, weights_only=False)
        optimizer = state["optimizer"]
        mappings = enumerate(optimizer["param_slice_mappings"])
        group, address = next((g, mapping["8.weight"]) for g, mapping in mappings if "8.weight" in mapping)
        if what == "fp32":
            optimizer["single_partition_of_fp32_groups"][group][address.start] += 1e-6
        else:
            optimizer["base_optimizer_state"]["state"][group][what][address.start + 3] *= 1.001
        torch.save(state, path)
        run["files"][path.name]["bytes"] = path.stat().st_size
    (folder / "run.json").write_text(json.dumps(add_checksum(run)))


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize(
    "what, named",
    [
        ("fp32", r"weights, fp32 of 8\.weight differs from what was saved"),
        ("exp_avg", r"moments, exp_avg of 8\.weight differs from what was saved"),
        ("exp_avg_sq", r"moments, exp_avg_sq of 8\.weight differs from what was saved"),
        ("updates", r"counts 2\.0 updates and had counted 3"),
        ("canary", r"the canary loss was .* when it was saved and is"),
    ],
)
def test_a_difference_stops_every_rank_and_is_named(what, named, saved):
    change(saved, what)
    for sentence in run_world(2, start, Row(pp=2), saved):
        assert isinstance(sentence, str)
        assert re.search(named, sentence)


def save_with_unequal_copies(row, folder):
    engine = build_engine(config_of(row))
    train(engine, range(1))
    make_copies_unequal(engine)
    make_manager(engine, folder).save(state_after(2))


def make_copies_unequal(engine):
    for flat in engine.optimizer.flat:
        for parameter, offset in flat.offsets.items():
            if engine.optimizer.names[parameter] == "8.weight":
                flat.master.data[offset] += 1e-3 * engine.global_rank


def test_replicas_that_differ_are_recorded_and_need_a_flag_to_load(tmp_path):
    run_world(2, save_with_unequal_copies, Row(tp=2), tmp_path)
    assert integrity_record_in(tmp_path)["unequal_copies"] == ["fp32 of 8.weight"]
    with pytest.raises(
        UserError, match=r"not equal \(fp32 of 8\.weight; 1 in all\).*--allow-replica-mismatch"
    ):
        find(tmp_path)
    assert find(tmp_path, checkpoint={"allow_replica_mismatch": True})[0] is not None


def save_beside_an_unreadable_checkpoint(folder):
    """Saves steps 1 to 3: the replicas of 2 and 3 differ, and checkpoint 2 cannot be read while 3 is
    saved."""
    engine = build_engine(config_of(Row(tp=2), checkpoint={"keep_last": 1}))
    train(engine, range(1))
    manager = make_manager(engine, folder)
    manager.save(state_after(1))
    make_copies_unequal(engine)
    manager.save(state_after(2))
    with pytest.MonkeyPatch.context() as patch:
        make_unreadable(patch, folder / "global_step2" / "run.json")
        manager.save(state_after(3))


def test_the_only_checkpoint_that_a_resume_accepts_is_kept_though_another_cannot_be_read(tmp_path):
    run_world(2, save_beside_an_unreadable_checkpoint, tmp_path)
    assert {path.name for path in tmp_path.glob("global_step*")} == {
        f"global_step{step}" for step in (1, 2, 3)
    }


# --- data and learning rate ---


def find(folder, fingerprint=FINGERPRINT, **changes):
    changes.setdefault("checkpoint", {})["load"] = str(folder)
    config = config_of(Row(), **changes)
    return find_checkpoint(unconnected_run(config, fingerprint=fingerprint)), config


def load_lines(folder, fingerprint, changes):
    checkpoint, config = find(folder, fingerprint, **changes)
    checks = load_checkpoint(build_engine(config), checkpoint, fingerprint)
    return {check.subject: check.result for check in checks}


def test_override_data_accepts_other_data(saved):
    other = {**FINGERPRINT, "tokens": [6000]}
    with pytest.raises(UserError, match="--override-data to continue"):
        find(saved, other)
    (lines,) = run_world(1, load_lines, saved, other, {"checkpoint": {"override_data": True}})
    assert lines["data"].startswith("different data, from sample 16 (--override-data): tokens: [5000]")


@pytest.mark.parametrize("flag, winner", [("override", "new"), ("use_checkpoint", "old")])
def test_another_schedule_is_refused_with_both_values_and_a_flag_selects_one(flag, winner, saved):
    from megatron.checkpoint.compatibility import starting_from
    from megatron.data.vocabulary import Vocabulary
    from megatron.run import Run

    old = find(saved)[1].schedule.lr
    with pytest.raises(UserError, match=rf"max_lr was {old}, is 0.5.*--override-lr-scheduler"):
        find(saved, schedule={"lr": 0.5})
    changes = {"schedule": {"lr": 0.5, f"{flag}_lr_scheduler": True}}
    checkpoint, config = find(saved, **changes)
    run = Run.from_config(config, Vocabulary(VOCAB, None))
    assert starting_from(checkpoint, run).lr_schedule.max_lr == (0.5 if winner == "new" else old)
    (lines,) = run_world(1, load_lines, saved, FINGERPRINT, changes)
    assert lines["learning rate"].startswith(f"the {winner} schedule (--")
    assert f"max_lr was {old}, is 0.5" in lines["learning rate"]


def save_with_short_canary(row, folder, options):
    """Returns the losses of a run that saves after two steps. Its canary is shorter than its sequences."""
    from megatron.checkpoint import integrity

    with patch.object(integrity, "CANARY_TOKENS", 6):
        engine = build_engine(config_of(row, parallel=options))
        train(engine, range(2))
        make_manager(engine, folder).save(state_after(2))
    return train(engine, [2])


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "row, options, compared",
    [
        (Row(pp=2), {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}, True),
        (Row(tp=2), {}, True),
        (Row(tp=4), {"sequence_parallel": True}, False),
    ],
    ids=str,
)
def test_a_canary_is_compared_at_its_own_length_and_training_goes_on_at_the_length_of_the_run(
    row, options, compared, tmp_path
):
    (after_save,) = run_world(4, save_with_short_canary, Row(pp=2, dp=2), tmp_path, {})[0]
    assert after_save == pytest.approx(run_world(4, train_layout, Row(pp=2, dp=2), 3)[0][-1], rel=1e-6)
    assert integrity_record_in(tmp_path)["probe"]["seq_length"] == 6
    for printed, _ in run_world(row.world_size, start, row, tmp_path, options):
        line = next(line for line in printed.splitlines() if line.strip().startswith("canary loss"))
        assert ("saved," if compared else "cannot compute the loss of 6 tokens") in line
