"""Checkpoints with malicious names and numbers: one sentence, exit code 2, and no file outside is touched."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_latest, find_universal, open_checkpoint
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.lineage.identity import read_latest
from megatron.checkpoint.names import check_file, check_parameter, check_plain
from megatron.checkpoint.reading import read_checkpoint
from megatron.commands import ds_to_universal, generate, inspect_checkpoint
from megatron.errors import USER_ERROR_EXIT_CODE, UserError
from megatron.files import HostileFileError, read_json
from tests.support.conversion import to_universal
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte, random_wholes, write_native
from tests.unit.checkpoint.test_torch_files import harm
from tests.unit.hostile import bounds, refusal, snapshot

BAD_NAMES = ["../../../victim", "..", ".", "", "/etc", "a/../b", "a\0b", "a\nb", "x" * 300, "~", ".hidden"]
BAD_NAMES += ["a\\b", 5, None]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Returns global_step5 of a tiny model, and a folder beside the checkpoints that no checkpoint may
    touch."""
    victim = tmp_path / "victim"
    (victim / "photos").mkdir(parents=True)
    (victim / "photos" / "one.jpg").write_text("dear")
    (victim / "fp32.pt").write_text("dear too")
    config = config_of(Row(), model={"num_layers": 1})
    return write_native(tmp_path / "runs" / "mine", config, random_wholes(config)), victim


def rename_parameter(folder: Path, name: str, new: Any) -> None:
    """Renames a parameter in run.json and in the optimizer's file."""

    def change(run: dict[str, Any]) -> None:
        run["parameters"] = {new if key == name else key: value for key, value in run["parameters"].items()}
        run["files"][path.name] = {"bytes": path.stat().st_size}

    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    for addresses in content["optimizer"]["param_slice_mappings"]:
        addresses[new] = addresses.pop(name)
    torch.save(content, path)
    change_run(folder, change)


def make_external(folder: Path, info: dict[str, Any], shapes: Any) -> Path:
    """Turns the checkpoint into a checkpoint of another framework. Returns the file with its merge patterns
    and shapes."""
    (folder / "run.json").unlink()
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "universal_checkpoint_info": info, "param_shapes": shapes}, path)
    return path


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_hostile_name_is_refused(name: object) -> None:
    for check in (check_plain, check_parameter, check_file):
        sentence = refusal(lambda check=check: check(name, "run.json"), HostileFileError)
        assert sentence.startswith("run.json names a ") and len(sentence) < 300


def test_valid_names_are_not_hostile() -> None:
    norm = "tied_modules.embed.word_embeddings.norm.weight"
    file = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for check, names in (
        (check_parameter, (norm, "3.mlp.dense_h_to_4h.bias", "module.0.self-attn.w")),
        (check_file, (file, "zero/8.weight/fp32.pt", "layer_01-model_00-model_states.pt")),
        (check_plain, ("global_step300", "global_step5.replaced", "model-00001-of-00002.safetensors")),
    ):
        assert [check(name, "f") for name in names] == list(names)


@pytest.mark.parametrize("where", ["files", "parameters", "lineage", "digests"])
def test_a_hostile_name_in_run_json_is_refused(where: str, folders: tuple[Path, Path]) -> None:
    folder, victim = folders
    before = snapshot(victim)

    def change(run: dict[str, Any]) -> None:
        if where == "lineage":
            run["lineage"] = ["global_step3", "../../victim"]
        elif where == "digests":
            run["certificate"]["digests"]["fp32"]["../../victim"] = "0"
        else:
            run[where]["../../victim"] = next(iter(run[where].values()))

    change_run(folder, change)
    sentence = refusal(lambda: open_checkpoint(folder), HostileFileError)
    assert "run.json names a" in sentence and "'../../victim'" in sentence
    assert "'../../victim'" in refusal(lambda: find_latest(folder.parent))
    assert snapshot(victim) == before


@pytest.mark.parametrize("name", ["../../../victim", "/tmp/victim"])
@pytest.mark.parametrize("external", [False, True])
def test_a_hostile_parameter_name_makes_a_conversion_touch_nothing(
    name: str, external: bool, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, victim = folders
    rename_parameter(folder, "3.mlp.dense_4h_to_h.bias", name)
    if external:
        content = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
        shapes = {key: torch.Size([1]) for key in content["optimizer"]["param_slice_mappings"][0]}
        make_external(folder, {}, [shapes])
    before = snapshot(tmp_path)
    target = tmp_path / "runs" / "out"
    with pytest.raises(SystemExit) as ended:
        ds_to_universal.main(
            f"--input_folder {folder} --output_folder {target} --inject_missing_state".split()
        )
    printed = capsys.readouterr().err
    assert ended.value.code == USER_ERROR_EXIT_CODE and printed.count("\n") == 1
    assert f"names a parameter {name!r}" in printed
    assert snapshot(tmp_path) == before and snapshot(victim)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_hostile_file_of_a_checkpoint_that_is_a_device_is_not_read(
    target: str, folders: tuple[Path, Path]
) -> None:
    folder, _ = folders
    name = "layer_01-model_00-model_states.pt"
    (folder / name).unlink()
    if target == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target)
    change_run(folder, lambda run: run["files"][name].update(bytes=0))
    assert f"{name} is not a regular file" in refusal(lambda: open_checkpoint(folder))


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with bounds(), pytest.raises(SystemExit) as ended:
        inspect_checkpoint.main([str(folder)])
    assert ended.value.code == USER_ERROR_EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("error: ")
    return printed.err


