"""Readers of checkpoints get thousands of damaged files. They read a file or reject it with a sentence."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.arguments import read_command_line
from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_latest, find_universal
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.reading import read_checkpoint
from megatron.checkpoint.report import overview_text
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis
from megatron.mpu.pieces import Piece
from tests.support.conversion import to_universal
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import save_hf, weights_of
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.hostile import MUTATIONS, fuzz, mutated, mutated_json

CONFIG = config_of(Row(), model={"num_layers": 1})


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Returns a folder beside the checkpoints that no reader may touch."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "fp32.pt").write_text("dear")
    return tmp_path / "victim"


class Files:
    """A folder in which one file at a time is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    def change(self, data: st.DataObject, changes: list[Any]) -> None:
        """Restores every file, then damages one file."""
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
    """Rewrites the archive with a changed pickle, and with checksums that match it."""
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, mutated(member, changes) if name.endswith("data.pkl") else member)


def read_all(folder: Path) -> None:
    """Reads a checkpoint as the tools do."""
    overview_text(inspect_folder(folder, verify=False))
    checkpoint = read_checkpoint(folder)
    find_latest(folder)
    reader = open_reader(checkpoint)
    for name in reader.names:
        for kind in reader.state_names(name):
            reader.read_unpadded(name, kind).sum()
    for _, weight in reader.weights(model_specs(CONFIG, VOCAB, EOD)):
        weight.sum()


# A folder, and a function that reads everything in it.
Case = tuple[Path, Callable[[], object]]


def native(tmp_path: Path) -> Case:
    folder = write_native(tmp_path / "native", CONFIG, random_wholes(CONFIG))
    return folder, lambda: read_all(folder)


def record_that_gives_a_command_its_flags(tmp_path: Path) -> Case:
    saved, folder = native(tmp_path)[0], tmp_path / "records"
    (folder / saved.name).mkdir(parents=True)
    for name in ("latest", f"{saved.name}/run.json"):
        shutil.copy(saved.parent / name, folder / name)
    words = "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 5 --dry-run".split()
    words += ["--load", str(folder), "--use-checkpoint-args"]
    return folder, lambda: read_command_line(words, {})


def source_of_a_conversion(tmp_path: Path) -> Case:
    config = config_of(Row(tp=2), model={"num_layers": 1})
    folder = write_native(tmp_path / "native", config, random_wholes(CONFIG))

    def read() -> None:
        for name in ("out", "out.partial"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        list(to_universal(open_source(folder, derive_patterns=True), tmp_path / "out"))

    return folder, read


def universal(tmp_path: Path) -> Case:
    folder = tmp_path / "universal"
    list(to_universal(open_source(native(tmp_path)[0], derive_patterns=True), folder))
    return folder, lambda: read_all(folder)


def universal_of_another_program(tmp_path: Path) -> Case:
    folder, _ = universal(tmp_path)
    (folder / "run.json").unlink()
    state = {"iteration": 5, "global_samples": 40, "args": None, "universal_checkpoint_info": {}}
    torch.save(state, folder / "mp_rank_00_model_states.pt")

    def read() -> None:
        parameters = UniversalReader(find_universal(folder))
        parameters.check_external(CONFIG, VOCAB)
        assert parameters.loss_scaler is None and parameters.moments is not None
        for name, spec in model_specs(CONFIG, VOCAB, None).items():
            _, moments, _ = parameters.read_parameter(Piece.of_shard(name, spec, [Axis("tp", 1, 2)]))
            for read in moments.values():
                read(None)

    return folder, read


def hugging_face(tmp_path: Path) -> Case:
    folder = tmp_path / "hf"
    save_hf(folder, "gpt2", max_shard_size="20KB", sizes=(VOCAB, 1))
    (folder / "generation_config.json").unlink()

    def read() -> None:
        for _, weight in weights_of(read_hugging_face(folder)):
            weight.sum()

    return folder, read


def hugging_face_saved_by_torch(tmp_path: Path) -> Case:
    folder, read = hugging_face(tmp_path)
    stored = read_hugging_face(folder).stored
    weights = {name: weight.read().clone() for name, weight in stored.items()}
    for path in folder.glob("*safetensors*"):
        path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder, read


IN_GATE = (
    record_that_gives_a_command_its_flags,
    universal_of_another_program,
    hugging_face,
    hugging_face_saved_by_torch,
)
OTHERS = (native, source_of_a_conversion, universal)


@pytest.mark.parametrize("examples", MUTATIONS)
@pytest.mark.parametrize("case", [*IN_GATE, *(pytest.param(case, marks=pytest.mark.full) for case in OTHERS)])
def test_hostile_mutations(case: Callable[[Path], Case], examples: int, victim: Path, tmp_path: Path) -> None:
    folder, read = case(tmp_path)
    files = Files(folder)
    read()
    fuzz(examples // 2 if case is source_of_a_conversion else examples, read, files.change, victim)
