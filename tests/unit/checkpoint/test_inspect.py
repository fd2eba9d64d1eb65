"""Makes reports on a checkpoint, on a damaged checkpoint, and on two checkpoints."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from argparse import Namespace

import pytest
import torch

from megatron.checkpoint import files as checkpoint_files
from megatron.checkpoint import inspect
from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.inspect import inspect_checkpoint, inspect_folder
from megatron.checkpoint.reading import read_checkpoint
from megatron.checkpoint.report import compare_checkpoints, different_settings, size_text
from megatron.commands import inspect_checkpoint as tool
from megatron.errors import UserError
from tests.support.conversion import to_universal
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte, random_wholes, write_native

TP2_PP2 = Row(tp=2, pp=2, dp=2, zero=1, precision="bf16")
WORDS = "tied_modules.embed.word_embeddings.weight"


def write(folder, row=TP2_PP2, step=5, seed=11, change=None, **changes):
    """Writes a checkpoint. change: a function that alters the weights in place."""
    config = config_of(row, **changes)
    wholes = random_wholes(config, seed)
    if change is not None:
        change(wholes)
    return write_native(folder, config, wholes, step)


def report_of(path):
    """Returns the report. Fails if the report has problems."""
    report = inspect_checkpoint(path)
    assert report.problems == []
    return report


def test_a_report_describes_the_run(tmp_path):
    report = report_of(path := write(tmp_path))
    assert inspect_folder(tmp_path).is_intact
    assert inspect_folder(path).is_intact and inspect_folder(path).checkpoints == []
    assert report.is_complete
    assert report.state["iteration"] == 5 and report.state["consumed_tokens"] == 1280
    assert report.layout["tensor_model_parallel_size"] == 2 and report.layout["zero_stage"] == 1
    assert report.stages["bounds"] == [0, 10]
    assert (report.vocab_size, report.eod) == (VOCAB, EOD)
    assert (
        "4 layers x 32 hidden, 4 heads, sequence 32, absolute positions, bf16, vocabulary 101,"
        in report.model
    )
    groups = {group.kind: group for group in report.files}
    counts = {kind: group.num_files for kind, group in groups.items()}
    assert counts == {"layers": 12, "model states": 4, "optimizer": 8, "other": 1}
    layer_bytes = sum(path.stat().st_size for path in tmp_path.glob("global_step5/layer_*"))
    assert groups["layers"].size_bytes == layer_bytes


def test_global_parameters_are_listed(tmp_path):
    records = report_of(write(tmp_path, model={"glu_activation": "swiglu"})).parameters
    shapes = {record.name: record.shape for record in records}
    assert len(records) == 2 + 4 * 12 + 2
    assert {record.dtype for record in records} == {"bfloat16"}
    assert shapes[WORDS] == (112, 32)  # 101 tokens, padded for 2 TP ranks
    assert shapes["4.self_attention.query_key_value.weight"] == (96, 32)
    assert shapes["6.mlp.dense_h_to_4h.weight"] == (256, 32)
    assert shapes["6.mlp.dense_4h_to_h.weight"] == (32, 128)
    assert shapes["8.bias"] == (32,)


@pytest.mark.parametrize("row", [Row(), Row(tp=4, positions="rotary"), Row(pp=2, dp=2, zero=0)])
def test_no_layout_has_problems(row, tmp_path):
    report_of(write(tmp_path, row))


def test_a_folder_lists_its_checkpoints(tmp_path, capsys):
    for step in (100, 20, 5):
        write(tmp_path, Row(), step)
    (tmp_path / "global_step100" / "run.json").unlink()
    (tmp_path / "latest").write_text("global_step20")
    (tmp_path / "global_step20_universal").mkdir()
    overview = inspect_folder(tmp_path)
    assert [item.name for item in overview.checkpoints] == ["global_step5", "global_step20", "global_step100"]
    assert [item.is_complete for item in overview.checkpoints] == [True, True, False]
    assert [item.is_latest for item in overview.checkpoints] == [False, True, False]
    assert [item.iteration for item in overview.checkpoints] == [5, 20, None]
    assert overview.checkpoints[1].consumed_samples == 160
    assert overview.checkpoint.folder == str(tmp_path / "global_step20")
    assert overview.problems == ["global_step100: run.json, which is written last, is missing"]
    code, printed = output(capsys, tmp_path)
    assert code == 2 and "incomplete" in printed and f"problem: {overview.problems[0]}" in printed


@pytest.mark.parametrize(
    "latest, problem",
    [(None, "`latest` does not exist"), ("global_step7", "names global_step7, which does not exist")],
)
def test_a_latest_that_names_a_missing_folder_is_a_problem(latest, problem, tmp_path):
    write(tmp_path, Row())
    (tmp_path / "latest").unlink()
    if latest:
        (tmp_path / "latest").write_text(latest)
    overview = inspect_folder(tmp_path)
    assert problem in overview.problems[0] and not overview.is_intact
    assert overview.checkpoint.folder.endswith("global_step5")


# --- damaged checkpoints ---

LAYER, OPTIMIZER = "layer_04-model_01-model_states.pt", "zero_pp_rank_1_mp_rank_02_optim_states.pt"
EMBEDDING, NORM = "layer_01-model_00-model_states.pt", "layer_08-model_01-model_states.pt"


def truncate(path):
    path.write_bytes(path.read_bytes()[:500])


def lose_run_file(path):
    truncate(path)
    (path.parent / "run.json").unlink()


def lose_layers(path):
    for layer in path.parent.glob("layer_*"):
        layer.unlink()


def duplicate(path):
    """Adds a file, as a layout with more TP ranks would have."""
    shutil.copy(str(path).replace("model_01", "model_00"), path)


def change_a_replica(path):
    state = torch.load(path)
    state["input_layernorm.bias"] += 1
    torch.save(state, path)


def forget(path):
    path.unlink()
    change_run(path.parent, lambda run: run["files"].pop(path.name))


# (Damage, the damaged file, words of the report.)
DAMAGES = [
    *((truncate, name, f"{name} has 500 bytes and was written with") for name in (LAYER, OPTIMIZER)),
    *(
        (lose_run_file, name, f"{name} is damaged: 500 bytes that are not a file of torch.save")
        for name in (LAYER, OPTIMIZER)
    ),
    (lambda path: torch.save({"input_layernorm.weight": 5}, path), LAYER, f"{LAYER} has"),
    (lambda path: torch.save({"input_layernorm.weight": 5}, path), LAYER, f"{LAYER} holds something other"),
    *(
        (lambda path: path.unlink(), name, f"problem: missing: {name}\n")
        for name in (EMBEDDING, NORM, "mp_rank_03_model_states.pt", OPTIMIZER)
    ),
    (lose_layers, LAYER, "layer_03-model_00-model_states.pt and 9 more"),
    (lose_layers, LAYER, "holds no layer files"),
    (change_a_replica, LAYER, "the TP ranks hold different values of 4.input_layernorm.bias, which is not"),
    (forget, LAYER, f"never written: {LAYER}"),
    (duplicate, LAYER, f"left over, not part of this checkpoint: {LAYER}"),
    (duplicate, LAYER, "the 2 files of layer 4 make 4.self_attention.query_key_value.weight"),
]


@pytest.mark.parametrize("damage, name, sentence", DAMAGES)
def test_damage_is_named(damage, name, sentence, tmp_path, capsys):
    path = write(tmp_path, Row() if damage is duplicate else TP2_PP2)
    damage(path / name)
    code, printed = output(capsys, path)
    assert code == 2 and sentence in printed
    problems = [line for line in printed.splitlines() if line.startswith("problem: ")]
    if damage is truncate:
        assert all(name in problem for problem in problems)
    assert damage is not change_a_replica or len(problems) == 1


@pytest.mark.parametrize("damage", ["cut", "no config", "config of another kind", "no layout"])
def test_a_damaged_run_file_is_a_problem(damage, tmp_path):
    path = write(tmp_path)
    run = json.loads((path / "run.json").read_text())
    if damage == "no config":
        del run["config"]
    elif damage == "config of another kind":
        run["config"] = [1, 2]
    elif damage == "no layout":
        del run["layout"]
    text = json.dumps(run)
    (path / "run.json").write_text(text[:-9] if damage == "cut" else text)
    report = inspect_checkpoint(path)
    assert not report.is_complete and not report.parameters
    assert len(report.problems) == 1 and "run.json" in report.problems[0]
    assert report.files[0].num_files == 12


def test_a_file_that_an_older_checkpoint_lacks_is_named(tmp_path, capsys):
    older = write(tmp_path, Row(), 5)
    write(tmp_path, Row(), 6)
    (older / "layer_04-model_00-model_states.pt").unlink()
    code, printed = output(capsys, tmp_path)
    assert code == 2 and "problem: global_step5: layer_04-model_00-model_states.pt is missing" in printed
    assert "damaged" in next(line for line in printed.splitlines() if line.startswith("global_step5 "))


def test_a_flipped_byte_is_found_by_the_digests(tmp_path, capsys):
    newest = write(tmp_path, Row())
    assert output(capsys, tmp_path, "--verify")[0] == 0
    flip_a_byte(newest / "layer_04-model_00-model_states.pt")
    code, printed = output(capsys, tmp_path)
    assert code == 0 and "digests    not compared" in printed
    code, printed = output(capsys, tmp_path, "--verify")
    assert code == 2 and "files compared" in printed
    assert "problem: layer_04-model_00-model_states.pt is damaged: its digest" in printed


# --- universal checkpoints ---


def write_universal(folder, row=TP2_PP2):
    """Writes a native checkpoint, and a universal checkpoint converted from it."""
    native, target = write(folder, row), folder / "global_step5_universal"
    list(to_universal(open_source(native, derive_patterns=True), target))
    info = json.loads((target / "run.json").read_text())["universal_checkpoint_info"]
    change_run(native, lambda run: run.update(universal_checkpoint_info=info))
    return native, target


def test_an_intact_universal_checkpoint_has_no_problems(tmp_path, capsys):
    native, universal = write_universal(tmp_path)
    report = report_of(universal)
    assert (report.kind, report.vocab_size, len(report.parameters)) == ("universal", VOCAB, 52)
    assert {record.name: record.shape for record in report.parameters}[WORDS] == (VOCAB, 32)
    overview = inspect_folder(tmp_path)
    assert overview.is_intact and overview.checkpoint.folder == str(native)
    assert [(item.kind, item.is_latest) for item in overview.checkpoints] == [
        ("native", True),
        ("universal", True),
    ]
    shutil.rmtree(native)
    (tmp_path / "latest").unlink()
    code, printed = output(capsys, tmp_path, "--verify")
    assert code == 0 and "213 tensors and files compared, 213 equal" in printed  # 4 x 52 + 5


@pytest.mark.parametrize(
    "damage", ["byte", "step", "scale", "parameter", "moment", "file", "latest_universal"]
)
def test_damage_of_a_universal_checkpoint_is_named(damage, tmp_path, capsys):
    _, universal = write_universal(tmp_path, Row())
    folder, named = universal / "zero" / "3.mlp.dense_4h_to_h.weight", "3.mlp.dense_4h_to_h.weight"
    if damage == "byte":
        flip_a_byte(folder / "fp32.pt")
    elif damage == "step":
        path = folder / "step.pt"
        content = bytearray(path.read_bytes())
        content[content.index(struct.pack("<f", 5.0))] ^= 1
        path.write_bytes(content)
        named = "zero/3.mlp.dense_4h_to_h.weight/step.pt is damaged"
    elif damage == "scale":
        named = "zero/optimizer_state.pt"
        flip_a_byte(universal / named)
    elif damage == "parameter":
        shutil.rmtree(folder)
    elif damage == "moment":
        shutil.copy(universal / "zero" / "8.bias" / "exp_avg.pt", folder / "exp_avg.pt")
    elif damage == "file":
        path = universal / "mp_rank_00_model_states.pt"
        path.write_bytes(path.read_bytes()[:-9])
        named = path.name
    else:
        (tmp_path / "latest_universal").write_text("global_step6_universal")
        named = "`latest_universal` names global_step6_universal, which does not exist"
        universal = tmp_path
    code, printed = output(capsys, universal, "--verify")
    assert code == 2 and any(named in line for line in printed.splitlines() if "problem: " in line)


def test_files_without_checksums_are_not_called_equal(tmp_path, capsys):
    _, universal = write_universal(tmp_path, Row())
    path = universal / "zero" / "8.bias" / "step.pt"
    step = torch.load(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(step + 1, path)
    finally:
        torch.serialization.set_crc32_options(True)
    change_run(universal, lambda run: run.update(files={}))
    code, printed = output(capsys, universal, "--verify")
    count = len(list(universal.rglob("*.pt"))) - 1
    assert f"{count} tensors and files compared, {count} equal, 1 not verified: they have no" in printed
    assert code == 0


@pytest.mark.parametrize("unreadable", ["run.json", "folder", "weights"])
def test_a_checkpoint_that_cannot_be_read_now_does_not_hide_the_others(unreadable, tmp_path, monkeypatch):
    older, newest = write(tmp_path, Row(), 5), write(tmp_path, Row(), 6)
    monkeypatch.setattr(checkpoint_files, "RETRY_DELAYS_S", ())
    denied = newest if unreadable == "weights" else older
    function = {"run.json": "open_checkpoint", "folder": "format_of", "weights": "inspect_checkpoint"}[
        unreadable
    ]
    original = getattr(inspect, function)

    def deny(folder, *arguments, **options):
        if folder == denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return original(folder, *arguments, **options)

    monkeypatch.setattr(inspect, function, deny)
    overview = inspect_folder(tmp_path)
    assert [item.name for item in overview.checkpoints] == ["global_step5", "global_step6"]
    (problem,) = overview.problems
    assert problem.startswith(f"{denied.name}: ") and problem.endswith(
        "cannot be accessed now (Permission denied)"
    )
    assert not overview.is_intact
    if denied == older:
        assert overview.checkpoint.folder == str(newest)


def test_unfinished_saves_and_conversions_are_listed(tmp_path):
    path = write(tmp_path, Row())
    shutil.copytree(path, tmp_path / "global_step4.replaced")
    shutil.copytree(path, tmp_path / "saving-global_step6", ignore=shutil.ignore_patterns("run.json"))
    (tmp_path / "global_step5_universal.partial" / "zero").mkdir(parents=True)
    overview = inspect_folder(tmp_path)
    assert overview.is_intact and overview.checkpoint.folder == str(path)
    assert {item.name: item.kind for item in overview.checkpoints} == {
        "global_step4.replaced": "replaced",
        "global_step5": "native",
        "global_step5_universal.partial": "being converted",
        "saving-global_step6": "being saved",
    }


def test_native_and_universal_are_compared(tmp_path, capsys):
    native, universal = write_universal(tmp_path / "a")
    code, printed = output(capsys, native, universal)
    assert code == 0 and "no setting differs" in printed and "52 of 52 parameters are equal" in printed
    assert len(printed.splitlines()) < 10


def test_another_programs_universal_checkpoint_is_described_and_compared(tmp_path, capsys):
    native, universal = write_universal(tmp_path)
    (universal / "run.json").unlink()
    for path in universal.glob("mp_rank_*"):
        torch.save({"iteration": 5, "args": Namespace(consumed_train_samples=40)}, path)
    for path in (universal / "zero" / WORDS).glob("[!s]*.pt"):  # all but step.pt
        entry = torch.load(path)
        torch.save({"param": torch.nn.functional.pad(entry["param"], (0, 0, 0, 27))}, path)
    code, printed = output(capsys, universal, "--verify")
    assert code == 0 and "of another framework" in printed and "tensors and files compared" in printed
    _, printed = output(capsys, native, universal, "--json")
    assert all(item["largest"]["fp32"] == 0 for item in json.loads(printed)["parameters"])
    with pytest.raises(UserError, match="was made by another framework"):
        read_checkpoint(universal)


# --- two checkpoints ---


def compare(one, other):
    return compare_checkpoints(open_checkpoint(one), open_checkpoint(other))


def test_the_same_weights_on_another_layout_differ_in_settings_alone(tmp_path):
    one = write(tmp_path / "one", Row())
    other = write(tmp_path / "other", Row(tp=4, dp=2, zero=1, precision="bf16"))
    comparison = compare(one, other)
    assert comparison.settings["layout.tensor_model_parallel_size"] == (1, 4)
    assert comparison.settings["config.parallel.world_size"] == (1, 8)
    assert len(comparison.parameters) == 52 and all(item.is_equal for item in comparison.parameters)
    assert comparison.parameters[0].largest == {"fp32": 0, "exp_avg": 0, "exp_avg_sq": 0}
    assert compare(one, one).settings == {}


def test_the_largest_difference_of_each_parameter_is_found(tmp_path):
    def change(wholes):
        wholes["5.mlp.dense_h_to_4h.weight"][7, 3] -= 0.5
        wholes["5.mlp.dense_h_to_4h.weight"][8, 3] += 0.25
        wholes[WORDS][100, 0] += 2
        wholes["8.bias"][1] = float("nan")

    one = write(tmp_path / "one", Row())
    other = write(tmp_path / "other", Row(tp=2), step=6, change=change)
    comparison = compare(one, other)
    assert comparison.settings["state.iteration"] == (5, 6)
    differing = {item.name: item for item in comparison.parameters if not item.is_equal}
    assert differing.keys() == {"5.mlp.dense_h_to_4h.weight", WORDS, "8.bias"}
    assert differing["5.mlp.dense_h_to_4h.weight"].largest["fp32"] == pytest.approx(0.5)
    assert differing["5.mlp.dense_h_to_4h.weight"].largest["exp_avg"] == pytest.approx(0.0625)
    assert differing[WORDS].largest["fp32"] == pytest.approx(2)
    assert differing["8.bias"].largest["fp32"] is None and "non-finite" in differing["8.bias"].note


def test_parameters_of_other_models_are_reported(tmp_path):
    one = write(tmp_path / "one", Row())
    other = write(tmp_path / "other", Row(positions="alibi"), model={"ffn_hidden_size": 64, "num_layers": 3})
    notes = {item.name: item.note for item in compare(one, other).parameters}
    assert notes["3.mlp.dense_h_to_4h.weight"] == "shapes (128, 32) and (64, 32)"
    assert notes["tied_modules.embed.position_embeddings.weight"] == f"only in {one}"
    assert notes["6.mlp.dense_h_to_4h.bias"] == f"only in {one}"
    assert notes["7.weight"] == f"only in {other}"


def test_missing_settings_are_absent():
    one = {"config": {"a": 1, "b": {"c": 2}}, "same": [1]}
    other = {"config": {"a": 1, "b": {"c": 3, "d": 4}}, "same": [1]}
    assert different_settings(one, other) == {"config.b.c": (2, 3), "config.b.d": ("absent", 4)}


# --- the command ---


def output(capsys, *flags):
    """Returns (exit code, stdout)."""
    code = tool.main([str(flag) for flag in flags])
    return code, capsys.readouterr().out


def test_equal_layers_share_a_row_and_json_has_every_parameter(tmp_path, capsys):
    path = write(tmp_path)
    code, printed = output(capsys, tmp_path)
    rows = [line.split() for line in printed.splitlines()]
    assert code == 0
    assert ["global_step5", "native", "5", "40", "1,280", "25"] in [row[:6] for row in rows]
    assert "digests    not compared: use --verify to read and compare the contents" in printed
    assert "{layer}.mlp.dense_4h_to_h.weight 3-6 32 x 128 bfloat16".split() in rows
    assert "8.weight 32 bfloat16".split() in rows
    assert "problem" not in printed
    code, printed = output(capsys, path, "--json")
    report = json.loads(printed)["checkpoint"]
    assert code == 0 and len(report["parameters"]) == 52
    assert report["parameters"][0] == {"name": WORDS, "shape": [112, 32], "dtype": "bfloat16"}


def test_two_folders_are_compared(tmp_path, capsys):
    def change(wholes):
        for layer in (3, 4, 6):
            wholes[f"{layer}.mlp.dense_4h_to_h.weight"][0, 0] += layer

    one = write(tmp_path / "one", Row())
    other = write(tmp_path / "other", Row(tp=2), change=change)
    code, printed = output(capsys, one, tmp_path / "other")
    rows = [line.split() for line in printed.splitlines()]
    assert code == 0
    assert ["layout.tensor_model_parallel_size", "1", "2"] in rows
    assert "49 of 52 parameters are equal" in printed
    assert ["fp32", "49", "of", "52", "6.000e+00"] in rows
    assert "{layer}.mlp.dense_4h_to_h.weight 3-4, 6 6.000e+00 7.500e-01".split() in [row[:5] for row in rows]
    assert not any(words in printed for words in ("certificate.digests", "index.files", "sha256"))
    _, printed = output(capsys, one, other, "--json")
    assert len(json.loads(printed)["parameters"]) == 52
    assert f"certificate.digests.fp32.{WORDS}" not in json.loads(printed)["settings"]
    assert "certificate.digests.fp32.3.mlp.dense_4h_to_h.weight" in json.loads(printed)["settings"]
    _, printed = output(capsys, one, one)
    assert "no setting differs" in printed and "52 of 52 parameters are equal" in printed


@pytest.mark.parametrize(
    "flags, words",
    [
        (["/no/such/folder"], "/no/such/folder: there is no such folder"),
        (["."], "holds no checkpoint"),
        ([".", "."], "holds no checkpoint"),
        ([".", ".", "."], "got 3 folders"),
        ([], "FOLDER"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(flags, words, capsys):
    with pytest.raises(SystemExit) as caught:
        tool.main(flags)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and words in printed.err


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (2.3e12, "2.3 TB")]
)
def test_sizes_have_a_unit(size, text):
    assert size_text(int(size)) == text


def test_a_hostile_run_file_prints_no_control_characters(tmp_path, capsys):
    folder = write(tmp_path)
    change_run(folder, lambda run: run["layout"].update(precision="\x1b[31mred\nerror: a forged line"))
    tool.main([str(folder)])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\nerror:" not in printed and "red" in printed
