"""Readers of checkpoints, given thousands of damaged files: they read them or say in a sentence why not."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.checkpoint.discovery import find_latest, find_universal
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.reading import read_checkpoint
from megatron.checkpoint.report import overview_text
from megatron.checkpoint.saved_config import read_saved_config
from megatron.checkpoint.to_universal import convert, open_source
from megatron.config import Config, read_command_line
from megatron.model.single_process import model_specs
from megatron.mpu.layout import TPGroup
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import save_hf
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.hostile import MUTATIONS, fuzz, mutated, mutated_json

CONFIG = config_of(Row(), model={"num_layers": 1})


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder beside the others that nobody has any business with."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "fp32.pt").write_text("dear")
    return tmp_path / "victim"


class Files:
    """A folder in which one file at a time is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    def change(self, data: st.DataObject, changes: list[Any]) -> None:
        """Every file as it was but for one."""
        for path, content in self.good.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        path = data.draw(st.sampled_from(sorted(self.good)))
        content = self.good[path]
        if path.suffix == ".json" and data.draw(st.integers(0, 3)):
            record = mutated_json(json.loads(content), data)
            path.write_text(json.dumps(record))
            if path.name == "run.json" and isinstance(record, dict):
                path.write_text(json.dumps(add_checksum(record)))
            return
        if path.suffix in (".pt", ".bin") and data.draw(st.booleans()):
            _rewrite_pickle(path, content, changes)
        else:
            path.write_bytes(mutated(content, changes))
        record = self.folder / "run.json"
        if record in self.good and record != path:
            run = json.loads(self.good[record])
            run["files"].get(str(path.relative_to(self.folder)), {})["bytes"] = path.stat().st_size
            record.write_text(json.dumps(add_checksum(run)))


def _rewrite_pickle(path: Path, content: bytes, changes: list[Any]) -> None:
    """The archive with other instructions in it, which its checksums agree with."""
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, mutated(member, changes) if name.endswith("data.pkl") else member)


def read_all(folder: Path) -> None:
    """As the tools do."""
    overview_text(inspect_folder(folder, verify=False))
    checkpoint = read_checkpoint(folder)
    find_latest(folder)
    reader = open_reader(checkpoint)
    for name in reader.names:
        for kind in reader.kinds(name):
            reader.read_unpadded(name, kind).sum()
    for _, weight in reader.weights(model_specs(CONFIG, VOCAB, EOD)):
        weight.sum()


@pytest.mark.full
@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_a_native_checkpoint(examples: int, victim: Path, tmp_path: Path) -> None:
    folder = write_native(tmp_path / "native", CONFIG, random_wholes(CONFIG))
    files = Files(folder)
    read_all(folder)
    fuzz(examples, lambda: read_all(folder), files.change, victim)


@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_the_record_that_gives_a_command_its_flags(
    examples: int, victim: Path, tmp_path: Path
) -> None:
    native = write_native(tmp_path / "native", CONFIG, random_wholes(CONFIG))
    folder = tmp_path / "records"
    for name in ("latest", f"{native.name}/run.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(native.parent / name, folder / name)
    files = Files(folder)
    words = "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 5 --dry-run".split()

    def read() -> None:
        read_command_line([*words, "--load", str(folder), "--use-checkpoint-args"], {}, read_saved_config)

    read()
    fuzz(examples, read, files.change, victim)


@pytest.mark.full
@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_the_source_of_a_conversion(examples: int, victim: Path, tmp_path: Path) -> None:
    folder = write_native(
        tmp_path / "native", config_of(Row(tp=2), model={"num_layers": 1}), random_wholes(CONFIG)
    )
    files = Files(folder)

    def read() -> None:
        for name in ("out", "out.partial"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        list(convert(open_source(folder, derive_patterns=True), tmp_path / "out"))

    read()
    fuzz(examples // 2, read, files.change, victim)


def universal(tmp_path: Path) -> Path:
    native = write_native(tmp_path / "native", CONFIG, random_wholes(CONFIG))
    target = tmp_path / "universal"
    list(convert(open_source(native, derive_patterns=True), target))
    return target


@pytest.mark.full
@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_a_universal_checkpoint(examples: int, victim: Path, tmp_path: Path) -> None:
    folder = universal(tmp_path)
    files = Files(folder)
    read_all(folder)
    fuzz(examples, lambda: read_all(folder), files.change, victim)


def read_external(folder: Path, config: Config) -> None:
    checkpoint = find_universal(folder)
    parameters = UniversalReader(checkpoint)
    parameters.check_external(config, VOCAB)
    assert parameters.loss_scaler is None and parameters.moments_kind
    for name, spec in model_specs(config, VOCAB, None).items():
        _, moments, _ = parameters.read_parameter(name, spec, TPGroup(1, 2))
        dict(moments)


@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_another_programs_checkpoint(
    examples: int, victim: Path, tmp_path: Path
) -> None:
    folder = universal(tmp_path)
    (folder / "run.json").unlink()
    state = {"iteration": 5, "global_samples": 40, "args": None, "universal_checkpoint_info": {}}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    files = Files(folder)
    read_external(folder, CONFIG)
    fuzz(examples, lambda: read_external(folder, CONFIG), files.change, victim)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("examples", MUTATIONS)
def test_hostile_mutations_of_a_hugging_face_folder(
    examples: int, kind: str, victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    save_hf(folder, "gpt2", max_shard_size="20KB", sizes=(VOCAB, 1))
    (folder / "generation_config.json").unlink()
    if kind == "pytorch_model.bin":
        stored = read_hugging_face(folder).stored
        weights = {name: weight.read().clone() for name, weight in stored.items()}
        for path in folder.glob("*safetensors*"):
            path.unlink()
        torch.save(weights, folder / kind)
    files = Files(folder)

    def read() -> None:
        for _, weight in read_hugging_face(folder).weights():
            weight.sum()

    read()
    fuzz(examples, read, files.change, victim)