def replace_layer(folder: Path, content: Any) -> None:
    path = folder / "layer_03-model_00-model_states.pt"
    torch.save(content, path)
    change_run(folder, lambda run: run["files"][path.name].update(bytes=path.stat().st_size))


def many_layers(run: dict[str, Any]) -> None:
    run["config"]["model"]["num_layers"] = 90_000


HARMS: dict[str, Callable[[Path], None]] = {
    "file name": lambda folder: change_run(
        folder, lambda run: run["files"].update({"/dev/zero": {"bytes": 1}})
    ),
    "lineage": lambda folder: change_run(folder, lambda run: run.update(lineage=["../../../victim"])),
    "layers": lambda folder: change_run(folder, many_layers),
    "code": lambda folder: replace_layer(folder, {"a": harm(folder.parent / "harm")}),
    "parameter": lambda folder: replace_layer(folder, {"../../victim": torch.ones(2)}),
    "deep json": lambda folder: (folder / "run.json").write_text("[" * 200_000) and None,
    "nested json": lambda folder: (folder / "run.json").write_text("[" * 500 + "]" * 500) and None,
    "long json": lambda folder: (folder / "run.json").write_bytes(b" " * (1 << 24) + b"{}") and None,
}


@pytest.mark.parametrize("part", ["config", "layout", "stages"])
@pytest.mark.parametrize("value", [True, 3, "x", [1]])
def test_a_part_of_run_json_that_is_not_an_object_is_named(
    part: str, value: Any, folders: tuple[Path, Path]
) -> None:
    folder, _ = folders
    change_run(folder, lambda run: run.update({part: value}))
    sentence = refusal(lambda: read_checkpoint(folder))
    assert part in sentence and "object" in sentence
    report = inspect_folder(folder, verify=False).checkpoint
    assert report is not None and part in report.problems[0]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("whole_folder", [False, True])
def test_inspecting_a_hostile_checkpoint_prints_one_sentence_and_touches_nothing(
    harm: str,
    whole_folder: bool,
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = folders
    HARMS[harm](folder)
    before = snapshot(tmp_path)
    assert str(folder) in inspected(folder.parent if whole_folder else folder, capsys)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100 + "1" + "}" * 100]
)
def test_hostile_json_is_refused_however_deep(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(text)
    assert "nested more than 64 levels" in refusal(lambda: read_json(tmp_path / "f.json"), HostileFileError)


@pytest.mark.full
def test_hostile_json_of_nothing_but_lists_takes_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(b"[" + b"[]," * 2_790_000 + b"[]]")
    with bounds():
        assert len(read_json(tmp_path / "f.json")) == 2_790_001


def test_invalid_json_is_not_hostile(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff\xfe\x00", b'"\\ud800"', b"9" * 10_000):
        (tmp_path / "f.json").write_bytes(content)
        with pytest.raises(ValueError):
            read_json(tmp_path / "f.json")


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"x" * 10_000])
def test_a_damaged_latest_names_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(content)
    assert read_latest(tmp_path) is None
    (tmp_path / "latest_universal").write_bytes(content)
    with pytest.raises(UserError, match="has no file latest_universal with a name in it"):
        find_universal(tmp_path)


