"""Tests what users write into `latest`, `latest_universal` and Megatron-LM's tracker file."""

import os
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.discovery import find_latest, find_universal
from megatron.checkpoint.files import file_sizes
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.lineage.identity import MissingCheckpointError
from megatron.checkpoint.reading import read_checkpoint
from megatron.errors import UserError
from megatron.object_store.path import ObjectPath, ObjectTree
from megatron.object_store.store import ObjectStore
from tests.unit.checkpoint.saved_runs import Run

# {run} is the folder of the run, {parent} is its parent folder.
UNDERSTOOD = [
    "global_step3",
    "global_step3/",
    "./global_step3",
    "././global_step3//",
    "{run}/global_step3",
    "{run}/global_step3/\n",
    "run/global_step3",
    "./run/global_step3/",
    "../run/global_step3",
    "{parent}/link/global_step3",
    "3",
    "3\n",
    "003",
    "  global_step3 \t\n\n",
    "\r\nglobal_step3\r\n",
    "\ufeffglobal_step3\r\n",
    "\u200bglobal_step3\u00a0",
    "global_step3  # the good one",
    "# back to before the spike, \u00e9\n\nglobal_step3\n# global_step6 diverged",
    "'global_step3'",
    '"run/global_step3"',
    "iter_0000003",
    "iteration 3",
    "global_step003",
    "globalstep3",
    "step-3",
    "checkpoint-3",
    "Global_Step3",
    "best",
]
REJECTED = [
    "global_st",
    "../../elsewhere",
    "/etc",
    "/global_step3",
    "{parent}/global_step3",
    "{parent}/other/global_step3",
    "../other/global_step3",
    "other/global_step3",
    "other/run/global_step3",
    "s3://bucket/run/global_step3",
    "global_step3 global_step6",
    "global_step3\nglobal_step6",
    "global_step3\tglobal_step6",
    "global_step3_universal",
    "global_step3/run.json",
    "latest: global_step3",
    "-3",
    "3.0",
    "3e2",
    "three",
    "# global_step3",
    "global_step",
    "global_step3.pt",
    ".",
    "..",
    "/",
    "~",
    "\u0663",
    "9" * 13,
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latest")
    Run(folder / "run", folder / "run").save(2, 3, 6)
    shutil.copytree(folder / "run", folder / "other")
    (folder / "link").symlink_to("run")
    (folder / "run" / "best").symlink_to("global_step3")
    return folder


@pytest.fixture
def run(saved: Path) -> Path:
    latest = saved / "run" / "latest"
    latest.unlink(missing_ok=True)
    return saved / "run"


def write(path: Path, text: str) -> str:
    text = text.format(run=path.parent, parent=path.parent.parent)
    path.write_text(text, newline="")
    return text


@pytest.mark.parametrize("text", UNDERSTOOD, ids=ascii)
@pytest.mark.parametrize("load", ["run", "link"])
def test_latest_by_hand_is_understood(load: str, text: str, run: Path) -> None:
    write(run / "latest", text)
    assert find_latest(run.parent / load).folder.name == "global_step3"


@pytest.mark.parametrize("text", ["\ufeffglobal_step3\r\n", "\ufeff3"], ids=ascii)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_latest_by_hand_in_the_encoding_of_a_windows_shell_is_understood(text, encoding, run: Path) -> None:
    (run / "latest").write_bytes(text.encode(encoding))
    assert find_latest(run).folder.name == "global_step3"


def test_latest_by_hand_may_be_a_path_from_the_working_folder(run: Path, monkeypatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    write(run / "latest", f"{run.parent.name}/link/global_step3")
    assert find_latest(run).folder.name == "global_step3"


@pytest.mark.parametrize("bucket", ["bucket", "other"])
def test_latest_by_hand_in_an_object_store_may_be_a_url(bucket: str, tmp_path: Path) -> None:
    disk = tmp_path / "s3" / "bucket" / "run"
    disk.parent.mkdir(parents=True)
    Run(disk, disk).save(3, 6)
    write(disk / "latest", f"s3://{bucket}/run/global_step3/")
    tree = ObjectTree(ObjectStore("s3://bucket/run"), disk)
    for name in file_sizes(disk):
        tree.keep(name, (disk / name).read_bytes())
    folder = ObjectPath(tree)
    if bucket == "bucket":
        assert find_latest(folder).folder.name == "global_step3"
        return
    with pytest.raises(MissingCheckpointError, match="latest holds 's3://other/run/global_step3/'"):
        find_latest(folder)


@pytest.mark.parametrize("text", REJECTED, ids=ascii)
def test_latest_by_hand_that_is_not_understood_is_quoted(text: str, run: Path) -> None:
    text = write(run / "latest", text)
    with pytest.raises(MissingCheckpointError) as error:
        find_latest(run)
    assert repr(text)[:40] in str(error.value)


@pytest.mark.parametrize("text", ["4", "global_step4", "./run/global_step4/", "iter_0000004"])
def test_latest_by_hand_of_a_step_that_does_not_exist_lists_the_others(text: str, run: Path) -> None:
    write(run / "latest", text)
    with pytest.raises(MissingCheckpointError, match="names global_step4, which does not exist; the folder"):
        find_latest(run)


@pytest.mark.parametrize(
    "content", [None, b"", b"\n", b" \r\n\t", b"\xef\xbb\xbf\n", b"\0" * 20, b"\xff\x01"]
)
def test_only_an_empty_unreadable_or_missing_latest_by_hand_falls_back(content, run: Path) -> None:
    if content is not None:
        (run / "latest").write_bytes(content)
    assert find_latest(run).folder.name == "global_step6"


@pytest.mark.parametrize(
    "target", ["global_step3", "./global_step3", "{run}/global_step3", "best", "latest.chain"]
)
def test_latest_by_hand_may_be_a_link(target: str, run: Path) -> None:
    if target == "latest.chain":
        (run / target).symlink_to("best")
    (run / "latest").symlink_to(target.format(run=run))
    found = find_latest(run)
    assert found.folder == run / "global_step3"
    # The link is a folder, which --load may name.
    assert os.path.realpath(find_latest(run / "latest").folder) == os.path.realpath(run / "global_step3")


@pytest.mark.parametrize("target", ["../other/global_step3", "nothing"])
def test_latest_by_hand_that_links_elsewhere_is_quoted(target: str, run: Path) -> None:
    (run / "latest").symlink_to(target)
    with pytest.raises(MissingCheckpointError, match=f"latest holds '{target}'"):
        find_latest(run)


def test_a_folder_is_no_latest_by_hand(tmp_path: Path) -> None:
    Run(tmp_path, tmp_path).save(3, 6)
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "global_step3", tmp_path / "latest")
    with pytest.raises(MissingCheckpointError, match="latest is a folder, expected a file or a link"):
        find_latest(tmp_path)


def test_checkpoints_on_another_disk_are_understood_in_a_latest_by_hand(tmp_path: Path) -> None:
    Run(tmp_path / "run", tmp_path / "run").save(3, 6)
    (tmp_path / "run" / "global_step3").rename(tmp_path / "moved")
    (tmp_path / "run" / "global_step3").symlink_to(tmp_path / "moved")
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to("global_step3")
    assert find_latest(tmp_path / "run").folder.name == "global_step3"


def test_a_save_after_a_latest_by_hand_replaces_the_link_and_keeps_its_target(tmp_path: Path) -> None:
    Run(tmp_path, tmp_path).save(2, 3, 6)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("global_step3")
    run = Run(tmp_path, tmp_path)
    assert run.started_from == "global_step3"
    run.save(4)
    assert (tmp_path / "latest").read_text() == "global_step4" and not (tmp_path / "latest").is_symlink()
    assert Run(tmp_path, tmp_path / "global_step3", overwrite_checkpoints=True).started_from == "global_step3"


def test_a_latest_by_hand_that_is_wrong_does_not_stop_a_running_run(tmp_path: Path) -> None:
    run = Run(tmp_path, tmp_path).save(2)
    (tmp_path / "latest").write_text("two")
    run.save(4)
    assert Run(tmp_path, tmp_path).started_from == "global_step4"


def test_a_wrong_latest_by_hand_in_save_does_not_start_again_from_load(tmp_path: Path) -> None:
    Run(tmp_path / "A", tmp_path / "A").save(2)
    Run(tmp_path / "B", tmp_path / "A").save(3, 4)
    (tmp_path / "B" / "latest").write_text("../A/global_step2")
    with pytest.raises(UserError, match="B/latest holds '../A/global_step2'"):
        Run(tmp_path / "B", tmp_path / "A")


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    for name in ("global_step3_universal", "global_step6_universal"):
        (tmp_path / "run" / name / "zero").mkdir(parents=True)
    (tmp_path / "run" / "global_step3").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "global_step3",
        "global_step3_universal/",
        "./run/global_step3_universal",
        "{run}/global_step3_universal",
        "iter_0000003",
        "\ufeffglobal_step3_universal\r\n",
        "global_step3_universal # good",
    ],
    ids=ascii,
)
def test_latest_by_hand_of_a_universal_checkpoint(text: str, universal: Path, monkeypatch) -> None:
    write(universal / "latest_universal", text)
    opened = []
    monkeypatch.setattr(
        "megatron.checkpoint.discovery.open_checkpoint", lambda folder, _: opened.append(folder)
    )
    find_universal(universal)
    assert opened == [universal / "global_step3_universal"]


