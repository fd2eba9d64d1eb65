"""To use a checkpoint of another framework in a new format, a run needs only a reader for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.state import StateReader, check_shape
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.checkpoint.selection import find_checkpoint
from megatron.config import Config
from megatron.config.registry import Registry
from megatron.errors import UserError
from megatron.model.inference.single_process import GPTModel, model_specs
from megatron.mpu.parameter_spec import ParameterSpec
from tests.support.layouts import EOD, VOCAB, Row, config_of, unconnected_run
from tests.unit.checkpoint.native_folder import random_wholes

FILE = "weights.pt"


class OneFileReader(StateReader):
    """Reads `weights.pt`, a dict of unsharded tensors. It defines only the required methods."""

    @classmethod
    def open_external(cls, folder: Path) -> Checkpoint:
        return Checkpoint(folder, TrainingState(3, 24), {})

    @property
    def stored_names(self) -> Collection[str]:
        return torch.load(self.folder / FILE).keys()

    def state_names(self, name: str) -> list[str]:
        return ["fp32"]

    def read(self, name: str, state_name: str, spec: ParameterSpec | None = None) -> Tensor:
        tensor = torch.load(self.folder / FILE)[name]
        if spec is not None:
            check_shape(tuple(tensor.shape), spec, f"{self.folder}: {name} is")
        return tensor


@pytest.fixture(autouse=True)
def one_file_format(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.CheckpointFormat("one file", f"{__name__}:OneFileReader", markers=(FILE,))
    monkeypatch.setattr(registry, "FORMATS", Registry("format", {**registry.FORMATS, "one_file": entry}))


def find(folder: Path, **model: Any) -> tuple[Config, Checkpoint]:
    config = config_of(Row(), model=model, checkpoint={"load": str(folder)})
    checkpoint = find_checkpoint(unconnected_run(config))
    assert checkpoint is not None
    return config, checkpoint


def test_a_run_finds_and_reads_a_checkpoint_of_a_new_external_format(tmp_path: Path) -> None:
    weights = random_wholes(config_of(Row()))
    torch.save(weights, tmp_path / FILE)
    config, checkpoint = find(tmp_path)
    assert checkpoint.is_external and checkpoint.start_state.iteration == 3
    reader = registry.open_reader(checkpoint)
    assert reader.moments == frozenset() and reader.loss_scaler is None and reader.files_to_verify() == []
    model = GPTModel(config, VOCAB, EOD)
    reader.load_weights(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[: len(weights[name])], weights[name])
    assert weights.keys() == model_specs(config, VOCAB, EOD).keys()


def test_a_new_external_format_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save(random_wholes(config_of(Row())), tmp_path / FILE)
    with pytest.raises(UserError, match="holds another model: it lacks 14 parameters.*it also has 2"):
        find(tmp_path, num_layers=config_of(Row()).model.num_layers + 1)
