"""The index in run.json lets a rank open only the optimizer's files that hold its parameters."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.deepspeed_files import file_index
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.saving.run_record import within_limit
from megatron.errors import UserError
from megatron.files import MAX_JSON_BYTES
from tests.support.checkpoints import FINGERPRINT, save_midway
from tests.support.layouts import Row, build_engine, config_of
from tests.support.pool import run_world

STEPS = 2
SAVED = Row(pp=2, dp=4, zero=1)
LOADED = {
    "the layout of the checkpoint": SAVED,
    "PP 4": Row(pp=4, dp=2, zero=1),
    "TP 2": Row(tp=2, pp=2, dp=2, zero=1),
}


def files_opened(row: Row, folder: Path) -> tuple[set[str], set[str]]:
    """Loads the checkpoint. Returns the optimizer's files that this rank opened, and the files that contain
    its parameters."""
    from megatron.checkpoint.formats import deepspeed_files

    engine = build_engine(config_of(row))
    checkpoint = open_checkpoint(folder)
    opened: set[str] = set()
    read = deepspeed_files.read_file

    def note(path: Path) -> object:
        opened.add(path.name)
        return read(path)

    with mock.patch.object(deepspeed_files, "read_file", note):
        load_checkpoint(engine, checkpoint, FINGERPRINT)
    own = {part.name for part in engine.optimizer.pieces()}
    index = deepspeed_files._read_index(checkpoint.run["index"], folder)
    assert index is not None
    return opened, {file for file, places in index.items() if own & places.keys()}


def save(folder: Path) -> None:
    save_midway(SAVED, folder, STEPS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_world(SAVED.world_size, save, folder)
    return folder / f"global_step{STEPS}"


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("name", LOADED)
def test_a_rank_opens_only_the_files_that_it_needs(name: str, saved: Path) -> None:
    total = len(list(saved.glob("*_optim_states.pt")))
    for opened, needed in run_world(LOADED[name].world_size, files_opened, LOADED[name], saved):
        # The first file holds the values that are equal in all files, such as the loss scale.
        assert opened <= needed | {min(path.name for path in saved.glob("*_optim_states.pt"))}
        assert 0 < len(opened) < total


def load(folder: Path) -> str:
    try:
        load_checkpoint(build_engine(config_of(Row())), open_checkpoint(folder), FINGERPRINT)
    except UserError as error:
        return str(error)
    return ""


def rewrite(folder: Path, index: object) -> None:
    """Replaces the index in run.json. index: None removes the index."""
    run = json.loads((folder / "run.json").read_text())
    run.pop("index", None)
    run |= {} if index is None else {"index": index}
    (folder / "run.json").write_text(json.dumps(add_checksum(run)))


def test_a_checkpoint_opens_without_an_index_and_not_with_a_wrong_one(saved: Path) -> None:
    index = json.loads((saved / "run.json").read_text())["index"]
    first, second, *_ = sorted(index["files"])
    files = index["files"]
    malformed = "is not laid out as an index"
    for changed, problem in (
        (None, ""),
        ({"version": 99, "files": "of a later version"}, ""),
        ({**index, "files": {**files, first: files[second], second: files[first]}}, "holds other parameters"),
        ({**index, "files": {}}, "the index in run.json lacks"),
        ({**index, "files": {**files, f"../{first}": files[first]}}, "run.json names a file '../"),
        ({**index, "files": {**files, first: ["0 x"]}}, malformed),
        ({**index, "files": {**files, first: ["999999 1"]}}, malformed),
        ({**index, "files": {**files, first: [[]]}}, malformed),
        ([1], malformed),
    ):
        rewrite(saved, changed)
        (answer,) = run_world(1, load, saved)
        assert problem in answer if problem else answer == ""
    rewrite(saved, index)


def test_the_record_of_a_thousand_ranks_is_within_the_limit_of_its_reader() -> None:
    """The run has 96 layers, TP 8, PP 1 and DP 128. Each layer's parameters are divided over many files, so
    the index in run.json is large."""
    names = [
        f"{layer}.self_attention.query_key_value.{kind}{i}"
        for layer in range(96)
        for i in range(6)
        for kind in "wb"
    ]
    places = {
        f"zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt": {
            name: (0, 10**6 * number, 10**6)
            for number, name in enumerate(names[data % 64 * 18 : data % 64 * 18 + 36])
        }
        for data in range(128)
        for model in range(8)
    }
    run = {"parameters": dict.fromkeys(names, {"shape": [1, 2]})}
    index = file_index(places, names)
    content = within_limit({**run, "index": index}, run)
    assert "index" in content and len(json.dumps(content, indent=2)) < MAX_JSON_BYTES / 4
    long = run | {"data": "x" * (MAX_JSON_BYTES - 400_000)}
    assert within_limit({**long, "index": index}, long) == long
    with pytest.raises(OSError, match="run.json would have"):
        within_limit({"data": "x" * MAX_JSON_BYTES})