@pytest.mark.parametrize("text", ["../x", "{parent}/other/global_step3_universal", "two words", "a/b"])
def test_latest_by_hand_of_a_universal_checkpoint_is_quoted(text: str, universal: Path) -> None:
    text = write(universal / "latest_universal", text)
    with pytest.raises(UserError, match="latest_universal holds") as error:
        find_universal(universal)
    assert text[:40] in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", "iter_0000003"),
        (" 3\n", "iter_0000003"),
        ("iter_0000003/", "iter_0000003"),
        ("./run/iter_0000003", "iter_0000003"),
        ("release", "release"),
        ("", "iter_0000012"),
        ("global_step12", "iter_0000012"),
    ],
)
def test_latest_by_hand_of_megatron(text: str, expected: str, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    for name in ("iter_0000003", "iter_0000012", "release"):
        (run / name).mkdir(parents=True)
    write(run / "latest_checkpointed_iteration.txt", text)
    monkeypatch.setattr("megatron.checkpoint.discovery.open_checkpoint", lambda folder: folder)
    assert find_latest(run) == run / expected


@pytest.mark.parametrize("text", ["4", "released", "../iter_0000003"])
def test_latest_by_hand_of_megatron_is_quoted(text: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    write(tmp_path / "latest_checkpointed_iteration.txt", text)
    with pytest.raises(UserError, match="latest_checkpointed_iteration.txt (holds|names)") as error:
        find_latest(tmp_path)
    assert text.lstrip("./") in str(error.value)


def test_tools_read_a_latest_by_hand(run: Path) -> None:
    write(run / "latest", "run/global_step3/")
    assert read_checkpoint(run, allow_external=True).folder.name == "global_step3"
    assert inspect_folder(run).latest == "global_step3"
    write(run / "latest", "../other/global_step3")
    assert any("holds '../other/global_step3'" in problem for problem in inspect_folder(run).problems)
