"""Readers of all checkpoint formats return equal tensors, and verify a checkpoint file by file."""

import errno
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import files as checkpoint_files
from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats import torch_archive
from megatron.checkpoint.formats.registry import (
    open_reader,
)
from megatron.checkpoint.formats.torch_archive import matches_checksums, read_file
from tests.support.conversion import to_universal
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint.native_folder import change_run, flip_a_byte, random_wholes, write_native

CONFIG = config_of(Row(tp=2, pp=2, zero=1))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Returns one checkpoint in each of two formats."""
    native = write_native(tmp_path / "native", CONFIG, random_wholes(CONFIG))
    list(to_universal(open_source(native, derive_patterns=True), tmp_path / "universal"))
    return {"native": native, "universal": tmp_path / "universal"}


def without_record(folder: Path) -> None:
    """Removes the digests of tensors from `run.json`."""
    change_run(folder, lambda run: run.pop("certificate"))


def test_without_digests_of_tensors_the_checksums_of_all_files_are_compared(folders: dict[str, Path]) -> None:
    folder = folders["universal"]
    assert open_reader(open_checkpoint(folder)).files_to_verify() == []
    without_record(folder)
    reader = open_reader(open_checkpoint(folder))
    names = reader.files_to_verify()
    assert set(names) == {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}
    assert [reader.file_problem(name) for name in names] == [None] * len(names)
    flip_a_byte(folder / "zero" / "8.weight" / "fp32.pt")
    assert "does not match its checksum" in str(reader.file_problem("zero/8.weight/fp32.pt"))


@pytest.mark.parametrize(
    "kind, name", [("native", "layer_01-model_00-model_states.pt"), ("universal", "zero/8.weight/fp32.pt")]
)
def test_a_file_that_cannot_be_read_now_is_not_called_damaged(
    kind: str, name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(open_checkpoint(folders[kind]))
    waits: list[float] = []
    monkeypatch.setattr(checkpoint_files.time, "sleep", waits.append)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for module in (checkpoint_files, torch_archive):
        monkeypatch.setattr(module, "open_regular", fail)
    with pytest.raises(OSError, match=f"Input/output error: .*{name}"):
        reader.file_problem(name)
    assert waits == list(checkpoint_files.RETRY_DELAYS_S)


def test_a_file_without_checksums_is_read_with_a_warning(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    without_record(folders["universal"])
    names = ["zero/8.weight/fp32.pt", "zero/8.bias/fp32.pt"]
    expected = [read_file(folders["universal"] / name)["param"].clone() for name in names]
    torch.serialization.set_crc32_options(False)
    try:
        for name, tensor in zip(names, expected, strict=True):
            torch.save({"param": tensor}, folders["universal"] / name)
    finally:
        torch.serialization.set_crc32_options(True)
    reader = open_reader(open_checkpoint(folders["universal"], with_files=False))
    for name, tensor in zip(names, expected, strict=True):
        assert matches_checksums(folders["universal"] / name) is None
        assert reader.file_problem(name) is None
        assert torch.equal(read_file(folders["universal"] / name)["param"], tensor)
    assert caplog.text.count("has no checksums") == 1
