"""Conversions to universal checkpoints can be interrupted and resumed. Damaged or unsuitable sources
are rejected."""

import argparse
import json
import os
import re
import shutil

import pytest
import torch

from megatron.checkpoint.conversion.source import identity_of, open_source
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.commands import convert_checkpoint, ds_to_universal
from megatron.errors import UserError
from tests.distributed.resharding import STEPS_BEFORE, resume_midway
from tests.distributed.test_universal import UNIVERSAL, converted, is_equal, reseal, saved, torch_files_in
from tests.end_to_end.command import ROOT, environment
from tests.support.checkpoints import state_after
from tests.support.conversion import to_universal
from tests.support.forked import run_script
from tests.support.layouts import Row
from tests.support.pool import run_world
from tests.unit.checkpoint.native_folder import flip_a_byte


@pytest.mark.full
def test_an_interrupted_conversion_resumes(tmp_path):
    source, target = saved(tmp_path, Row(tp=2), {}), tmp_path / "universal"
    conversion = to_universal(open_source(source), target)
    first = next(conversion)
    conversion.close()
    assert not target.exists()
    partial = target.with_name("universal.partial")
    written = partial / "zero" / first / "fp32.pt"
    before = written.stat().st_mtime_ns
    other = saved(tmp_path / "other", Row(), {})
    with pytest.raises(UserError, match="interrupted conversion of another checkpoint"):
        converted(other, target)
    rest = converted(source, target)
    assert first not in rest and rest
    assert (target / "zero" / first / "fp32.pt").stat().st_mtime_ns == before
    left = {path.name for path in target.iterdir() if not path.name.startswith("mp_rank")}
    assert left == {"zero", "run.json", "source.json"}
    # With ZeRO-0 the mp_rank files of the source also hold the optimizer's state.
    content = torch.load(target / "mp_rank_01_model_states.pt", weights_only=False)
    assert content["optimizer"] is None and content["args"].consumed_train_samples == 40


KILLED = ROOT / "tests" / "distributed" / "killed_conversion.py"


def test_a_conversion_that_was_killed_during_a_write_resumes(tmp_path):
    source, target = saved(tmp_path, Row(tp=2, zero=1), {}), tmp_path / "universal"
    flags = ["--input_folder", str(source), "--output_folder", str(target)]
    for blocks in ("1", "20", "50"):
        killed = run_script(KILLED, [*flags, blocks], environment(), 0)
        assert killed.exit_codes == [-9] and not target.exists()
        assert list((tmp_path / "universal.partial" / "unfinished").iterdir())
    ds_to_universal.main(flags)
    converted(source, tmp_path / "at once")
    assert is_equal(torch_files_in(target), torch_files_in(tmp_path / "at once"))
    assert (target / "run.json").read_bytes() == (tmp_path / "at once" / "run.json").read_bytes()


def change_a_copy(folder):
    """Changes TP rank 1's replica of the final norm's weight, and updates the record of files in run.json."""
    path = folder / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=False)
    (group, address) = next(
        (group, mapping["8.weight"])
        for group, mapping in enumerate(state["optimizer"]["param_slice_mappings"])
        if "8.weight" in mapping
    )
    state["optimizer"]["single_partition_of_fp32_groups"][group][address.start] += 0.5
    torch.save(state, path)
    reseal(folder, json.loads((folder / "run.json").read_text()), path)


@pytest.mark.parametrize("command", ["ds_to_universal", "convert_checkpoint"])
def test_replicas_that_differ_are_refused_or_averaged(command, tmp_path, capsys):
    source, target = saved(tmp_path, Row(tp=2), {}), tmp_path / "universal"
    change_a_copy(source)
    flags = ["--input_folder", str(source), "--output_folder", str(target)]
    with pytest.raises(SystemExit):
        ds_to_universal.main(flags)
    sentence = capsys.readouterr().err
    assert (
        "replicas of 8.weight on the TP ranks differ by up to 5.00e-01" in sentence
        and "--allow-replica-mismatch" in sentence
    )
    if command == "ds_to_universal":
        ds_to_universal.main([*flags, "--allow-replica-mismatch"])
        count = f"{target}: 14 parameters, 13 of them by an earlier, interrupted conversion"
    else:
        flags = ["--from", str(source), "--to", str(target), "--format", "universal"]
        convert_checkpoint.main([*flags, "--allow-replica-mismatch"])
        count = f"{target}: 14 parameters of {source}, format universal"
    mean = "8.weight: replicas on TP ranks differed by up to 5.00e-01; their mean is used"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == mean and re.fullmatch(count.replace("13", r"\d+").replace("14", r"\d+"), lines[1])
    mean = torch.load(target / "zero" / "8.weight" / "fp32.pt")["param"][0]
    assert mean.item() == pytest.approx(1.25, abs=0.05)
    ((state, _),) = run_world(1, resume_midway, Row(), tmp_path, UNIVERSAL)
    assert state == state_after(STEPS_BEFORE)


def integrity_record_of(folder):
    return json.loads((folder / "run.json").read_text())["certificate"]