def test_a_hostile_pattern_in_an_external_checkpoint_is_named(folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    path = make_external(folder, {"vocabulary_parameter_patterns": ["(a+"]}, [])
    assert f"{path} has the pattern '(a+'" in refusal(lambda: open_source(folder))


SHAPES = [[{"8.weight": shape}] for shape in ((1 << 61, 1 << 61), (), "x", (0,))]


@pytest.mark.parametrize("shapes", [*SHAPES, [5], 7])
def test_hostile_shapes_in_an_external_checkpoint_are_refused(
    shapes: Any, folders: tuple[Path, Path]
) -> None:
    folder, _ = folders
    make_external(folder, {}, shapes)
    assert str(folder) in refusal(lambda: open_source(folder))


@pytest.mark.parametrize("change", [{"start": -1}, {"numel": 1 << 62}, {"start": "x"}, {"start": [0]}])
def test_a_hostile_offset_of_a_parameter_is_refused(
    change: dict[str, Any], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, _ = folders
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    addresses = content["optimizer"]["param_slice_mappings"][0]
    addresses["5.weight"] = Namespace(**{**vars(addresses["5.weight"]), **change})
    torch.save(content, path)
    change_run(folder, lambda run: run["files"].update({path.name: {"bytes": path.stat().st_size}}))
    with bounds(), pytest.raises(UserError, match="it is damaged"):
        list(to_universal(open_source(folder, derive_patterns=True), tmp_path / "out"))


# --- what a reader reads is compared with its digest ---


def flip_a_bit(folder: Path) -> Path:
    path = folder / "layer_03-model_00-model_states.pt"
    flip_a_byte(path)
    return path


def test_a_flipped_bit_is_found_by_every_tool_unless_verification_is_off(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = folders
    path = flip_a_bit(folder)
    flags = f"--input_folder {folder} --output_folder {tmp_path / 'out'} --inject_missing_state".split()
    with pytest.raises(SystemExit):
        ds_to_universal.main(flags)
    assert f"{path.name} is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        ds_to_universal.main([*flags, "--verify-digests", "--no-verify-digests"])
    assert "not allowed with" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ds_to_universal.main([*flags, "--verify-digests"])
    assert "--verify-digests is deprecated and ignored" in capsys.readouterr().out
    ds_to_universal.main([*flags, "--no-verify-digests"])
    assert read_checkpoint(tmp_path / "out").state.iteration == 5


def test_generation_does_not_run_a_model_with_a_flipped_bit(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = folders
    path = flip_a_bit(folder)
    texts: list[str] = []
    monkeypatch.setattr("megatron.checkpoint.reading.find_tokenizer", lambda *_: None)
    monkeypatch.setattr(generate, "write_texts", lambda model, *_: texts.append(type(model).__name__) or 0)
    with pytest.raises(SystemExit) as ended:
        generate.main(["--load", str(folder), "--prompt", "a"])
    assert ended.value.code == USER_ERROR_EXIT_CODE and f"{path.name} is damaged" in capsys.readouterr().err
    generate.main(["--load", str(folder), "--prompt", "a", "--no-verify-digests"])
    assert texts == ["GPTModel"]
    list(to_universal(open_source(folder, derive_patterns=True), folder.parent / "global_step5_universal"))
    universal = folder.parent / "global_step5_universal"
    generate.main(["--load", str(universal), "--prompt", "a"])
    flip_a_byte(universal / "zero" / "5.weight" / "fp32.pt")
    with pytest.raises(SystemExit):
        generate.main(["--load", str(universal), "--prompt", "a"])
    assert "5.weight" in capsys.readouterr().err


# --- an interrupted conversion keeps only what is complete ---


@pytest.mark.parametrize("damage", ["flipped", "empty", "lacking", "surplus", "other shape"])
def test_a_finished_parameter_that_is_damaged_is_converted_again(
    damage: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, _ = folders
    source = open_source(folder, derive_patterns=True)
    list(to_universal(source, tmp_path / "expected"))
    conversion = to_universal(source, tmp_path / "out")
    first, second = next(conversion), next(conversion)
    conversion.close()
    done = tmp_path / "out.partial" / "zero"
    path = done / first / "exp_avg.pt"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    if damage == "flipped":
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "lacking":
        path.unlink()
    elif damage == "surplus":
        (done / first / "more.pt").write_bytes(b"")
    else:
        path.write_bytes((done / second / "exp_avg.pt").read_bytes())
    kept = (done / second / "fp32.pt").stat().st_mtime_ns
    again = list(to_universal(source, tmp_path / "out"))
    assert first in again and second not in again
    assert (tmp_path / "out" / "zero" / second / "fp32.pt").stat().st_mtime_ns == kept
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")


@pytest.mark.parametrize("name", ["", "zero", "unfinished", "source.json.tmp"])
def test_a_hostile_link_in_an_interrupted_conversion_is_not_followed(
    name: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, victim = folders
    partial = tmp_path / "out.partial"
    if name:
        partial.mkdir()
    (partial / name).symlink_to(victim)
    before = snapshot(tmp_path)
    assert "is a link" in refusal(
        lambda: list(to_universal(open_source(folder, derive_patterns=True), tmp_path / "out"))
    )
    assert snapshot(tmp_path) == before


def test_a_conversion_is_synced_before_it_is_renamed(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and folder is synced before the rename that makes it visible. Its parent folder is synced
    after the rename."""
    synced: dict[tuple[int, int], bool] = {}
    problems: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_dev, status.st_ino] = True
        fsync(descriptor)

    def check_rename(old: Path, new: Path) -> None:
        for path in [Path(old), *Path(old).rglob("*")]:
            status = path.stat()
            if not synced.get((status.st_dev, status.st_ino)):
                problems.append(str(path))
        rename(old, new)
        status = Path(new).parent.stat()
        synced.pop((status.st_dev, status.st_ino), None)
        renamed_into.append(Path(new).parent)

    renamed_into: list[Path] = []
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", check_rename)
    list(to_universal(open_source(folders[0], derive_patterns=True), tmp_path / "out"))
    assert problems == [] and renamed_into[-1] == tmp_path
    status = tmp_path.stat()
    assert synced[status.st_dev, status.st_ino]