@pytest.mark.full
def test_only_digests_of_averaged_parameters_are_dropped(tmp_path):
    source = saved(tmp_path, Row(tp=2), {})
    converted(source, tmp_path / "equal", allow_replica_mismatch=True)
    assert integrity_record_of(tmp_path / "equal") == integrity_record_of(source)
    change_a_copy(source)
    whole = integrity_record_of(source)
    # The conversion is interrupted after the replicas were averaged, and is continued without the flag.
    target = tmp_path / "averaged"
    conversion = to_universal(open_source(source), target, allow_replica_mismatch=True)
    for name in conversion:
        if name == "8.weight":
            break
    conversion.close()
    assert not target.exists()
    converted(source, target)
    left = integrity_record_of(target)
    assert left["probe"] is None and left["updates"] == whole["updates"]
    for kind, digests in whole["digests"].items():
        assert left["digests"][kind] == {name: digests[name] for name in digests if name != "8.weight"}
    assert {path.name for path in target.iterdir() if path.is_dir()} == {"zero"}


def test_a_conversion_of_another_source_is_not_resumed(tmp_path):
    source, target = saved(tmp_path, Row(), {}), tmp_path / "universal"
    converted(source, tmp_path / "other")
    (tmp_path / "other" / "source.json").unlink()
    os.rename(tmp_path / "other", tmp_path / "universal.partial")  # as a killed import leaves the folder
    with pytest.raises(UserError, match="universal.partial is not an interrupted conversion"):
        converted(source, target)
    assert not target.exists()


def test_an_external_source_with_changed_files_is_another_source(tmp_path):
    source = saved(tmp_path, Row(zero=1), {})
    (source / "run.json").unlink()
    before = identity_of(open_source(source))
    assert identity_of(open_source(source)) == before
    path = next(source.glob("zero_pp_rank_0*"))
    os.utime(path, (1, 1))
    assert identity_of(open_source(source)) != before


@pytest.mark.full
def test_a_conversion_that_was_killed_before_latest_universal_is_finished(tmp_path, monkeypatch):
    source, target = saved(tmp_path, Row(tp=2), {}), tmp_path / "universal"
    (tmp_path / "latest_universal").write_text("an older one")
    monkeypatch.setattr(UniversalWriter, "announce", lambda _: None)
    converted(source, target)
    monkeypatch.undo()
    other = saved(tmp_path / "other", Row(), {})
    with pytest.raises(UserError, match="exists already: remove it"):
        converted(other, target)
    assert (tmp_path / "latest_universal").read_text() == "an older one"
    assert converted(source, target) == []
    assert (tmp_path / "latest_universal").read_text() == "universal"
    assert {path.name for path in target.iterdir() if path.suffix != ".pt"} == {
        *("zero", "run.json", "source.json")
    }
    assert converted(source, target) == []


def test_the_tool_names_mistakes_and_flags_without_effect(tmp_path, capsys, monkeypatch):
    source, target = saved(tmp_path, Row(tp=2, zero=1), {}), tmp_path / "universal"
    flags = ["--input_folder", str(source), "--output_folder", str(target)]

    def refused(*more):
        with pytest.raises(SystemExit) as ended:
            ds_to_universal.main([*flags, *more])
        assert ended.value.code == 2 and not target.exists()
        return capsys.readouterr().err

    path = next(source.glob("zero_pp_rank_0_mp_rank_01*"))
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert f"{path.name} has {len(content) - 10:,} bytes" in refused()
    path.write_bytes(content)
    for damaged in (path, source / "mp_rank_01_model_states.pt"):  # checked by state, or as a whole
        content = damaged.read_bytes()
        flip_a_byte(damaged)
        sentence = refused()
        assert "is damaged: its digest differs from that in run.json" in sentence
        assert (damaged.name in sentence) == (damaged != path)
        damaged.write_bytes(content)
    shutil.rmtree(tmp_path / "universal.partial", ignore_errors=True)  # if a parameter was written

    run = json.loads((source / "run.json").read_text())
    info = run.pop("universal_checkpoint_info")
    reseal(source, run)
    assert "--inject_missing_state to derive it" in refused()
    info["parameter_with_row_parallelism_patterns"].append(r"^\d+\.no\.weight$")
    reseal(source, {**run, "universal_checkpoint_info": info})
    assert "matches no parameter" in refused()

    monkeypatch.setattr("shutil.disk_usage", lambda _: argparse.Namespace(free=1e5))
    assert "has 0.0 GB free and" in refused("--no_strict")
    monkeypatch.undo()
    ds_to_universal.main([*flags, "--no_strict", "--keep_temp_folder"])
    output = capsys.readouterr().out
    assert "--keep_temp_folder is ignored" in output and "warning: pattern" in output
    reseal(source, run)
    derived = tmp_path / "derived"
    ds_to_universal.main([*flags[:2], "--output_folder", str(derived), "--inject_missing_state"])
    assert is_equal(torch_files_in(derived), torch_files_in(target))
